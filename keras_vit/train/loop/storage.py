"""Files of a training run, in a local folder or in a bucket.

Paths are strings, so that `gs://bucket/folder` survives. Everything goes through `tf.io.gfile`; only `fsync` and
replacing by renaming are for local folders alone. An object of a bucket appears whole or not at all, and stays,
without either.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from keras_vit._util.atomic import replacing

# What TensorFlow puts around the reason of an error: {{function_node ...}} and [Op:...].
GRAPH_NAMES = re.compile(r"\{\{.*?\}\} | \[Op:.*?\]")


def is_local(path: str) -> bool:
    """Whether a path is on a file system of this machine rather than a URL."""
    return "://" not in path


def made_folder(folder: str | os.PathLike[str]) -> str:
    """Makes a folder where there is none yet.

    Args:
        folder: A local path, or a URL that TensorFlow can write (`gs://bucket/path`).

    Returns:
        It as a string, without a slash at the end.
    """
    path = os.fspath(folder).removeprefix("file://").rstrip("/")
    tf.io.gfile.makedirs(path)
    return path


def settle(*paths: str) -> None:
    """Returns when local files, and folders as lists of names, are on the disk and would outlive a power cut."""
    for path in map(Path, filter(is_local, paths)):
        if os.name == "nt" and path.is_dir():  # Windows opens no folders, and logs their changes itself
            continue
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace(path: str, data: bytes) -> None:
    """Writes a file that is there whole, and durably, or not at all."""
    if is_local(path):
        with replacing(Path(path)) as file:
            file.write(data)
        settle(str(Path(path).parent))
    else:
        with tf.io.gfile.GFile(path, "wb") as file:
            file.write(data)


def read(path: str) -> bytes:
    """The bytes of a file.

    Raises:
        tf.errors.OpError: It cannot be read; `tf.errors.NotFoundError` where there is none.
    """
    with tf.io.gfile.GFile(path, "rb") as file:
        return bytes(file.read())


def remove(path: str) -> None:
    """Deletes a file, or a folder with all that is in it, where there is one."""
    delete = tf.io.gfile.rmtree if tf.io.gfile.isdir(path) else tf.io.gfile.remove
    with contextlib.suppress(tf.errors.NotFoundError):
        delete(path)


@contextlib.contextmanager
def plain_errors(message: str) -> Iterator[None]:
    """Turns the errors of Python's and TensorFlow's file functions into one.

    Args:
        message: What could not be done, and where.

    Raises:
        OSError: In place of any of them: the message, the reason, what to do.
    """
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        text = getattr(error, "message", "") or str(error) or type(error).__name__
        reason = GRAPH_NAMES.sub("", text).partition("\n")[0][:300]
        raise OSError(f"{message}: {reason}. Make room there if the disk is full, and start again.") from error
