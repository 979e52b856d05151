"""List folders, read image files, and tell whether they can be decoded.

JPEG and PNG files are read as they are; Pillow converts other kinds to PNG.
"""

import contextlib
import functools
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit._util.text import error_reason, escaped
from keras_vit.model import images
from keras_vit.model.config import Preprocessing
from keras_vit.model.pillow import BYTES, decode_with_pillow, is_jpeg_or_png, pillow_values

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
    """Check if a path needs TensorFlow's file systems; Python's accept names that are not valid UTF-8."""
    return "://" in path


def has_opacity(path: str) -> bool:
    """Check if the header of a local PNG file declares a fourth channel, or a palette with opacity."""
    if is_remote(path) or not path.lower().endswith(".png"):
        return False
    try:
        with Path(path).open("rb") as file:
            return images.declares_opacity(file.read(2048))  # a palette has at most 768 bytes
    except OSError:  # which the reader names
        return False


def is_folder(path: str) -> bool:
    """Check if a local or remote path is a folder, or a link to one."""
    return tf.io.gfile.isdir(path) if is_remote(path) else Path(path).is_dir()


def list_files(folder: str) -> tuple[list[str], list[str]]:
    """List a folder's files, and everything that has no content to read, sorted.

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
    """Name of a local entry, with a slash for a folder, and True for a regular file; links are followed."""
    try:
        return entry.name + "/" * entry.is_dir(), entry.is_file()
    except OSError:  # a link to itself
        return entry.name, False


def read_image(path: tf.Tensor | bytes, preprocessing: Preprocessing = BYTES) -> tf.Tensor:
    """Read an image file as JPEG or PNG; unchanged if Pillow cannot read it either.

    Grey of 16 bits stays so, which a model with this preprocessing scales.
    """
    data = tf.io.read_file(path)
    is_plain = tf.io.is_jpeg(data) | (tf.strings.substr(data, 0, len(PNG)) == PNG)

    def convert() -> tf.Tensor:
        to_png = functools.partial(_convert_to_png, preprocessing=preprocessing)
        return tf.numpy_function(to_png, [data], tf.string, stateful=False)

    return tf.ensure_shape(tf.cond(is_plain, lambda: data, convert), ())


def _convert_to_png(file: Any, *, preprocessing: Preprocessing) -> Any:
    """Convert the first picture of a BMP, GIF, TIFF or WebP file, a string scalar; return other data unchanged."""
    data = np.asarray(file, object).item()  # bytes in a graph, an array outside
    try:
        from PIL import Image

        with Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
            pixels = pillow_values(image, preprocessing)
    except Exception:  # Pillow's readers raise errors of many types
        return file
    if pixels.dtype not in (np.uint8, np.uint16):  # floats and 32 bits, which a PNG does not have
        return file
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    return np.array(tf.io.encode_png(pixels, compression=0).numpy(), object)


def is_decodable(image: tf.Tensor | bytes) -> bool:
    """Check that an encoded image is a complete JPEG or PNG file that `model.preprocess` would read."""
    return decoding_problem(image) is None


def decoding_problem(image: tf.Tensor | bytes) -> str | None:
    """Say why an image, as `read_image` returns it, cannot be decoded; None if it can."""
    data = np.asarray(image, object).item()
    try:
        if not is_jpeg_or_png(data):
            decode_with_pillow(data)
            return f"is not one of JPEG, PNG, {', '.join(PILLOW_FORMATS)}. Save it as JPEG or PNG"
        images.check_image(image)
        # At an eighth of its size a JPEG decodes faster, and the same damage is found.
        tf.io.decode_jpeg(image, channels=3, ratio=8)
    except ValueError as error:
        return str(error)
    except tf.errors.InvalidArgumentError as error:
        return f"is a damaged image: {error_reason(error.message)}"
    return None


def hash64(text: str) -> int:
    """Hash a text with a file name, which may not be valid UTF-8, to 64 bits."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(text), digest_size=8).digest(), "big")
