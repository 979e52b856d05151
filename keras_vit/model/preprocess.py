"""Prepare images for a model: arrays, PIL images, image files and tensors in tf.data, all in the same way."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_vit.model.config import Preprocessing


def prepare(images: Any, *, image_size: tuple[int, int], num_channels: int, preprocessing: Preprocessing) -> Any:
    """Prepare one image or several images of any sizes, as `VisionTransformer.preprocess` takes them.

    Returns float32 (batch, height, width, channels) in NumPy; for a symbolic tensor (in `tf.data`) a tensor of the
    same rank. Grey images are repeated to three channels, an alpha channel is dropped.
    """
    import tensorflow as tf

    prepare_batch = preprocessing_function(
        image_size=image_size, num_channels=num_channels, preprocessing=preprocessing
    )
    if tf.is_tensor(images) and not isinstance(images, tf.__internal__.EagerTensor):
        return prepare_batch(images)
    batches = [prepare_batch(_check_batch(array)) for array in _arrays(images, num_channels)]
    if not batches:
        raise ValueError("preprocess needs at least one image. Received: an empty list")
    return np.concatenate([batch.numpy() for batch in batches])


def preprocessing_function(
    *, image_size: tuple[int, int], num_channels: int, preprocessing: Preprocessing
) -> Callable[[Any], Any]:
    """Return a function that prepares one tensor, with TensorFlow operations only, for tf.data and exports.

    The function takes (height, width, channels), with or without a batch axis, from 0 to 255, and returns float32.
    """
    import tensorflow as tf

    mean = np.array(preprocessing.mean, np.float32) * 255
    std = np.array(preprocessing.std, np.float32) * 255
    resize = _crop if preprocessing.resize == "crop" else _squash

    def prepare_tensor(image: Any) -> Any:
        image = _to_channels(image, num_channels)
        image = resize(image, image_size, preprocessing)
        image = tf.ensure_shape(image, (*image.shape[:-3], *image_size, num_channels))
        return (tf.cast(image, tf.float32) - mean) / std

    return prepare_tensor


def decode(path: str | os.PathLike[str], num_channels: int = 3) -> np.ndarray:
    """Read an image file as uint8 (height, width, num_channels): JPEG, PNG, and with Pillow more formats."""
    import tensorflow as tf

    name = os.fspath(path)
    if not tf.io.gfile.exists(name):
        raise FileNotFoundError(f"There is no image file {name!r}")
    if tf.io.gfile.isdir(name):
        raise ValueError(f"{name!r} is a folder, not an image file; pass a list of the files in it")
    data = tf.io.read_file(name)
    magic = data.numpy()[:8]
    # Decode in colour, then convert: TensorFlow's decoders compute grey in different ways for JPEG and PNG.
    try:
        if magic.startswith(b"\xff\xd8"):
            pixels = tf.io.decode_jpeg(data, channels=3, dct_method="INTEGER_ACCURATE")  # equal to Pillow's
            return _with_channels(pixels, num_channels)
        if magic == b"\x89PNG\r\n\x1a\n":
            return _with_channels(tf.io.decode_png(data, channels=3), num_channels)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(f"{name!r} is a damaged image: {error.message.splitlines()[0]}") from None
    return _decode_with_pillow(name, num_channels)


def _with_channels(pixels: Any, num_channels: int) -> np.ndarray:
    import tensorflow as tf

    converted: np.ndarray = (pixels if num_channels == 3 else tf.image.rgb_to_grayscale(pixels)).numpy()
    return converted


def _decode_with_pillow(name: str, num_channels: int) -> np.ndarray:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError(f"{name!r} is neither JPEG nor PNG; `pip install pillow` reads more formats") from None
    try:
        with Image.open(name) as image:
            return _from_pil(image, num_channels)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{name!r} is not an image that can be read: {error}") from None


def _from_pil(image: Any, num_channels: int) -> np.ndarray:
    pixels = np.asarray(image.convert("RGB" if num_channels == 3 else "L"))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _arrays(images: Any, num_channels: int) -> list[Any]:
    """Return the arrays of one image or of a list of images."""
    if isinstance(images, str | os.PathLike):
        return [decode(images, num_channels)]
    if isinstance(images, list | tuple):
        return [array for image in images for array in _arrays(image, num_channels)]
    if hasattr(images, "convert") and hasattr(images, "getbands"):  # a PIL image, without importing Pillow
        return [_from_pil(images, num_channels)]
    return [np.asarray(images)]


def _check_batch(array: np.ndarray) -> np.ndarray:
    """Return an array as (batch, height, width, channels); a ValueError if its values are not from 0 to 255."""
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
        raise ValueError(f"Images are pixels from 0 to 255, not prepared ones. {received} with values {low}..{high}")
    if array.dtype.kind == "f" and 0 < high <= 1:
        raise ValueError(
            f"Float images must hold values from 0 to 255: multiply by 255. {received} with values {low}..{high}"
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
    raise ValueError(f"The model takes images of {num_channels} channels. Received: {channels} in shape {image.shape}")


def _squash(image: Any, image_size: tuple[int, int], preprocessing: Preprocessing) -> Any:
    import tensorflow as tf

    if tuple(image.shape[-3:-1]) == image_size:  # the static shape: no operation in the graph
        return image
    return tf.image.resize(image, image_size, method=preprocessing.interpolation, antialias=preprocessing.antialias)


def _crop(image: Any, image_size: tuple[int, int], preprocessing: Preprocessing) -> Any:
    import tensorflow as tf

    height, width = tf.unstack(tf.shape(image)[-3:-1])
    # Rounded down as in timm (224 / 0.9 is 248); 1e-6 corrects floats, so that 384 / (384 / 448) is 448.
    wanted = [math.floor(side / preprocessing.crop_fraction + 1e-6) for side in image_size]
    ratio = tf.reduce_max(tf.constant(wanted, tf.float32) / tf.cast([height, width], tf.float32))
    sides = tf.maximum(tf.cast(tf.round(tf.cast([height, width], tf.float32) * ratio), tf.int32), image_size)
    image = tf.image.resize(image, sides, method=preprocessing.interpolation, antialias=preprocessing.antialias)
    top, left = tf.unstack((sides - tf.constant(image_size)) // 2)
    return image[..., top : top + image_size[0], left : left + image_size[1], :]
