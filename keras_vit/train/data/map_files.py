"""Read the files of maps: masks with the numbers of classes, and distances.

| kind | file | a pixel without a label |
|---|---|---|
| mask | PNG with one channel, grey or with a palette (its colours mean nothing): 0 to 254 | 255 |
| depth | PNG of 16 bits in 1/`scale` m; or .npy, floats (height, width) in metres | 0; in .npy also NaN |

TensorFlow's decoder is not used: it replaces the indices of a palette by its colours, and widens numbers of fewer bits.
"""

import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit._util.text import escaped, install_command
from keras_vit.model.images import jpeg_png
from keras_vit.train.data.dataset_files import python_errors, read_image

MILLIMETRES = 1000.0  # values per metre of NYU Depth V2's files; KITTI's have 256
NPY = ".npy"
ONE_CHANNEL = ("1", "L", "P")  # Pillow's modes of 1 to 8 bits
SIXTEEN_BITS = ("I;16", "I;16B", "I")
_BIT_DEPTH, _COLOUR_TYPE = 24, 25  # their places in a PNG file


def read_mask(data: bytes) -> np.ndarray:
    """Return the numbers of classes in a PNG file, uint8 (height, width)."""
    mode, values = _decode_png(data)
    if mode not in ONE_CHANNEL:
        raise ValueError(
            f"must be a PNG with one channel of 8 bits, the numbers of classes. Received: {mode}"
            f"{', colours: replace each by the number of its class' if mode.startswith('RGB') else ''}"
        )
    bits = data[_BIT_DEPTH]
    if mode == "L" and bits < 8 and data[_COLOUR_TYPE] == 0:
        values = values // (255 // (2**bits - 1))  # Pillow widens grey values
    return values.astype(np.uint8)


def read_depth(data: bytes, scale: float = MILLIMETRES) -> np.ndarray:
    """Return the distances in a PNG or .npy file in metres, float32 (height, width); 0 where they are not known."""
    if data.startswith(b"\x93NUMPY"):
        values = np.load(io.BytesIO(data), allow_pickle=False)
        if values.ndim != 2 or values.dtype.kind != "f":
            raise ValueError(f"must be floats (height, width) in metres. Received: {values.dtype} {values.shape}")
        metres = np.nan_to_num(values.astype(np.float32), nan=0.0)
    else:
        mode, values = _decode_png(data)
        if mode not in SIXTEEN_BITS:
            raise ValueError(f"must be a PNG with one channel of 16 bits, or .npy. Received: {mode}")
        metres = values.astype(np.float32) / np.float32(scale)
    if not (np.isfinite(metres).all() and metres.min(initial=0) >= 0):
        raise ValueError("must have distances of 0 m or more. Received: negative or infinite ones")
    return metres


def _decode_png(data: bytes) -> tuple[str, np.ndarray]:
    """Return the mode of an image in Pillow and its values."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(f"Reading maps needs the package pillow: `{install_command('train')}`") from None
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            width, height = image.size
            if height * width > jpeg_png.MAX_PIXELS:
                raise ValueError(f"{jpeg_png.PIXEL_LIMITS} Received: height and width {height} x {width}")
            return image.mode, np.asarray(image)
    except Exception as error:  # Pillow's readers raise errors of many types
        raise ValueError(f"cannot be decoded as PNG: {str(error) or type(error).__name__}") from None


def load(path: str, read: Callable[[bytes], np.ndarray]) -> np.ndarray:
    """Read a local or remote file of a map; the ValueError about its content names it."""
    with python_errors(path):
        data = tf.io.read_file(os.fsencode(path)).numpy()
    try:
        return read(data)
    except ValueError as error:
        raise ValueError(f"{escaped(path)} {error}") from None


def load_in_graph(path: Any, read: Callable[[bytes], np.ndarray], dtype: tf.DType) -> Any:
    """Read the file of a map in a graph: (height, width)."""

    def in_python(name: Any) -> np.ndarray:
        return load(os.fsdecode(np.asarray(name, object).item()), read)

    return tf.ensure_shape(tf.numpy_function(in_python, [path], dtype, stateful=False), (None, None))


def check_size(image: str, map: str, values: np.ndarray) -> None:
    """Raise a ValueError unless a map has the height and width of its image as a viewer shows it."""
    header = jpeg_png.read_header(read_image(os.fsencode(image)))
    height, width = jpeg_png.upright_sides(tf.cast(header.sides, tf.int32), header.orientation).numpy()
    if values.shape != (height, width):
        received = " x ".join(str(side) for side in values.shape)
        raise ValueError(f"{escaped(map)} must have the size of its image, {height} x {width}. Received: {received}")
