"""Read and write files of a training run in a local folder or in a bucket, through `tf.io.gfile`.

Paths are strings, because `pathlib` would change `gs://bucket` to `gs:/bucket`. Objects of a bucket are complete and
durable once they exist.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from keras_vit._util.atomic import replacing
from keras_vit._util.text import error_reason


def is_local(path: str) -> bool:
    """Return whether a path is on a file system of this machine, not a URL."""
    return "://" not in path


def plain_path(folder: str | os.PathLike[str]) -> str:
    """Return a path, local or `gs://bucket/path`, without `file://` and a final slash."""
    return os.fspath(folder).removeprefix("file://").rstrip("/")


def make_folder(folder: str | os.PathLike[str]) -> str:
    """Create a folder, local or `gs://bucket/path`, if it does not exist; return its plain path."""
    path = plain_path(folder)
    tf.io.gfile.makedirs(path)
    return path


def sync(*paths: str) -> None:
    """Flush local files and folders to the disk, so that they survive a power cut."""
    for path in map(Path, filter(is_local, paths)):
        if os.name == "nt" and path.is_dir():  # Windows does not open folders, and logs their changes itself
            continue
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace(path: str, data: bytes) -> None:
    """Write a file durably, complete or not at all."""
    if is_local(path):
        with replacing(Path(path)) as file:
            file.write(data)
        sync(str(Path(path).parent))
    else:
        with tf.io.gfile.GFile(path, "wb") as file:
            file.write(data)


def read(path: str) -> bytes:
    """Return the bytes of a file, or raise a `tf.errors.OpError`."""
    with tf.io.gfile.GFile(path, "rb") as file:
        return bytes(file.read())


def remove(path: str) -> None:
    """Delete a file or a folder with its contents, if it exists."""
    delete = tf.io.gfile.rmtree if tf.io.gfile.isdir(path) else tf.io.gfile.remove
    with contextlib.suppress(tf.errors.NotFoundError):
        delete(path)


@contextlib.contextmanager
def as_os_error(message: str) -> Iterator[None]:
    """Convert errors of Python's and TensorFlow's file functions to an OSError: message, reason, what to do."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        text = getattr(error, "message", "") or str(error) or type(error).__name__
        raise OSError(
            f"{message}: {error_reason(text)[:300]}. Make room there if the disk is full, and start again."
        ) from error
