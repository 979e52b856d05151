"""Multi-head attention (paper, appendix A). Its weights have an axis for the heads, as in the official files."""

import dataclasses
from typing import Any

import keras
from keras import ops

from keras_vit.model.layers.base import BaseLayer
from keras_vit.model.layers.cost import Cost, Shape
from keras_vit.model.layers.fusion import attend, attention_weights, product_then
from keras_vit.model.layers.initializers import glorot_uniform_matrix
from keras_vit.model.layers.quantized import load_quantization, save_quantization
from keras_vit.model.layers.randomness import Dropout
from keras_vit.model.layers.relative import relative_scores
from keras_vit.model.layers.rotary import Rotary


@keras.saving.register_keras_serializable("keras_vit")
class MultiHeadAttention(BaseLayer):
    """Compute softmax(q k' / sqrt(head size)) v and project it to hidden_size.

    `key_bias` is whether the keys have a bias where queries and values have one; `rotary` are the arguments of a
    `Rotary` as a dict.

    Inputs: queries (batch, tokens, hidden_size), other tokens to attend to, the table of a `RelativePosition`; the last
    two may be None. Kernels: query, key, value (hidden_size, heads, head size), out (heads, head size, hidden_size).
    """

    def __init__(
        self,
        num_heads: int,
        *,
        use_bias: bool = True,
        key_bias: bool = True,
        rotary: dict[str, Any] | None = None,
        dropout_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.use_bias = use_bias
        self.key_bias = key_bias
        self.rotary = None if rotary is None else Rotary(**{**rotary, "grid": tuple(rotary["grid"])})
        self.dropout_rate = dropout_rate
        self.dropout = Dropout(dropout_rate, dtype=self.dtype_policy, name="dropout")

    def build(self, input_shape: tuple[Any, ...], *_: Any) -> None:
        hidden_size = input_shape[-1]
        head_size = hidden_size // self.num_heads
        self.scale = head_size**-0.5
        for name in ("query", "key", "value"):
            projection = self._projection(name, "btd,dhk->bthk", (None, self.num_heads, head_size), hidden_size)
            projection.build((None, None, hidden_size))
            setattr(self, name, projection)
        self.out = self._projection("out", "bthk,hkd->btd", (None, hidden_size), hidden_size)
        self.out.build((None, None, self.num_heads, head_size))

    def _projection(
        self, name: str, equation: str, output_shape: tuple[Any, ...], hidden_size: int
    ) -> keras.layers.EinsumDense:
        return keras.layers.EinsumDense(
            equation,
            output_shape=output_shape,
            bias_axes=equation[-1] if name == "out" else "hk" if self._has_bias(name) else None,
            kernel_initializer=glorot_uniform_matrix(hidden_size, hidden_size),
            dtype=self.dtype_policy,
            name=name,
        )

    def _has_bias(self, name: str) -> bool:
        return self.use_bias and (name != "key" or self.key_bias)

    def call(self, queries: Any, attended: Any = None, relative: Any = None, training: bool | None = None) -> Any:
        attended = queries if attended is None else attended
        inputs = self._inputs(queries, attended, relative)
        value = product_then(self.value, attended, _heads_first)
        if training and self.dropout_rate:
            mixed = ops.matmul(self.dropout(attention_weights(*inputs), training=True), value)
        else:
            mixed = attend(*inputs, value, training=training)
        return product_then(self.out, ops.transpose(mixed, (0, 2, 1, 3)), axes=2)

    def weights_of(self, queries: Any, attended: Any, relative: Any = None) -> Any:
        """Return the attention weights, (batch, heads, queries, attended); every row sums to 1."""
        return attention_weights(*self._inputs(queries, attended, relative))

    def _inputs(self, queries: Any, attended: Any, relative: Any) -> tuple[Any, Any, Any]:
        """Return queries and keys of every head, and what is added to their products, or None."""
        query = product_then(self.query, queries, _heads_first, scale=self.scale)
        key = product_then(self.key, attended, _heads_first)
        if self.rotary is not None:
            query, key = self.rotary.turn(query), self.rotary.turn(key)
        return query, key, None if relative is None else relative_scores(query, relative)

    @property
    def title(self) -> str:
        """The layer in words."""
        return f"attention, {self.num_heads} heads of {self.query.kernel.shape[-1]}"

    def cost(self, queries: Shape, attended: Shape | None = None, relative: Shape | None = None) -> Cost:
        """Return the cost for queries (tokens, hidden_size) that attend to tokens (other tokens, hidden_size)."""
        few, width = queries
        many = few if attended is None else attended[0]
        scores = self.num_heads * few * many
        # A product for the scores and one for the weighted sum; relative positions score twice as many offsets.
        products = (2 if relative is None else 4) * few * many * width
        # The scores, and three tensors of tokens: queries, keys and values, or their copies with the heads in front.
        # Relative scores are five times as many, for offsets are scored too and skewed in two steps.
        peak = 3 * many * width + scores * (1 if relative is None else 5)
        # Input, queries, keys, values, attention weights and the output of the heads.
        kept = 2 * few * width + 3 * many * width + scores
        cost = Cost(
            multiply_adds=2 * (few + many) * width**2 + products,
            kept=kept,
            kernel_outputs=4 * width,
            peak=peak,
            widest=max(scores, many * width),
        )
        return cost + Cost(kept=scores, kept_masks=scores) if self.dropout_rate else cost

    def save_own_variables(self, store: Any) -> None:
        save_quantization(store, (self.query, self.key, self.value, self.out))

    def load_own_variables(self, store: Any) -> None:
        load_quantization(store, (self.query, self.key, self.value, self.out))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "rotary": None if self.rotary is None else dataclasses.asdict(self.rotary)}


def _heads_first(x: Any, *, scale: float = 1.0) -> Any:
    """Turn (batch, tokens, heads, head size) into (batch, heads, tokens, head size), times `scale`."""
    return ops.transpose(x if scale == 1.0 else x * scale, (0, 2, 1, 3))
