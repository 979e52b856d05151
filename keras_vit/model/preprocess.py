"""The one definition of how an image becomes a model's input, for arrays, PIL images, files and tf.data.

The default is the official evaluation (vit_jax/input_pipeline.py): both sides resized to the model's size, bilinear
without antialias, values -1..1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_vit.model.config import Preprocessing


def prepare(images: Any, *, image_size: tuple[int, int], num_channels: int, preprocessing: Preprocessing) -> Any:
    """Prepares one image or several, of any sizes.

    Args:
        images: an array (height, width), (height, width, channels) or (batch, height, width, channels), uint8 or
            floats from 0 to 255; a PIL image; a path to a JPEG or PNG (other kinds where Pillow is installed);
            or a list of those. Inside `tf.data`, a tensor (height, width, channels), with or without a batch axis.
        image_size: (height, width) wanted.
        num_channels: wanted; grey images are repeated to three, an alpha channel is dropped.
        preprocessing: resize, interpolation, mean and deviation.

    Returns:
        float32 (batch, height, width, channels), NumPy; in tf.data a tensor of the rank that came.

    Raises:
        ValueError: for images of the wrong rank, channels, dtype or value range, or none at all.
        FileNotFoundError: for a path that is not there.
    """
    import tensorflow as tf

    step = in_graph(image_size=image_size, num_channels=num_channels, preprocessing=preprocessing)
    if tf.is_tensor(images) and not isinstance(images, tf.__internal__.EagerTensor):
        return step(images)
    batches = [step(_checked(image)) for image in _each(images, num_channels)]
    if not batches:
        raise ValueError("preprocess needs at least one image. Received: an empty list")
    return np.concatenate([batch.numpy() for batch in batches])


def in_graph(*, image_size: tuple[int, int], num_channels: int, preprocessing: Preprocessing) -> Callable[[Any], Any]:
    """The same preparation as a function of one tensor: TensorFlow operations only, for tf.data and exported graphs.

    Args:
        image_size: (height, width) wanted.
        num_channels: wanted.
        preprocessing: resize, interpolation, mean and deviation.

    Returns:
        a function of an image (height, width, channels) or batch, 0..255, giving float32 of the same rank.
    """
    import tensorflow as tf

    mean = np.array(preprocessing.mean, np.float32) * 255
    std = np.array(preprocessing.std, np.float32) * 255
    resize = _crop if preprocessing.resize == "crop" else _squash

    def step(image: Any) -> Any:
        image = _to_channels(image, num_channels)
        image = resize(image, image_size, preprocessing)
        image = tf.ensure_shape(image, (*image.shape[:-3], *image_size, num_channels))
        return (tf.cast(image, tf.float32) - mean) / std

    return step


def decode(path: str | os.PathLike[str], num_channels: int = 3) -> np.ndarray:
    """Reads an image file: JPEG with the accurate DCT, which equals Pillow's to the bit, and PNG; others by Pillow.

    Args:
        path: of the file.
        num_channels: 3 for colour, 1 for grey.

    Returns:
        uint8 (height, width, num_channels).

    Raises:
        FileNotFoundError: where there is no file.
        ValueError: where it is no image that can be read.
    """
    import tensorflow as tf

    name = os.fspath(path)
    if not tf.io.gfile.exists(name):
        raise FileNotFoundError(f"There is no image file {name!r}")
    if tf.io.gfile.isdir(name):
        raise ValueError(f"{name!r} is a folder, not an image file; pass a list of the files in it")
    data = tf.io.read_file(name)
    magic = data.numpy()[:8]
    # In colour whatever is wanted: TensorFlow's own grey differs between JPEG and PNG, and from Pillow's.
    try:
        if magic.startswith(b"\xff\xd8"):
            pixels = tf.io.decode_jpeg(data, channels=3, dct_method="INTEGER_ACCURATE")
            return _grey_or_colour(pixels, num_channels).numpy()
        if magic == b"\x89PNG\r\n\x1a\n":
            return _grey_or_colour(tf.io.decode_png(data, channels=3), num_channels).numpy()
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(f"{name!r} is a damaged image: {error.message.splitlines()[0]}") from None
    return _decode_with_pillow(name, num_channels)


def _grey_or_colour(pixels: Any, num_channels: int) -> Any:
    import tensorflow as tf

    return pixels if num_channels == 3 else tf.image.rgb_to_grayscale(pixels)


def _decode_with_pillow(name: str, num_channels: int) -> np.ndarray:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError(f"{name!r} is neither JPEG nor PNG; `pip install pillow` reads more kinds") from None
    try:
        with Image.open(name) as image:
            return _from_pil(image, num_channels)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{name!r} is no image that can be read: {error}") from None


def _from_pil(image: Any, num_channels: int) -> np.ndarray:
    pixels = np.asarray(image.convert("RGB" if num_channels == 3 else "L"))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _each(images: Any, num_channels: int) -> list[Any]:
    """The arrays of one image or a list of them."""
    if isinstance(images, str | os.PathLike):
        return [decode(images, num_channels)]
    if isinstance(images, list | tuple):
        return [array for image in images for array in _each(image, num_channels)]
    if hasattr(images, "convert") and hasattr(images, "getbands"):  # a PIL image, without importing Pillow
        return [_from_pil(images, num_channels)]
    return [np.asarray(images)]


def _checked(array: np.ndarray) -> np.ndarray:
    """The array as (batch, height, width, channels), its values known to be 0..255."""
    received = f"Received: {array.dtype} array of shape {array.shape}"
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or 0 in array.shape:
        raise ValueError(f"An image is (height, width, channels), with or without a batch axis. {received}")
    if array.dtype.kind not in "uif":
        raise ValueError(f"Images are uint8 or floats from 0 to 255. {received}")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 255):
        raise ValueError(f"Images hold values from 0 to 255, not prepared ones. {received} with values {low}..{high}")
    if array.dtype.kind == "f" and 0 < high <= 1:
        raise ValueError(
            f"Float images hold values from 0 to 255: multiply by 255. {received} with values {low}..{high}"
        )
    return array if array.dtype == np.uint8 else array.astype(np.float32)


def _to_channels(image: Any, num_channels: int) -> Any:
    import tensorflow as tf

    channels = image.shape[-1]
    if channels == num_channels:
        return image
    if channels == 1:
        return tf.repeat(image, num_channels, axis=-1)
    if channels == 4 and num_channels == 3:
        return image[..., :3]
    raise ValueError(f"The model wants images of {num_channels} channels. Received: {channels} in shape {image.shape}")


def _squash(image: Any, image_size: tuple[int, int], preprocessing: Preprocessing) -> Any:
    import tensorflow as tf

    if tuple(image.shape[-3:-1]) == image_size:  # known beforehand: no work for the graph
        return image
    return tf.image.resize(image, image_size, method=preprocessing.interpolation, antialias=preprocessing.antialias)


def _crop(image: Any, image_size: tuple[int, int], preprocessing: Preprocessing) -> Any:
    import tensorflow as tf

    height, width = tf.unstack(tf.shape(image)[-3:-1])
    # Rounded down as timm does (224 / 0.9 is 248); the tiny number keeps 384 / (384 / 448) at 448.
    wanted = [math.floor(side / preprocessing.crop_fraction + 1e-6) for side in image_size]
    ratio = tf.reduce_max(tf.constant(wanted, tf.float32) / tf.cast([height, width], tf.float32))
    sides = tf.maximum(tf.cast(tf.round(tf.cast([height, width], tf.float32) * ratio), tf.int32), image_size)
    image = tf.image.resize(image, sides, method=preprocessing.interpolation, antialias=preprocessing.antialias)
    top, left = tf.unstack((sides - tf.constant(image_size)) // 2)
    return image[..., top : top + image_size[0], left : left + image_size[1], :]
