"""Position embeddings that know their grid, and so go with the weights to any other (paper, section 3.2)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit import position
from keras_vit.layers.initializers import initializer


@keras.saving.register_keras_serializable("keras_vit")
class PositionEmbedding(keras.layers.Layer):
    """Adds a position embedding to every token.

    The saved weights hold the grid and the number of prefix tokens beside the embedding; loading them (.weights.h5,
    .keras) into a layer with another grid interpolates once, in NumPy.

    Args:
        grid: (height, width) of the patch tokens.
        prefix_tokens: rows in front of the grid's, for class token and registers.
        kind: "learned", or "sincos2d" (fixed; then there is no weight).
        method: of `position.resize`.

    Input and output: (batch, prefix_tokens + height * width, hidden_size).
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
        self.grid = tuple(grid)
        self.prefix_tokens = prefix_tokens
        self.kind = kind
        self.method = method

    def build(self, input_shape: tuple[Any, ...]) -> None:
        hidden_size = input_shape[-1]
        if self.kind == "sincos2d":
            self.embedding = None
            wide = "float64" if self.compute_dtype == "float64" else "float32"
            fixed = position.sincos2d(self.grid, hidden_size, dtype=wide)
            # A class token that stands in front already has position 0, as big_vision's and MoCo v3's.
            self.fixed = np.pad(fixed, ((0, 0), (self.prefix_tokens, 0), (0, 0)))
        else:
            tokens = self.prefix_tokens + self.grid[0] * self.grid[1]
            shape = (1, tokens, hidden_size)
            self.embedding = self.add_weight(shape=shape, initializer=initializer("position"), name="embedding")

    def call(self, x: Any) -> Any:
        return x + (ops.cast(self.fixed, x.dtype) if self.embedding is None else self.embedding)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape

    def save_own_variables(self, store: Any) -> None:
        if self.embedding is not None:
            store["embedding"] = ops.convert_to_numpy(self.embedding)
            store["grid"] = np.array(self.grid)
            store["prefix_tokens"] = np.array(self.prefix_tokens)

    def load_own_variables(self, store: Any) -> None:
        if self.embedding is None:
            return
        source_grid = tuple(int(side) for side in store["grid"])
        prefix_tokens = int(np.asarray(store["prefix_tokens"]))
        if prefix_tokens != self.prefix_tokens:
            raise ValueError(
                f"The saved position embedding has {prefix_tokens} rows for prefix tokens, the layer "
                f"{self.prefix_tokens}: class token, registers and position_prefix of the config must agree."
            )
        embedding = np.asarray(store["embedding"])
        self.embedding.assign(
            position.resize(
                embedding, self.grid, source_grid=source_grid, prefix_tokens=prefix_tokens, method=self.method
            )
        )

    def get_config(self) -> dict[str, Any]:
        config = {"grid": self.grid, "prefix_tokens": self.prefix_tokens, "kind": self.kind, "method": self.method}
        return {**super().get_config(), **config}
