"""Rotary positions: queries and keys are turned by angles that depend on their patch (arXiv 2104.09864)."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops


@dataclass(frozen=True)
class Rotary:
    """Turn pairs of channels of every head: half of the pairs by the patch's row, half by its column.

    Pair k of an axis turns by coordinate * theta ** (-4 k / head size). Tokens in front of the patches are not turned.
    The arguments are the grid of patches, the number of tokens in front, and the `rotary_` fields of `ViTConfig`.
    """

    grid: tuple[int, int]
    prefix_tokens: int
    theta: float
    trained_grid: int | None = None
    interleaved: bool = False

    def turn(self, x: Any) -> Any:
        """Return queries or keys (batch, heads, tokens, head size) turned: the first tokens of a sequence, or all."""
        cosines, sines = (
            ops.cast(table[: x.shape[2]], x.dtype)
            for table in tables(self, x.shape[-1], "float64" if x.dtype == "float64" else "float32")
        )
        return x * cosines + self._quarter_turn(x) * sines

    def _quarter_turn(self, x: Any) -> Any:
        """Return x with every pair (a, b) replaced by (-b, a)."""
        if not self.interleaved:
            first, second = ops.split(x, 2, axis=-1)
            return ops.concatenate([-second, first], axis=-1)
        _, heads, tokens, size = x.shape
        pairs = ops.reshape(x, (-1, tokens, size // 2, 2))  # of four axes, which every device takes
        return ops.reshape(ops.stack([-pairs[..., 1], pairs[..., 0]], axis=-1), (-1, heads, tokens, size))


@functools.lru_cache(maxsize=8)
def tables(rotary: Rotary, size: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines (tokens, head size), which the blocks share."""
    lines = []
    for side in rotary.grid:
        if rotary.trained_grid is None:
            lines.append(2 * np.pi * ((2 * np.arange(side) + 1) / side - 1))
        else:
            lines.append(np.arange(side) * rotary.trained_grid / side)
    frequencies = rotary.theta ** -(np.arange(size // 4) / (size // 4))
    coordinates = np.stack(np.meshgrid(*lines, indexing="ij"), axis=-1).reshape(-1, 2, 1)
    angles = (coordinates * frequencies).reshape(len(coordinates), size // 2)
    angles = np.repeat(angles, 2, axis=1) if rotary.interleaved else np.tile(angles, 2)
    angles = np.pad(angles, ((rotary.prefix_tokens, 0), (0, 0)))
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
