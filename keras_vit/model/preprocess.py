"""Prepare images for a model: arrays, PIL images, image files and tensors in tf.data, all in the same way."""

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_vit._util.files import read_file, read_limited
from keras_vit._util.text import warn
from keras_vit.model import values
from keras_vit.model.config import Preprocessing, ViTConfig
from keras_vit.model.pillow import CHANNELS, decode_with_pillow, is_jpeg_or_png, on_white, pillow_pixels, to_grey
from keras_vit.model.resizing import (
    MAX_ASPECT,
    PILLOW_ONE,
    is_height_first,
    pillow_weights,
    resize_arrays,
    size_before_crop,
)

DOWNLOADED = ("http://", "https://", "hf://")


def prepare(images: Any, *, image_size: tuple[int, int], num_channels: int, preprocessing: Preprocessing) -> Any:
    """Prepare one image or several images of any sizes, as `VisionTransformer.preprocess` takes them.

    Returns float32 (batch, height, width, channels) in NumPy; for a symbolic tensor (in `tf.data`) a tensor of the
    same rank. Grey images are repeated to three channels; transparent pixels, by a fourth channel, are put on white.
    """
    if _is_symbolic(images):
        prepare_tensor = preprocessing_function(
            image_size=image_size, num_channels=num_channels, preprocessing=preprocessing
        )
        return prepare_tensor(symbolic_pixels(images, preprocessing))
    how: Any = {"image_size": image_size, "num_channels": num_channels, "preprocessing": preprocessing}
    batches = [prepare_pixels(array, **how) for array in to_arrays(images, num_channels, preprocessing)]
    if not batches:
        raise ValueError("preprocess needs at least one image. Received: an empty list")
    return np.concatenate(batches)


def prepare_bytes(data: bytes, config: ViTConfig) -> np.ndarray:
    """Prepare the content of an image file for a model: float32 (height, width, channels); errors of `decode_bytes`."""
    pixels = decode_bytes(data, config.num_channels, config.preprocessing)
    how: Any = {"image_size": config.size, "num_channels": config.num_channels, "preprocessing": config.preprocessing}
    return prepare_pixels(pixels[None], **how)[0]


def _is_symbolic(images: Any) -> bool:
    """Check for a tensor of a TensorFlow graph. Without TensorFlow in this process there is none."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and tf.is_tensor(images) and not isinstance(images, tf.__internal__.EagerTensor)


def prepare_pixels(
    pixels: np.ndarray, *, image_size: tuple[int, int], num_channels: int, preprocessing: Preprocessing
) -> np.ndarray:
    """Prepare pixels of 0..255, (batch, height, width, channels), as `decode` and `to_arrays` return them.

    They are scaled already: `bits` and `range` of the preprocessing are not applied again. It computes in NumPy what
    `preprocessing_function` does.
    """
    kind = check_channels(pixels.shape, num_channels)
    if kind == "grey":
        pixels = np.repeat(pixels, num_channels, axis=-1)
    elif kind == "opacity":
        pixels = on_white(pixels)
    prepared: np.ndarray = normalize(resize_arrays(pixels, image_size, preprocessing), preprocessing)
    return prepared


FAR = 10  # times the largest value that a preparation gives; pixels of 0..255 are about 100 to 255 times it


def check_floats(images: Any) -> None:
    """Raise a ValueError for whole numbers where prepared images belong. Other things than arrays are left to Keras."""
    dtype = getattr(images, "dtype", None)
    kind = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if kind.startswith(("int", "uint", "bool")):
        raise ValueError(
            "The model takes prepared images, which are floats: model(model.preprocess(images)), or "
            f"model.classify(images), which does both. Received: {kind}"
        )


def check_prepared(images: Any, config: Any) -> None:
    """Raise a ValueError for whole numbers; warn of floats that only pixels can be, which a compiled function can't."""
    check_floats(images)
    if not isinstance(images, np.ndarray) and not hasattr(images, "numpy"):
        return
    first = np.abs(np.asarray(images[:1], np.float32)) if len(images.shape) else np.zeros(1)
    mean, std = (np.array(numbers) for numbers in (config.preprocessing.mean, config.preprocessing.std))
    most = FAR * float(np.abs([mean / std, (1 - mean) / std]).max())
    if first.max(initial=0) > most:
        warn(
            f"keras_vit: the images have values beyond {most:.0f}, {FAR} times those of prepared images: "
            "model.preprocess(images) prepares pixels, model.classify(images) does all"
        )


def preprocessing_function(
    *, image_size: tuple[int, int], num_channels: int, preprocessing: Preprocessing
) -> Callable[[Any], Any]:
    """Make a TensorFlow function from images (..., height, width, channels) of 0..255 to prepared ones, float32."""
    import tensorflow as tf

    resize = _crop if preprocessing.resize == "crop" else _squash

    def prepare_tensor(image: Any) -> Any:
        image = _to_channels(image, num_channels)
        image = resize(image, image_size, preprocessing)
        image = tf.ensure_shape(image, (*image.shape[:-3], *image_size, num_channels))
        return normalize(tf.cast(image, tf.float32), preprocessing)

    return prepare_tensor


def without_normalization(preprocessing: Preprocessing, *, cuts: bool) -> Preprocessing:
    """How pictures become pixels of 0..255 for what normalizes them itself; `cuts` keeps the crop fraction."""
    share = preprocessing.crop_fraction if cuts else 1.0
    return dataclasses.replace(preprocessing, mean=(0.0,), std=(1 / 255,), crop_fraction=share)


def normalize(pixels: Any, preprocessing: Preprocessing) -> Any:
    """Scale pixels of 0..255, uint8 arrays or float32, to the model's range: float32."""
    mean, std = (np.array(numbers, np.float32) * 255 for numbers in (preprocessing.mean, preprocessing.std))
    return (pixels - mean) / std


def symbolic_pixels(images: Any, preprocessing: Preprocessing) -> Any:
    """Scale a tensor that is not of bytes to pixels, float32, if the preprocessing states its values."""
    import tensorflow as tf

    if preprocessing.limits is None or images.dtype == tf.uint8:
        return images
    return values.scale(tf.cast(images, tf.float32), preprocessing, tf.clip_by_value)


def decode(
    path: str | os.PathLike[str], num_channels: int = 3, preprocessing: Preprocessing | None = None
) -> np.ndarray:
    """Read an image file upright, as uint8 (height, width, num_channels): JPEG, PNG, and with Pillow more formats.

    Where the preprocessing states `bits` or `range`, the result is float32, from 0 to 255.

    The file of an http, https or hf URL is downloaded into the cache folder; `tf.io.gfile` reads others, such as gs://.
    A file that is not an image, or has more than `pillow.MAX_PIXELS` pixels, raises a ValueError with the reason.
    """
    name = os.fspath(path)
    if name.startswith(DOWNLOADED):
        return _download_and_decode(name, num_channels, preprocessing)
    local = name.removeprefix("file://")
    data = _read_remote_file(name) if "://" in local else read_file(local)
    try:
        return decode_bytes(data, num_channels, preprocessing)
    except ValueError as error:
        raise ValueError(f"{name!r} {error}") from None


def decode_bytes(data: bytes, num_channels: int, preprocessing: Preprocessing | None = None) -> np.ndarray:
    """Decode the content of an image file as `decode` does. The message of a ValueError lacks the file's name."""
    check_file_channels(num_channels)
    stated = preprocessing or Preprocessing()
    if is_jpeg_or_png(data):
        from keras_vit.model.images import decode_image

        pixels = np.asarray(decode_image(data, stated))
    else:
        pixels = decode_with_pillow(data, stated)
    return with_channels(pixels, num_channels)


def _read_remote_file(name: str) -> bytes:
    import tensorflow as tf

    try:
        with tf.io.gfile.GFile(name, "rb") as file:
            return read_limited(file, name)
    except tf.errors.OpError as error:
        raise FileNotFoundError(f"There is no image file {name!r}, or it cannot be read: {error.message}") from None


def _download_and_decode(url: str, num_channels: int, preprocessing: Preprocessing | None) -> np.ndarray:
    """Decode a file of a web server; the cache folder keeps it only if it is an image."""
    from keras_vit._util.downloads import fetch
    from keras_vit._util.files import cache_folder

    local = fetch(url)
    try:
        return decode(local, num_channels, preprocessing)
    except ValueError as error:
        if local.is_relative_to(cache_folder()):  # a mirror's folder keeps its files
            local.unlink(missing_ok=True)
        raise ValueError(str(error).replace(repr(os.fspath(local)), url)) from None


def with_channels(pixels: np.ndarray, num_channels: int) -> np.ndarray:
    """Convert pixels to grey if the model takes one channel: TensorFlow's formula for files of all formats."""
    check_file_channels(num_channels)
    return pixels if num_channels == 3 else to_grey(pixels)


def check_file_channels(num_channels: int) -> None:
    """Raise a ValueError for a model of channels that image files do not have."""
    if num_channels not in CHANNELS:
        raise ValueError(
            f"Image files are read as 1 channel (grey) or 3 (colour), and the model takes {num_channels} channels: "
            "pass arrays, such as those of tifffile.imread"
        )


def to_arrays(images: Any, num_channels: int, preprocessing: Preprocessing) -> list[np.ndarray]:
    """Read one image or a list of images, as `prepare` takes them, as arrays (batch, height, width, channels).

    They are pixels of 0..255: uint8, or float32.
    """
    if isinstance(images, str | os.PathLike):
        return [decode(images, num_channels, preprocessing)[None]]
    if isinstance(images, list | tuple):
        return [array for image in images for array in to_arrays(image, num_channels, preprocessing)]
    if hasattr(images, "convert") and hasattr(images, "getbands"):  # a PIL image, without importing Pillow
        try:
            return [with_channels(pillow_pixels(images, preprocessing), num_channels)[None]]
        except ValueError as error:
            raise ValueError(f"The Pillow image {error}") from None
    return [_scaled_batch(np.asarray(images), preprocessing)]


def _scaled_batch(array: np.ndarray, preprocessing: Preprocessing) -> np.ndarray:
    """Check an array, give it a batch axis, and scale its values to pixels of 0..255 if the preprocessing says how."""
    received = f"Received: {array.dtype} array of shape {array.shape}"
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or 0 in array.shape:
        raise ValueError(f"An image must be (height, width, channels), with or without a batch axis. {received}")
    if array.dtype.kind not in "uif":
        raise ValueError(f"Images must be uint8 or floats from 0 to 255. {received}")
    if array.dtype == np.uint8:
        return array
    check_array(array, preprocessing, received)
    pixels = array.astype(np.float32)
    return pixels if preprocessing.limits is None else values.scale(pixels, preprocessing)


def check_array(array: np.ndarray, preprocessing: Preprocessing, received: str) -> None:
    """Raise a ValueError for values that are not bytes, and neither pixels nor in the range that is stated."""
    if preprocessing.limits is not None:
        try:
            values.check_values(array, preprocessing)
        except ValueError as error:
            raise ValueError(f"The array {error}. {received}") from None
        return
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 255):
        raise ValueError(
            "Images must be pixels from 0 to 255, not prepared ones. State what other values mean: "
            f"{values.HOW}. {received}, {low}..{high}"
        )
    if array.dtype.kind == "f" and 0 < high <= 1:
        raise ValueError(
            "Float images must have values from 0 to 255: multiply by 255, or state "
            f'preprocessing={{"range": [0, 1]}} {values.WHERE}. {received}, {low}..{high}'
        )


def _to_channels(image: Any, num_channels: int) -> Any:
    import tensorflow as tf

    from keras_vit.model import images

    kind = check_channels(image.shape, num_channels)
    if kind == "grey":
        return tf.repeat(image, num_channels, axis=-1)
    return images.on_white(image) if kind == "opacity" else image


def check_channels(shape: Any, num_channels: int) -> str:
    """Say what becomes of the channels of images of this shape: "same", "grey" is repeated, or has an "opacity"."""
    channels = shape[-1]
    if channels == num_channels:
        return "same"
    if channels == 1:
        return "grey"
    if channels == 4 and num_channels == 3:
        return "opacity"
    is_one = len(shape) == 4 and shape[0] == 1  # as `_scaled_batch` makes of (n, height, width)
    hint = ". Grey images (n, height, width) need a last axis: images[..., None]" * is_one
    raise ValueError(f"The model takes images of {num_channels} channels. Received: {channels} in shape {shape}{hint}")


def _squash(image: Any, image_size: tuple[int, int], preprocessing: Preprocessing) -> Any:
    wanted = size_before_crop(image_size, preprocessing)
    if tuple(image.shape[-3:-1]) == wanted == image_size:  # the static shape: no operation in the graph
        return image
    return _cut_centre(_resize(image, wanted, preprocessing), image_size, preprocessing)


def _crop(image: Any, image_size: tuple[int, int], preprocessing: Preprocessing) -> Any:
    import tensorflow as tf

    image = _middle(image)
    sides = tf.shape(image)[-3:-1]
    wanted = size_before_crop(image_size, preprocessing)
    ratios = tf.constant(wanted, tf.float32) / tf.cast(sides, tf.float32)
    if preprocessing.crop_rounding == "nearest":
        scaled = tf.cast(tf.round(tf.cast(sides, tf.float32) * tf.reduce_max(ratios)), tf.int32)
    else:
        axis = tf.argmax(ratios)
        scaled = sides * tf.constant(wanted)[axis] // sides[axis]
    return _cut_centre(_resize(image, tf.maximum(scaled, image_size), preprocessing), image_size, preprocessing)


def _resize(image: Any, size: Any, preprocessing: Preprocessing) -> Any:
    import tensorflow as tf

    options = {"method": preprocessing.interpolation, "antialias": preprocessing.antialias}
    if not (preprocessing.overshoots or preprocessing.round_pixels):
        return tf.image.resize(image, size, **options)
    if preprocessing.matches_pillow:
        return _resize_as_pillow(image, size, preprocessing.interpolation)
    for sides in ((tf.shape(image)[-3], size[1]), size):
        image = tf.clip_by_value(tf.image.resize(image, sides, **options), 0, 255)
        image = tf.round(image) if preprocessing.round_pixels else image
    return image


def _resize_as_pillow(image: Any, size: Any, interpolation: str) -> Any:
    """Resize as Pillow 13 resizes bytes, bit for bit: uint8 (..., height, width, channels)."""
    import tensorflow as tf
    import tensorflow.experimental.numpy as tnp

    def along(axis: int, pixels: Any) -> Any:
        sides = size[axis + 3], tf.shape(pixels)[axis]
        start, weights = pillow_weights(*sides, interpolation, xp=tnp, arange=tf.range, cast=tf.cast)
        weights = tf.reshape(tf.round(weights), [*tf.unstack(tf.shape(weights)), *[1] * (-axis - 1)])
        end = tf.shape(pixels)[axis] - 1

        def product(tap: Any) -> Any:
            tapped = tf.gather(pixels, tf.minimum(start + tap, end), axis=axis)
            return tf.cast(tapped, tf.float64) * weights[tap]

        _, total = tf.while_loop(
            lambda tap, total: tap < tf.shape(weights)[0],
            lambda tap, total: (tap + 1, total + product(tap)),
            (tf.constant(1), product(0)),
        )
        return tf.cast(tf.clip_by_value(tf.floor(total / PILLOW_ONE + 0.5), 0, 255), tf.uint8)

    return tf.cond(
        is_height_first(tf.shape(image)[-3:-1], size),
        lambda: along(-2, along(-3, image)),
        lambda: along(-3, along(-2, image)),
    )


def _cut_centre(image: Any, size: tuple[int, int], preprocessing: Preprocessing) -> Any:
    import tensorflow as tf

    margins = tf.shape(image)[-3:-1] - tf.constant(size)
    corner = margins // 2
    if preprocessing.crop_rounding == "half_even":
        corner += margins % 2 * (corner % 2)
    top, left = tf.unstack(corner)
    return image[..., top : top + size[0], left : left + size[1], :]


def _middle(image: Any) -> Any:
    """Cut the ends of an image of extreme shape off, which a crop never shows: enlarged, they would fill the memory."""
    import tensorflow as tf

    sides = tf.shape(image)[-3:-1]
    height, width = tf.unstack(tf.minimum(sides, MAX_ASPECT * tf.reduce_min(sides)))
    top, left = (sides[0] - height) // 2, (sides[1] - width) // 2
    return image[..., top : top + height, left : left + width, :]
