"""List folders, read image files, and find those that cannot be decoded before the training starts.

JPEG and PNG files are read as they are; Pillow converts other kinds to PNG. The cache folder keeps a fingerprint (name,
length, modification time) of each decodable file, so that later runs decode only new, changed and damaged files.
"""

import contextlib
import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from keras_vit._util.atomic import replacing
from keras_vit._util.downloads import cache_folder
from keras_vit._util.progress import track
from keras_vit._util.text import error_reason, escaped
from keras_vit.model.images import pillow
from keras_vit.model.images.jpeg_png import check

CHUNK = 4096  # files submitted at a time, because a thread pool keeps a record of each
PNG = b"\x89PNG"
PILLOW_FORMATS = ("BMP", "GIF", "TIFF", "WEBP")  # besides JPEG and PNG

READ_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.FailedPreconditionError,
    tf.errors.DataLossError,  # a record's checksum
    UnicodeDecodeError,  # in place of one of these with bytes of a record in its message
)

Item = TypeVar("Item")


@contextlib.contextmanager
def python_errors(path: str) -> Iterator[None]:
    """Replace errors about a path by a PermissionError or a FileNotFoundError that names it."""
    path = escaped(path)
    try:
        yield
    except (tf.errors.PermissionDeniedError, PermissionError) as error:
        raise PermissionError(f"{path} may not be read: change its permissions, or the user.") from error
    except (tf.errors.NotFoundError, tf.errors.FailedPreconditionError, FileNotFoundError, NotADirectoryError) as error:
        reason = getattr(error, "message", None) or error
        raise FileNotFoundError(f"{path} does not exist, or is not a folder: {reason}") from error


def is_remote(path: str) -> bool:
    """Return whether TensorFlow's file systems have to be used; Python's accept names that are not valid UTF-8."""
    return "://" in path


def is_folder(path: str) -> bool:
    """Return whether a local or remote path is a folder, or a link to one."""
    return tf.io.gfile.isdir(path) if is_remote(path) else Path(path).is_dir()


@contextlib.contextmanager
def name_bad_image(find: Callable[[], str | None]) -> Iterator[None]:
    """Name the image that `find` returns in place of TensorFlow's error, if it was damaged or deleted meanwhile."""
    try:
        yield
    except READ_ERRORS as error:
        try:
            name = find()
        except READ_ERRORS as cause:
            name = error_reason(getattr(cause, "message", None) or str(cause))
            if isinstance(cause, tf.errors.DataLossError | UnicodeDecodeError):  # of a file of records
                raise ValueError(f"An example cannot be read: {name}") from error
        if name is None:
            raise
        raise ValueError(
            f"{name}: an image that was complete at the start cannot be decoded any more. Restore the file, or put an"
            " empty one in its place, which is skipped and counted. Then start the same run again: it continues after"
            " its last checkpoint."
        ) from error


def list_files(folder: str) -> tuple[list[str], list[str]]:
    """Return the sorted names of a folder's files, and of everything that has no content to read.

    The others are folders ("name/"), broken links, named pipes, sockets, and devices such as a link to /dev/zero.
    """
    with python_errors(folder):
        if is_remote(folder):
            kinds = {name: not name.endswith("/") for name in tf.io.gfile.listdir(folder)}  # as gs:// marks folders
        else:
            with os.scandir(folder) as entries:
                kinds = dict(map(_kind, entries))
    names = sorted(kinds)
    return [name for name in names if kinds[name]], [name for name in names if not kinds[name]]


def _kind(entry: os.DirEntry[str]) -> tuple[str, bool]:
    """Return the name of a local entry, with a slash for a folder, and whether it is a regular file; follow links."""
    try:
        return entry.name + "/" * entry.is_dir(), entry.is_file()
    except OSError:  # a link to itself
        return entry.name, False


def read_image(path: tf.Tensor | bytes) -> tf.Tensor:
    """Return the content of an image file as JPEG or PNG; unchanged if Pillow cannot read it either."""
    data = tf.io.read_file(path)
    is_plain = tf.io.is_jpeg(data) | (tf.strings.substr(data, 0, len(PNG)) == PNG)
    converted = lambda: tf.numpy_function(_as_png, [data], tf.string, stateful=False)  # noqa: E731
    return tf.ensure_shape(tf.cond(is_plain, lambda: data, converted), ())


def _as_png(file: Any) -> Any:
    """Convert the first picture of a BMP, GIF, TIFF or WebP file, a string scalar; return other data unchanged."""
    data = np.asarray(file, object).item()  # bytes in a graph, an array outside
    try:
        from PIL import Image

        with Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
            pixels = pillow.pixels(image)
    except Exception:  # Pillow's readers raise errors of many types
        return file
    return np.array(tf.io.encode_png(pixels, compression=0).numpy(), object)


def is_decodable(image: tf.Tensor | bytes) -> bool:
    """Return whether an encoded image is a complete JPEG or PNG file that `model.preprocess` would read."""
    try:
        check(image)
        # At an eighth of its size a JPEG decodes more than twice as fast, and the same damage is found.
        return bool(tf.size(tf.io.decode_jpeg(image, channels=3, ratio=8)))
    except (ValueError, tf.errors.InvalidArgumentError):
        return False


def find_damaged(
    folder: str,
    files: Sequence[str],
    maps: Sequence[str] | None = None,
    check: Callable[[str, str], bool] | None = None,
    version: str = "",
) -> list[int]:
    """Return the ascending indices in `files`, paths relative to the folder, of the images that cannot be decoded.

    With `maps`, one file for each image, also of those for which `check(path of the image, path of the map)` is False.
    Files that were checked with the same `version` of a check are not checked again.
    """
    where = folder if is_remote(folder) else os.path.realpath(folder)
    # "checked-images" is the list of versions that decoded other files.
    name = hashlib.blake2b(os.fsencode(where), digest_size=16).hexdigest()
    cache = cache_folder() / "decodable-images" / f"{name}.npy"
    sets = [(file,) for file in files] if maps is None else list(zip(files, maps, strict=True))
    with ThreadPoolExecutor(max_workers=2 * (os.cpu_count() or 1)) as pool:
        fingerprints = np.fromiter(
            _map(pool, lambda names: _fingerprint(folder, names, version), sets), np.uint64, len(sets)
        )
        new = np.flatnonzero(~np.isin(fingerprints, _load_fingerprints(cache)))
        paths = [[f"{folder}/{file}" for file in sets[index]] for index in new]
        checks = _map(pool, lambda paths: _check_file(paths[0]) and (check is None or check(*paths)), paths)
        checks = track(checks, "Checking images", total=len(new), show=len(new) > 0)
        damaged = new[~np.fromiter(checks, bool, len(new))]
    if len(new) > len(damaged):
        # Loaded again, because other files of the folder may have been checked meanwhile.
        _save_fingerprints(cache, np.union1d(_load_fingerprints(cache), np.delete(fingerprints, damaged)))
    return damaged.tolist()


def _map(pool: ThreadPoolExecutor, function: Callable[[Item], Any], items: Sequence[Item]) -> Iterator[Any]:
    for start in range(0, len(items), CHUNK):
        yield from pool.map(function, items[start : start + CHUNK])


def _check_file(path: str) -> bool:
    with python_errors(path):
        return is_decodable(read_image(os.fsencode(path)))


def _fingerprint(folder: str, files: Sequence[str], version: str) -> int:
    """Return a 64-bit fingerprint of an image, or of an image and its map, which changes when a file does."""
    parts = [version] if version else []
    for file in files:
        path = f"{folder}/{file}"
        with python_errors(path):
            if is_remote(folder):
                remote = tf.io.gfile.stat(path)
                length, changed = remote.length, remote.mtime_nsec
            else:
                stat = Path(path).stat()
                length, changed = stat.st_size, stat.st_mtime_ns
        parts.append(f"{file} {length} {changed}")
    return hash64(" ".join(parts))


def hash64(text: str) -> int:
    """Return 64 bits of a text with a file name, which may not be valid UTF-8."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(text), digest_size=8).digest(), "big")


def _load_fingerprints(cache: Path) -> np.ndarray:
    if cache.exists():
        try:
            return np.load(cache)
        except (OSError, ValueError) as error:
            warnings.warn(f"{cache} cannot be read ({error}): all images are checked again.", stacklevel=2)
    return np.zeros(0, np.uint64)


def _save_fingerprints(cache: Path, fingerprints: np.ndarray) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cache) as file:
            np.save(file, fingerprints)
    except OSError as error:
        warnings.warn(
            f"The list of checked images cannot be written to {cache.parent} ({error}): the next run will check all"
            " images again. Set KERAS_VIT_CACHE to a writable folder.",
            stacklevel=2,
        )
