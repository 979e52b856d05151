"""Position embeddings, which are interpolated when they are loaded into another grid (paper, section 3.2)."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit import position
from keras_vit.model.layers.base import BaseLayer, initializer
from keras_vit.model.layers.position_variants import concatenated_axes
from keras_vit.model.layers.runtime import Shape, Tensor


@keras.saving.register_keras_serializable("keras_vit")
class PositionEmbedding(BaseLayer):
    """Add a position embedding to tokens (batch, prefix_tokens + rows * columns, hidden_size).

    `kind` is "learned", "learned2d" (see `position_variants.concatenated_axes`) or "sincos2d" (fixed). Weights are
    saved with their grid, and interpolated with `method` when loaded into another one.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        *,
        prefix_tokens: int = 0,
        kind: str = "learned",
        method: str = "official",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.grid = (grid[0], grid[1])
        self.prefix_tokens = prefix_tokens
        self.kind = kind
        self.method = method

    def build(self, input_shape: Shape) -> None:
        hidden_size = input_shape[-1]
        if self.kind == "sincos2d":
            dtype = "float64" if self.compute_dtype == "float64" else "float32"
            fixed = position.sincos2d(self.grid, hidden_size, dtype=dtype)
            # Prefix tokens that precede this layer get zeros, as the class tokens of big_vision and MoCo v3.
            self.fixed = np.pad(fixed, ((0, 0), (self.prefix_tokens, 0), (0, 0)))
        grids = self._table_grids(self.grid)
        for name, (height, width) in grids.items():
            shape = (1, self.prefix_tokens + height * width, hidden_size // len(grids))
            setattr(self, name, self.add_weight(shape=shape, initializer=initializer("position"), name=name))

    def _table_grids(self, grid: tuple[int, int]) -> dict[str, tuple[int, int]]:
        """Names of the weights, with the grid (rows, columns) that each table covers."""
        height, width = grid
        return {
            "learned": {"embedding": (height, width)},
            "learned2d": {"x_embedding": (1, width), "y_embedding": (height, 1)},
            "sincos2d": {},
        }[self.kind]

    def call(self, x: Tensor) -> Tensor:
        table = self.table()
        return x + (ops.cast(table, x.dtype) if self.kind == "sincos2d" else table)

    def table(self) -> Tensor:
        """Compute the embedding that is added to the tokens, (1, tokens, hidden_size)."""
        if self.kind == "sincos2d":
            return self.fixed
        if self.kind == "learned":
            return self.embedding
        return concatenated_axes(self.x_embedding, self.y_embedding, self.grid, self.prefix_tokens)

    def save_own_variables(self, store: Any) -> None:
        if self.kind == "sincos2d":
            return
        for name in self._table_grids(self.grid):
            store[name] = ops.convert_to_numpy(getattr(self, name))
        store["grid"] = np.array(self.grid)
        store["prefix_tokens"] = np.array(self.prefix_tokens)

    def load_own_variables(self, store: Any) -> None:
        if self.kind == "sincos2d":
            return
        grids = self._table_grids(self.grid)
        if not all(name in store for name in grids):
            raise ValueError(
                f"A position embedding of kind {self.kind!r} has the weights {list(grids)}. "
                f"Received: {sorted(store.keys())}"
            )
        source_grid = int(store["grid"][0]), int(store["grid"][1])
        prefix_tokens = int(np.asarray(store["prefix_tokens"]))
        if prefix_tokens != self.prefix_tokens:
            raise ValueError(
                f"The saved position embedding has {prefix_tokens} rows for prefix tokens, the layer "
                f"{self.prefix_tokens}: class token, registers and position_prefix of the config must agree."
            )
        for name, source in self._table_grids(source_grid).items():
            table = np.asarray(store[name])
            getattr(self, name).assign(
                position.resize(table, grids[name], source_grid=source, prefix_tokens=prefix_tokens, method=self.method)
            )
