"""Relative positions: scores of attention that depend on how far apart two tokens are (paper, appendix D.4)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.model.layers.initializers import initializer


@keras.saving.register_keras_serializable("keras_vit")
class RelativePosition(keras.layers.Layer):
    """Holds an embedding for every offset of two tokens in the sequence, for the attention of one block or of all.

    The paper's relative attention has one dimension: each offset between a query and a key has an embedding, the query
    of the content meets these as keys, and the scores are added to those of the content before the softmax. What the
    paper leaves open is settled so:

    - The sequence is flattened in raster order and counts the class token and registers in front: N tokens have 2N - 1
      offsets, none is clipped.
    - Every head has embeddings of its own, of its size: hidden_size numbers an offset, and no projection over them.
    - The extra scores are scaled by 1 / sqrt(head size) like the others; values have no relative embedding.
    - They start as the other position embeddings do, normal with a deviation of 0.02.
    - Blocks have a table each, or share one (`ViTConfig.position_place`).

    Places of a grid that are (y, x) apart are y * width + x apart in the sequence, and so are places (y + 1, x - width)
    apart: an embedding that serves both has no one place in another grid. Weights are taken over to the same grid only.

    Args:
        grid: (height, width) of the patch tokens.
        num_heads: attention heads.
        prefix_tokens: class token and registers.

    Input: tokens (batch, N, hidden_size), of which only the width matters. Output: the table (2N - 1, num_heads,
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
                f"{grid} and {prefix_tokens}. Keep image_size, or let the layer start anew."
            )
        self.table.assign(store["relative_embedding"])

    def get_config(self) -> dict[str, Any]:
        config = {"grid": self.grid, "num_heads": self.num_heads, "prefix_tokens": self.prefix_tokens}
        return {**super().get_config(), **config}


def relative_scores(query: Any, table: Any) -> Any:
    """The scores of every query against the embeddings of its offsets to all tokens.

    Args:
        query: (batch, heads, N, head size).
        table: (2N - 1, heads, head size), as `RelativePosition` gives it.

    Returns:
        (batch, heads, N, N), queries before keys.
    """
    tokens = (table.shape[0] + 1) // 2
    heads = table.shape[1]
    # Backwards, column m of row q belongs to the key m - (N - 1) + q: each row starts one further left than the row
    # before. One column more, and in the flat array every row's own keys lie 2N - 1 after the row's before
    # (the skewing of the Music Transformer, arXiv 1809.04281, without a tensor of tokens x tokens x width).
    backwards = ops.pad(ops.flip(table, axis=0), ((0, 1), (0, 0), (0, 0)))
    scores = ops.reshape(ops.einsum("bhqd,rhd->bhqr", query, backwards), (-1, heads, 2 * tokens * tokens))
    start, stop = tokens - 1, tokens - 1 + tokens * (2 * tokens - 1)
    return ops.reshape(scores[:, :, start:stop], (-1, heads, tokens, 2 * tokens - 1))[..., :tokens]
