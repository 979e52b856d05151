"""The images that a file and its model are compared on, and calibrated with: checked, and prepared for each."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_vit.export.check import samples
from keras_vit.export.check.running import Running
from keras_vit.model import preprocess
from keras_vit.model.config import Preprocessing

SAMPLES = 8  # built-in images: each kind in two contrasts
FOREIGN = 10  # times the range of prepared images: values beyond are of something else, such as pixels


def image_shape(model: keras.Model) -> tuple[int, int, int]:
    """(height, width, channels) of the one image that a model takes.

    Raises:
        ValueError: for a model of which that is not known, as one made by subclassing, of several inputs, or for images
            of any size.
    """
    try:
        shape = model.input_shape
    except (AttributeError, ValueError):  # by subclassing; a Sequential that was never called
        shape = None
    if not isinstance(shape, tuple) or len(shape) != 4 or not all(isinstance(side, int) for side in shape[1:]):
        raise ValueError(
            "A model takes one image (batch, height, width, channels) of a known size; `keras.Model(image, "
            f"model(image))` of an `image = keras.Input((height, width, channels))` does. Received: "
            f"{type(model).__name__} with input shape {shape}"
        )
    _, height, width, channels = shape
    return height, width, channels


def prepared_images(model: keras.Model, images: Any, what: str) -> np.ndarray:
    """Checked images of the model's size.

    Args:
        model: whose input they are.
        images: prepared ones, float (batch, height, width, channels), or what `model.preprocess` takes.
        what: they are for, as errors call it.

    Returns:
        float32 (batch, height, width, channels).

    Raises:
        ValueError: for none, another shape, NaN, or values that no preparation gives.
    """
    shape = image_shape(model)
    if not _is_prepared(images):
        if not hasattr(model, "preprocess"):
            raise ValueError(f"{what} are prepared images, float (batch, {_text(shape)}). Received: {type(images)}")
        images = model.preprocess(images)
    images = np.asarray(images, np.float32)
    if images.ndim != 4 or images.shape[1:] != shape or not len(images):
        raise ValueError(f"{what} are prepared images (batch, {_text(shape)}). Received: shape {images.shape}")
    if not np.isfinite(images).all():
        raise ValueError(f"{what} are finite. Received: NaN or infinity in {_broken(images)} of {len(images)} images")
    mean, std = mean_and_std(model)
    limit = FOREIGN * float(np.max(np.maximum(mean, 1 - mean) / std))
    if np.abs(images).max() > limit:
        raise ValueError(
            f"{what} are prepared images; model.preprocess(pixels) makes them, uint8 arrays and paths are prepared "
            f"here. Received: floats from {images.min():g} to {images.max():g}"
        )
    return images


def calibration(model: keras.Model, images: Any, mode: str, pixels_of: tuple[int, int] | None = None) -> np.ndarray:
    """Checked images to calibrate a file with, as it takes them.

    Args:
        model: of the file.
        images: as for `prepared_images`.
        mode: that needs them.
        pixels_of: (height, width) of a file that takes uint8 pixels; None for one that takes prepared images.

    Raises:
        ValueError: for none, and as `prepared_images`.
    """
    if images is None:
        raise ValueError(
            f"quantize={mode!r} needs calibration images: a hundred or more as the model will meet them, "
            "calibration=model.preprocess(...). Received: None"
        )
    prepared = prepared_images(model, images, "calibration")
    return prepared if pixels_of is None else _pixels(model, images, (*pixels_of, model.input_shape[-1]))


def _is_prepared(images: Any) -> bool:
    kind = getattr(images, "dtype", "")
    dtype = getattr(kind, "name", None) or str(kind).rpartition(".")[2]  # PyTorch's have no name
    return dtype in ("float16", "float32", "float64", "bfloat16") and len(getattr(images, "shape", ())) != 3


def _broken(images: np.ndarray) -> int:
    return int((~np.isfinite(images)).any(axis=(1, 2, 3)).sum())


def _text(shape: tuple[int | None, ...]) -> str:
    return ", ".join(map(str, shape))


def mean_and_std(model: keras.Model) -> tuple[np.ndarray, np.ndarray]:
    """Of the model's preprocessing, on a scale of 0 to 1; that of a model not ours is taken for the default."""
    preparation = _preprocessing(model)
    return np.array(preparation.mean), np.array(preparation.std)


def _preprocessing(model: keras.Model) -> Preprocessing:
    config: Any = getattr(model, "config", None)
    return config.preprocessing if hasattr(config, "preprocessing") else Preprocessing()


def pairs(model: keras.Model, file: Running, images: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the file is given, and what the model is given beside it.

    Args:
        model: of the file.
        file: takes prepared images of the model's size, or pixels of its own.
        images: as for `verify`.

    Raises:
        ValueError: for images that do not fit, or a file of another size than the model.
    """
    wanted = image_shape(model)
    shape: Any = tuple(own or side for own, side in zip(file.shape, wanted, strict=True))
    if file.dtype == "uint8":
        pixels = samples.drawn(shape, SAMPLES) if images is None else _pixels(model, images, shape)
        return pixels, model.preprocess(pixels)
    if shape != wanted:
        raise ValueError(
            f"The file takes images of {shape[0]}x{shape[1]} pixels and {shape[2]} channels, the model of "
            f"{wanted[0]}x{wanted[1]} and {wanted[2]}: compare it with model.resized({shape[:2]})"
        )
    if images is None:
        prepared = samples.normalised(samples.drawn(shape, SAMPLES), _preprocessing(model))
    else:
        prepared = prepared_images(model, images, "images")
    return prepared, prepared


def _pixels(model: keras.Model, images: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 pixels of the file's size, out of prepared images or what `preprocess` takes."""
    if _is_prepared(images):
        mean, std = mean_and_std(model)
        images = (np.clip(prepared_images(model, images, "images") * std + mean, 0, 1) * 255).astype(np.float32)
        if images.max() <= 1:  # all but black; preprocess would take it for a float image on another scale
            images = np.rint(images).astype(np.uint8)
    unscaled = Preprocessing(mean=(0.0,), std=(1 / 255,), antialias=True)
    scaled = preprocess.prepare(images, image_size=shape[:2], num_channels=shape[2], preprocessing=unscaled)
    return np.rint(scaled).clip(0, 255).astype(np.uint8)
