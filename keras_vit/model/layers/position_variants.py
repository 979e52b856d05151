"""Other positions: in two dimensions and relative to another token (paper, appendix D.4), biases, and rotary ones."""

import functools
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit import position
from keras_vit.model.layers.base import BaseLayer, dense_layer, initializer
from keras_vit.model.layers.runtime import Shape, Tensor


def concatenated_axes(along_x: Tensor, along_y: Tensor, grid: tuple[int, int], prefix_tokens: int) -> Tensor:
    """Compute the embedding of all tokens, (1, tokens, hidden_size), of "learned2d".

    It concatenates an embedding of the column and one of the row, each half as wide: (1, prefix_tokens + columns or
    rows, width). Both tables have a row for each prefix token, which the paper does not say.
    """

    def repeat(table: Tensor, axis: int) -> Tensor:
        """Repeat a table of columns or rows along the other `axis`, so that it covers all tokens."""
        prefix, line = table[:, :prefix_tokens], table[:, prefix_tokens:]
        patches = ops.broadcast_to(ops.expand_dims(line, axis), (1, *grid, table.shape[-1]))
        return ops.concatenate([prefix, ops.reshape(patches, (1, -1, table.shape[-1]))], axis=1)

    return ops.concatenate([repeat(along_x, axis=1), repeat(along_y, axis=2)], axis=-1)


@keras.saving.register_keras_serializable("keras_vit")
class RelativePosition(BaseLayer):
    """Make a table of embeddings for the offsets between two of N tokens: (2N - 1, num_heads, head size).

    Row q - k + N - 1 belongs to query q and key k. It acts as a second key: its product with the query is added to the
    attention score. The paper omits details. Here tokens count in raster order, class token and registers first;
    every head has its own embeddings; no offset is clipped; these scores are scaled like the others; values have no
    relative embedding.

    Weights load only into the same grid: offsets of (y, x) and (y + 1, x - width) patches share an embedding, and in
    another grid they do not.
    """

    def __init__(self, grid: tuple[int, int], num_heads: int, *, prefix_tokens: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.grid = (grid[0], grid[1])
        self.num_heads = num_heads
        self.prefix_tokens = prefix_tokens

    def build(self, input_shape: Shape) -> None:
        self.table = self.add_weight(
            shape=self.compute_output_shape(input_shape), initializer=initializer("position"), name="relative_embedding"
        )

    def call(self, x: Tensor) -> Tensor:
        return ops.cast(self.table, x.dtype)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        tokens = self.prefix_tokens + self.grid[0] * self.grid[1]
        return (2 * tokens - 1, self.num_heads, input_shape[-1] // self.num_heads)

    def save_own_variables(self, store: Any) -> None:
        store["relative_embedding"] = ops.convert_to_numpy(self.table)
        store["grid"] = np.array(self.grid)
        store["prefix_tokens"] = np.array(self.prefix_tokens)

    def load_own_variables(self, store: Any) -> None:
        if "relative_embedding" not in store:
            raise ValueError(f"A relative position has a relative_embedding. Received: {sorted(store.keys())}")
        grid, prefix_tokens = tuple(int(side) for side in store["grid"]), int(np.asarray(store["prefix_tokens"]))
        if (grid, prefix_tokens) != (self.grid, self.prefix_tokens):
            raise ValueError(
                "Relative position embeddings belong to the offsets of one sequence and are not interpolated: "
                f"{self.name} has a grid of {self.grid} patches and {self.prefix_tokens} tokens in front. Received: "
                f"{grid} and {prefix_tokens}. Keep image_size, or use new weights: `with_config(config, fresh=...)`."
            )
        self.table.assign(store["relative_embedding"])


def relative_scores(query: Tensor, table: Tensor) -> Tensor:
    """Multiply queries with the embeddings of their offsets to all tokens.

    `query` has the first Q of N tokens, (batch, heads, Q, head size); `table` is (2N - 1, heads, head size), the result
    (batch, heads, Q, N).
    """
    queries, tokens, heads = query.shape[2], (table.shape[0] + 1) // 2, table.shape[1]
    offsets = tokens + queries - 1
    # In reversed order, column m of row q belongs to the key m - (Q - 1) + q: each row begins one column to the left
    # of the row before it. With one more column, the keys of consecutive rows are N + Q - 1 apart in the flat array,
    # which a reshape aligns (the skewing of the Music Transformer, arXiv 1809.04281).
    reversed_table = ops.pad(ops.flip(table[:offsets], axis=0), ((0, 1), (0, 0), (0, 0)))
    scores = ops.einsum("bhqd,rhd->bhqr", query, reversed_table)
    scores = ops.reshape(scores, (-1, heads, queries * (offsets + 1)))
    aligned = scores[:, :, queries - 1 : queries - 1 + queries * offsets]
    return ops.reshape(aligned, (-1, heads, queries, offsets))[..., :tokens]


@keras.saving.register_keras_serializable("keras_vit")
class RelativeBias(BaseLayer):
    """Make numbers that are added to the attention's scores, (1, num_heads, tokens, tokens), from offsets of patches.

    The table has a row for each offset of (2 * rows - 1, 2 * columns - 1) in two dimensions, that of the query less
    that of the key. With tokens in front of the patches three rows follow: for such a token as query, as key, as both.
    Source: BEiT (arXiv 2106.08254), `gen_relative_position_index` in timm/models/beit.py.

    With `mlp_dim`, an MLP of that width with ReLU computes the rows from the offsets d as sign(d) log(1 + |d|), and
    tokens in front have no bias. Source: `RelPosMlp` in timm/layers/pos_embed_rel.py, after Swin V2 (arXiv 2111.09883).
    """

    def __init__(
        self,
        grid: tuple[int, int],
        num_heads: int,
        *,
        prefix_tokens: int = 0,
        mlp_dim: int | None = None,
        method: str = "official",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.grid = (grid[0], grid[1])
        self.num_heads = num_heads
        self.prefix_tokens = prefix_tokens
        self.mlp_dim = mlp_dim
        self.method = method
        if mlp_dim is not None:
            options = {"kernel_initializer": initializer("dense"), "dtype": self.dtype_policy}
            self.dense1 = dense_layer(mlp_dim, activation="relu", name="dense1", **options)
            self.dense2 = dense_layer(num_heads, name="dense2", **options)

    def build(self, input_shape: Shape) -> None:
        if self.mlp_dim is not None:
            self.dense1.build((None, 2))
            self.dense2.build((None, self.mlp_dim))
            return
        rows = position.bias_rows(self.grid, self.prefix_tokens)
        self.table = self.add_weight(shape=(rows, self.num_heads), initializer=initializer("position"), name="table")

    def call(self, x: Tensor) -> Tensor:
        table = self.table if self.mlp_dim is None else self._computed_table(x.dtype)
        numbers, shape = bias_numbers(self.grid, self.prefix_tokens), self.compute_output_shape(x.shape)
        # Along the last axis: the gradient of rows that are taken would be sparse.
        return ops.reshape(ops.take(ops.cast(ops.transpose(table), x.dtype), numbers.reshape(-1), axis=1), shape)

    def _computed_table(self, dtype: Any) -> Any:
        rows = self.dense2(self.dense1(ops.cast(log_offsets(self.grid), dtype)))
        return ops.pad(rows, ((0, 3 if self.prefix_tokens else 0), (0, 0)))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        tokens = self.prefix_tokens + self.grid[0] * self.grid[1]
        return (1, self.num_heads, tokens, tokens)

    def save_own_variables(self, store: Any) -> None:
        if self.mlp_dim is None:
            store["table"] = ops.convert_to_numpy(self.table)
            store["grid"] = np.array(self.grid)

    def load_own_variables(self, store: Any) -> None:
        if self.mlp_dim is not None:
            return
        if "table" not in store:
            raise ValueError(f"A relative bias without an MLP has a table. Received: {sorted(store.keys())}")
        height, width = (int(side) for side in store["grid"])
        table = position.resize_bias(np.asarray(store["table"]), self.grid, (height, width), method=self.method)
        self.table.assign(table)


@functools.lru_cache(maxsize=8)
def bias_numbers(grid: tuple[int, int], prefix_tokens: int) -> np.ndarray:
    """Numbers of the rows of a RelativeBias's table, int32 (queries, keys)."""
    y, x = (axis.reshape(-1) for axis in np.indices(grid))
    rows, columns = (np.subtract.outer(line, line) + side - 1 for line, side in zip((y, x), grid, strict=True))
    numbers = np.pad(rows * (2 * grid[1] - 1) + columns, ((prefix_tokens, 0), (prefix_tokens, 0)))
    count = position.bias_rows(grid, 0)
    numbers[:prefix_tokens] = count
    numbers[:, :prefix_tokens] = count + 1
    numbers[:prefix_tokens, :prefix_tokens] = count + 2
    return numbers.astype(np.int32)


def log_offsets(grid: tuple[int, int]) -> np.ndarray:
    """Offsets (y, x) of patches, float64 ((2 * rows - 1) * (2 * columns - 1), 2), on a logarithmic scale."""
    lines = [np.arange(1 - side, side) for side in grid]
    offsets = np.stack(np.meshgrid(*lines, indexing="ij"), axis=-1).reshape(-1, 2)
    return np.sign(offsets) * np.log1p(np.abs(offsets))


@dataclass(frozen=True)
class Rotary:
    """Turn pairs of channels of every head (arXiv 2104.09864): half by the patch's row, half by its column; the
    first half by the column with `axes` "xy".

    Pair k of an axis turns by coordinate * theta ** (-4 k / head size). Tokens in front of the patches are not turned.
    The arguments are the grid of patches, the number of tokens in front, and the `rotary_` fields of `ViTConfig`;
    `block` is the number of the block where a `RotaryFrequencies` has learned the angles, None without one.
    """

    grid: tuple[int, int]
    prefix_tokens: int
    theta: float
    trained_grid: int | None = None
    interleaved: bool = False
    offset: float = 0.0
    axes: str = "yx"
    block: int | None = None

    def turn(self, x: Tensor, learned: Tensor = None) -> Tensor:
        """Turn queries or keys (batch, heads, tokens, head size): the first tokens of a sequence, or all.

        `learned` is the result of a `RotaryFrequencies`, if there is one.
        """
        if self.block is None:
            tables = cosines_and_sines(self, x.shape[-1], "float64" if x.dtype == "float64" else "float32")
            cosines, sines = (ops.cast(table[: x.shape[2]], x.dtype) for table in tables)
        else:
            halves = ops.split(learned[self.block][:, : x.shape[2]], 2, axis=-1)
            cosines, sines = (
                ops.repeat(half, 2, axis=-1) if self.interleaved else ops.concatenate([half, half], axis=-1)
                for half in halves
            )
        return x * cosines + self._quarter_turn(x) * sines

    def _quarter_turn(self, x: Tensor) -> Tensor:
        """Replace every pair (a, b) by (-b, a)."""
        if not self.interleaved:
            first, second = ops.split(x, 2, axis=-1)
            return ops.concatenate([-second, first], axis=-1)
        _, heads, tokens, size = x.shape
        pairs = ops.reshape(x, (-1, tokens, size // 2, 2))  # of four axes, which every device takes
        return ops.reshape(ops.stack([-pairs[..., 1], pairs[..., 0]], axis=-1), (-1, heads, tokens, size))


@functools.lru_cache(maxsize=8)
def cosines_and_sines(rotary: Rotary, size: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines (tokens, head size), which the blocks share."""
    coordinates = rotary_coordinates(rotary)
    angles = (coordinates[:, :, None] * rotary_frequencies(rotary.theta, size)).reshape(len(coordinates), size // 2)
    angles = np.repeat(angles, 2, axis=1) if rotary.interleaved else np.tile(angles, 2)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def rotary_frequencies(theta: float, size: int) -> np.ndarray:
    """Frequencies of an axis, float64 (head size / 4,)."""
    return theta ** -(np.arange(size // 4) / (size // 4))


def rotary_coordinates(rotary: Rotary) -> np.ndarray:
    """Coordinates of tokens in the order of `axes`, float64 (tokens, 2); zeros for those in front of the patches."""
    lines = []
    for side in rotary.grid:
        number = np.arange(side) + rotary.offset
        if rotary.trained_grid is None:
            lines.append(2 * np.pi * ((2 * number + 1) / side - 1))
        else:
            lines.append(number * (rotary.trained_grid or side) / side)
    coordinates = np.stack(np.meshgrid(*lines, indexing="ij"), axis=-1).reshape(-1, 2)
    coordinates = coordinates[:, ::-1] if rotary.axes == "xy" else coordinates
    return np.pad(coordinates, ((rotary.prefix_tokens, 0), (0, 0)))


@keras.saving.register_keras_serializable("keras_vit")
class RotaryFrequencies(BaseLayer):
    """Make the tables of learned rotary positions, (num_layers, num_heads, tokens, head size): cosines, then sines.

    Every pair of channels of every head and block turns by its own angle for each of the two coordinates of a patch;
    `frequencies` (2, num_layers, num_heads, head size / 2) are these angles. `rotary` are the arguments of a `Rotary`.
    Source: RoPE-Mixed (arXiv 2403.13298), `RotaryEmbeddingMixed` in timm/layers/pos_embed_sincos.py.
    """

    def __init__(
        self, rotary: dict[str, Any], *, num_layers: int, num_heads: int, head_size: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.rotary = rotary
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.head_size = head_size

    def build(self, input_shape: Shape) -> None:
        shape = (2, self.num_layers, self.num_heads, self.head_size // 2)
        self.frequencies = self.add_weight(shape=shape, initializer=self._initial, name="frequencies")

    def _initial(self, shape: Any, dtype: Any) -> Any:
        """Two axes at right angles, of the usual frequencies, turned by a random angle for each head and block."""
        first = 2 * np.pi * keras.random.uniform((self.num_layers, self.num_heads, 1))
        angles = ops.concatenate(
            [ops.repeat(first + turn, self.head_size // 4, axis=-1) for turn in (0, np.pi / 2)], -1
        )
        frequencies = np.tile(rotary_frequencies(self.rotary["theta"], self.head_size), 2)
        return ops.cast(ops.stack([ops.cos(angles), ops.sin(angles)]) * ops.cast(frequencies, angles.dtype), dtype)

    def call(self, x: Tensor) -> Tensor:
        coordinates = ops.cast(rotary_coordinates(as_rotary(self.rotary)), x.dtype)
        angles = rotary_angles(coordinates, ops.cast(self.frequencies, x.dtype))
        return ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=-1)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        rotary = as_rotary(self.rotary)
        tokens = rotary.prefix_tokens + rotary.grid[0] * rotary.grid[1]
        return (self.num_layers, self.num_heads, tokens, self.head_size)


def rotary_angles(coordinates: Tensor, frequencies: Tensor) -> Tensor:
    """Angles (num_layers, num_heads, tokens, head size / 2) of the arrays or tensors of a RotaryFrequencies."""
    first, second = (coordinates[:, axis, None] * frequencies[axis][:, :, None] for axis in (0, 1))
    return first + second


def as_rotary(arguments: dict[str, Any]) -> Rotary:
    """Make a Rotary of its arguments, which a saved file has as lists."""
    return Rotary(**{**arguments, "grid": tuple(arguments["grid"])})
