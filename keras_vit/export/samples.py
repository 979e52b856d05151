"""Images on which files are calibrated and compared with their models: checked, prepared, or drawn here.

Drawn images are always the same, and different from each other.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit._util.files import image_files
from keras_vit.export.exported import FLOATS, ExportedModel
from keras_vit.export.litert.plan import image_config
from keras_vit.model import preprocess
from keras_vit.model import task as tasks
from keras_vit.model.config import Preprocessing, ViTConfig

NUM_SAMPLES = 8  # built-in images: each kind in two contrasts
RANGE_LIMIT = 10  # times the range of prepared images: larger values are not prepared, but for example pixels
GRID = 5  # points per side of the smooth patterns: their structures are larger than a patch, as objects are
CONTRASTS = (1.0, 0.5, 0.2)  # share of the range of values in an image
SQUARES = (8, 3)  # squares per side of a checkerboard

Pattern = Callable[[np.random.Generator, int, int, int], np.ndarray]


def image_shape(model: keras.Model) -> tuple[int, int, int]:
    """Get (height, width, channels) of a model's image; raise a ValueError if they are not known."""
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
    """Prepare and check images: float32 (batch, height, width, channels). Floats must be prepared already."""
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
    """Prepare images for a file (prepared, or uint8 pixels) and for its model; None takes built-in ones."""
    model_shape = image_shape(model)
    shape: Any = tuple(side or default for side, default in zip(file.shape, model_shape, strict=True))
    if file.dtype == "uint8":
        pixels = draw(shape, NUM_SAMPLES) if images is None else to_pixels(model, images, shape)
        if shape != model_shape:  # the file resizes and cuts them as the model does
            return pixels, model.preprocess(pixels)
        return pixels, preprocess.normalize(pixels, image_config(model).preprocessing)
    if shape != model_shape:
        raise ValueError(
            f"The file takes images of {shape[0]}x{shape[1]} pixels and {shape[2]} channels, the model of "
            f"{model_shape[0]}x{model_shape[1]} and {model_shape[2]}: compare it with model.resized({shape[:2]})"
        )
    if images is None:
        prepared = preprocess.normalize(draw(shape, NUM_SAMPLES), image_config(model).preprocessing)
    else:
        prepared = prepared_images(model, images, "images")
    return prepared, prepared


def labelled_images(model: keras.Model, images: Any) -> tuple[Any, np.ndarray | None]:
    """List the files of a path, and the classes of files in folders named as the model's classes: int64 (images,).

    None stands for classes that are not known; other things than paths are returned as they are. Raises a ValueError
    for True and False.
    """
    if isinstance(images, bool):
        raise ValueError(
            "verify takes images, or None for built-in patterns: every file is compared with its model. "
            f"Received: {images}"
        )
    if isinstance(images, str | os.PathLike):
        images = image_files([images])
    if not isinstance(images, list | tuple) or not all(isinstance(item, str | os.PathLike) for item in images):
        return images, None
    numbers = tasks.of_model(model).numbers_by_name()
    classes = [numbers.get(Path(file).parent.name) for file in images]
    return images, None if not classes or None in classes else np.array(classes, np.int64)


def to_pixels(model: keras.Model, images: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """Convert prepared images, or anything that `preprocess` takes, to uint8 pixels of a shape.

    Pictures are cut as the model's images are, unless the shape is another: then the file cuts them.
    """
    how: Any = {"image_size": shape[:2], "num_channels": shape[2]}
    own = image_config(model).preprocessing
    if _is_prepared(images):
        mean, std = mean_and_std(model)
        shown = (np.clip(prepared_images(model, images, "images") * std + mean, 0, 1) * 255).astype(np.float32)
        squeezed = Preprocessing(mean=(0.0,), std=(1 / 255,), antialias=True)
        pixels = preprocess.prepare_pixels(shown, **how, preprocessing=squeezed)
    else:
        is_own = shape == image_shape(model)
        pixels = preprocess.prepare(images, **how, preprocessing=preprocess.without_normalization(own, cuts=is_own))
    return np.rint(pixels).clip(0, 255).astype(np.uint8)


def mean_and_std(model: keras.Model) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the model's preprocessing, on a scale of 0 to 1."""
    preprocessing = image_config(model).preprocessing
    return np.array(preprocessing.mean), np.array(preprocessing.std)


def _is_prepared(images: Any) -> bool:
    dtype = getattr(images, "dtype", "")
    name = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]  # PyTorch's dtypes have no name
    return name in FLOATS and len(getattr(images, "shape", ())) != 3


# ---- built-in images


def images(config: ViTConfig, count: int) -> np.ndarray:
    """Draw images and prepare them for a model: float32 (count, height, width, channels)."""
    drawn = draw((*config.size, config.num_channels), count)
    normalized: np.ndarray = preprocess.normalize(drawn, config.preprocessing)
    return normalized


def pixels(config: ViTConfig, count: int, size: tuple[int, int] | None = None) -> np.ndarray:
    """Draw images with the channels of a model, of a (height, width) or of its own size: uint8."""
    return draw((*(size or config.size), config.num_channels), count)


def draw(shape: tuple[int, int, int], count: int) -> np.ndarray:
    """Draw patterns in several contrasts: uint8 (count, *shape), with `shape` (height, width, channels)."""
    random = np.random.default_rng(0)
    drawn = np.empty((count, *shape), np.uint8)
    for number, image in enumerate(drawn):
        contrast = CONTRASTS[number % len(CONTRASTS)]
        field = _PATTERNS[number % len(_PATTERNS)](random, *shape)
        field = (field - field.min()) / max(field.max() - field.min(), 1e-6)
        image[:] = np.rint(255 * (contrast * field + (1 - contrast) * random.uniform()))
    return drawn


def _smooth(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    """Draw random values on a coarse grid, and interpolate linearly."""
    coarse = random.normal(size=(GRID, GRID, channels))
    rows, columns = (
        np.maximum(0, 1 - np.abs(np.linspace(0, GRID - 1, side)[:, None] - np.arange(GRID))) for side in (height, width)
    )
    return np.einsum("yi,xj,ijc->yxc", rows, columns, coarse)


def _gradient(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    down, right = random.normal(size=(2, channels))
    return np.linspace(0, 1, height)[:, None, None] * down + np.linspace(0, 1, width)[None, :, None] * right


def _checkerboard(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    squares = SQUARES[random.integers(len(SQUARES))]
    rows, columns = (np.arange(side) * squares // side for side in (height, width))
    first, second = random.uniform(size=(2, channels))
    return np.where((rows[:, None, None] + columns[None, :, None]) % 2, first, second)


def _noise(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    return random.uniform(size=(height, width, channels))


_PATTERNS: tuple[Pattern, ...] = (_smooth, _gradient, _checkerboard, _noise)
