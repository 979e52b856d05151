"""Relative positions: attention scores that depend on the offset between two tokens (paper, appendix D.4)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.model.layers.initializers import initializer


@keras.saving.register_keras_serializable("keras_vit")
class RelativePosition(keras.layers.Layer):
    """Hold an embedding for every offset of two tokens in the sequence, for the attention of one block or of all.

    The paper's relative attention is one-dimensional. Each offset between a query and a key has an embedding, which
    acts as a second key: its product with the query is added to the attention score. The paper leaves details open;
    here they are:

    - The sequence is in raster order and begins with class token and registers. N tokens have 2N - 1 offsets; none is
      clipped.
    - Every head has its own embeddings, of the size of a head, without a projection.
    - These scores are scaled by 1 / sqrt(head size) like the others. Values have no relative embedding.
    - The initial values are normal with a standard deviation of 0.02, as for other position embeddings.
    - Every block has its own table, or all share one (`ViTConfig.position_place`).

    Weights load only into the same grid. Two patches that are (y, x) apart are y * width + x apart in the sequence, and
    so are two that are (y + 1, x - width) apart: one embedding serves both, and in another grid they differ.

    Args:
        grid: number of patches, (rows, columns).
        num_heads: number of attention heads.
        prefix_tokens: number of tokens in front of the patches.

    Input: tokens (batch, N, hidden_size), of which only the width is read. Output: the table (2N - 1, num_heads,
    hidden_size / num_heads) in the compute dtype; row p_query - p_key + N - 1 belongs to the offset p_query - p_key.
    """

    def __init__(self, grid: tuple[int, int], num_heads: int, *, prefix_tokens: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.grid = (grid[0], grid[1])
        self.num_heads = num_heads
        self.prefix_tokens = prefix_tokens

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.table = self.add_weight(
            shape=self.compute_output_shape(input_shape), initializer=initializer("position"), name="relative_embedding"
        )

    def call(self, x: Any) -> Any:
        return ops.cast(self.table, x.dtype)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
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
                f"{grid} and {prefix_tokens}. Keep image_size, or start the layer anew."
            )
        self.table.assign(store["relative_embedding"])

    def get_config(self) -> dict[str, Any]:
        config = {"grid": self.grid, "num_heads": self.num_heads, "prefix_tokens": self.prefix_tokens}
        return {**super().get_config(), **config}


def relative_scores(query: Any, table: Any) -> Any:
    """Return the products of every query with the embeddings of its offsets to all tokens.

    Args:
        query: (batch, heads, N, head size).
        table: (2N - 1, heads, head size), as `RelativePosition` returns it.

    Returns:
        (batch, heads, N, N), queries before keys.
    """
    tokens = (table.shape[0] + 1) // 2
    heads = table.shape[1]
    # In reversed order, column m of row q belongs to the key m - (N - 1) + q: each row begins one column further left
    # than the one before. With one more column, the keys of consecutive rows are 2N - 1 apart in the flat array, which
    # a reshape aligns (the skewing of the Music Transformer, arXiv 1809.04281).
    reversed_table = ops.pad(ops.flip(table, axis=0), ((0, 1), (0, 0), (0, 0)))
    scores = ops.reshape(ops.einsum("bhqd,rhd->bhqr", query, reversed_table), (-1, heads, 2 * tokens * tokens))
    start, stop = tokens - 1, tokens - 1 + tokens * (2 * tokens - 1)
    return ops.reshape(scores[:, :, start:stop], (-1, heads, tokens, 2 * tokens - 1))[..., :tokens]
