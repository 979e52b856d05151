"""Built-in images to verify files on where the user gives none: always the same, and unlike each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from keras_vit.model.config import Preprocessing, ViTConfig

COARSE = 5  # points across the smooth fields: structure much larger than a patch, as objects are
CONTRASTS = (1.0, 0.5, 0.2)  # share of the range of values that an image uses
SQUARES = (8, 3)  # across the checkerboards

Kind = Callable[[np.random.Generator, int, int, int], np.ndarray]


def images(config: ViTConfig, count: int) -> np.ndarray:
    """Prepared images for a model: `pixels` with its mean and deviation.

    Args:
        config: of the model.
        count: how many.

    Returns:
        float32 (count, height, width, channels).
    """
    return normalised(pixels(config, count), config.preprocessing)


def pixels(config: ViTConfig, count: int, size: tuple[int, int] | None = None) -> np.ndarray:
    """In turn smooth random fields, gradients, checkerboards and noise, in several contrasts and brightnesses.

    Args:
        config: of the model; its size and channels.
        count: how many.
        size: (height, width) where it is not the model's.

    Returns:
        uint8 (count, height, width, channels).
    """
    return drawn((*(size or config.size), config.num_channels), count)


def drawn(shape: tuple[int, int, int], count: int) -> np.ndarray:
    """The pixels of any (height, width, channels); uint8 (count, height, width, channels)."""
    random = np.random.default_rng(0)
    made = np.empty((count, *shape), np.uint8)
    for number, image in enumerate(made):
        contrast = CONTRASTS[number % len(CONTRASTS)]
        field = _KINDS[number % len(_KINDS)](random, *shape)
        field = (field - field.min()) / max(field.max() - field.min(), 1e-6)
        image[:] = np.rint(255 * (contrast * field + (1 - contrast) * random.uniform()))
    return made


def normalised(pixels: np.ndarray, preprocessing: Preprocessing) -> np.ndarray:
    """Pixels 0..255 of the model's size as the model takes them, float32, to the bit as `preprocess` does it."""
    mean, std = (np.array(values, np.float32) * 255 for values in (preprocessing.mean, preprocessing.std))
    return (pixels.astype(np.float32) - mean) / std


def _smooth(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    """Random values on a coarse grid, linear between them."""
    coarse = random.normal(size=(COARSE, COARSE, channels))
    return np.einsum("yi,xj,ijc->yxc", _between(height), _between(width), coarse)


def _between(length: int) -> np.ndarray:
    """Linear interpolation from COARSE points to `length` as a matrix."""
    places = np.linspace(0, COARSE - 1, length)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(COARSE)))


def _gradient(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    """A slope in another direction in each channel."""
    down, right = random.normal(size=(2, channels))
    return np.linspace(0, 1, height)[:, None, None] * down + np.linspace(0, 1, width)[None, :, None] * right


def _checkerboard(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    """Squares of two colours."""
    squares = SQUARES[random.integers(len(SQUARES))]
    rows, columns = (np.arange(side) * squares // side for side in (height, width))
    first, second = random.uniform(size=(2, channels))
    return np.where((rows[:, None, None] + columns[None, :, None]) % 2, first, second)


def _noise(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray:
    """Every value for itself."""
    return random.uniform(size=(height, width, channels))


_KINDS: tuple[Kind, ...] = (_smooth, _gradient, _checkerboard, _noise)
