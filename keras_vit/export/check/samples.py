"""Draw built-in images for verification: always the same, and different from each other."""

from collections.abc import Callable

import numpy as np

from keras_vit.model.config import ViTConfig
from keras_vit.model.preprocess import normalize

GRID = 5  # points per side of the smooth patterns: their structures are larger than a patch, as objects are
CONTRASTS = (1.0, 0.5, 0.2)  # share of the range of values in an image
SQUARES = (8, 3)  # squares per side of a checkerboard

Pattern = Callable[[np.random.Generator, int, int, int], np.ndarray]


def images(config: ViTConfig, count: int) -> np.ndarray:
    """Return `pixels` as the model takes them: float32 (count, height, width, channels)."""
    normalized: np.ndarray = normalize(pixels(config, count), config.preprocessing)
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
    """Draw a slope in another direction for each channel."""
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
