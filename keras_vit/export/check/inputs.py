"""Check and prepare the images on which files are calibrated and compared with their models."""

from typing import Any

import keras
import numpy as np

from keras_vit.export.check import samples
from keras_vit.export.check.running import FLOATS, ExportedModel
from keras_vit.export.litert.options import image_config
from keras_vit.model import preprocess
from keras_vit.model.config import Preprocessing

NUM_SAMPLES = 8  # built-in images: each kind in two contrasts
RANGE_LIMIT = 10  # times the range of prepared images: larger values are not prepared, but for example pixels


def image_shape(model: keras.Model) -> tuple[int, int, int]:
    """Return (height, width, channels) of the image that a model takes; raise a ValueError if they are not known."""
    try:
        shape = model.input_shape
    except (AttributeError, ValueError):  # a subclassed model; a Sequential that was never called
        shape = None
    if not isinstance(shape, tuple) or len(shape) != 4 or not all(isinstance(side, int) for side in shape[1:]):
        raise ValueError(
            "The model must take one image (batch, height, width, channels) of a known size; `keras.Model(image, "
            "model(image))` with `image = keras.Input((height, width, channels))` does. Received: "
            f"{type(model).__name__} with input shape {shape}"
        )
    _, height, width, channels = shape
    return height, width, channels


def prepared_images(model: keras.Model, images: Any, argument: str) -> np.ndarray:
    """Return checked images, float32 (batch, height, width, channels), prepared by the model unless they are floats."""
    shape = image_shape(model)
    expected = f"{argument} must be prepared images, float (batch, {', '.join(map(str, shape))})"
    if not _is_prepared(images):
        if not hasattr(model, "preprocess"):
            raise ValueError(f"{expected}. Received: {type(images)}")
        images = model.preprocess(images)
    images = np.asarray(images, np.float32)
    if images.ndim != 4 or images.shape[1:] != shape or not len(images):
        raise ValueError(f"{expected}. Received: shape {images.shape}")
    if broken := int((~np.isfinite(images)).any(axis=(1, 2, 3)).sum()):
        raise ValueError(f"{argument} must be finite. Received: NaN or infinity in {broken} of {len(images)} images")
    mean, std = mean_and_std(model)
    limit = RANGE_LIMIT * float(np.max(np.maximum(mean, 1 - mean) / std))
    if np.abs(images).max() > limit:
        raise ValueError(
            f"{argument} must be prepared images, as model.preprocess(pixels) returns; uint8 arrays and paths are "
            f"prepared here. Received: floats from {images.min():g} to {images.max():g}"
        )
    return images


def comparison_images(model: keras.Model, file: ExportedModel, images: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return images for a file (prepared, or uint8 pixels) and for its model; `images=None` takes built-in ones."""
    model_shape = image_shape(model)
    shape: Any = tuple(side or default for side, default in zip(file.shape, model_shape, strict=True))
    if file.dtype == "uint8":
        pixels = samples.draw(shape, NUM_SAMPLES) if images is None else to_pixels(model, images, shape)
        return pixels, model.preprocess(pixels)
    if shape != model_shape:
        raise ValueError(
            f"The file takes images of {shape[0]}x{shape[1]} pixels and {shape[2]} channels, the model of "
            f"{model_shape[0]}x{model_shape[1]} and {model_shape[2]}: compare it with model.resized({shape[:2]})"
        )
    if images is None:
        prepared = preprocess.normalize(samples.draw(shape, NUM_SAMPLES), image_config(model).preprocessing)
    else:
        prepared = prepared_images(model, images, "images")
    return prepared, prepared


def to_pixels(model: keras.Model, images: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """Return uint8 pixels of a shape, from prepared images or anything that `preprocess` takes."""
    if _is_prepared(images):
        mean, std = mean_and_std(model)
        images = (np.clip(prepared_images(model, images, "images") * std + mean, 0, 1) * 255).astype(np.float32)
        if images.max() <= 1:  # almost black; preprocess would refuse it as a float image from 0 to 1
            images = np.rint(images).astype(np.uint8)
    unscaled = Preprocessing(mean=(0.0,), std=(1 / 255,), antialias=True)
    pixels = preprocess.prepare(images, image_size=shape[:2], num_channels=shape[2], preprocessing=unscaled)
    return np.rint(pixels).clip(0, 255).astype(np.uint8)


def mean_and_std(model: keras.Model) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and standard deviation of the model's preprocessing, on a scale of 0 to 1."""
    preprocessing = image_config(model).preprocessing
    return np.array(preprocessing.mean), np.array(preprocessing.std)


def _is_prepared(images: Any) -> bool:
    dtype = getattr(images, "dtype", "")
    name = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]  # PyTorch's dtypes have no name
    return name in FLOATS and len(getattr(images, "shape", ())) != 3
