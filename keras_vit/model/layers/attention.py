"""Multi-head attention (paper, appendix A). Its weights have an axis for the heads, as in the official files."""

import dataclasses
from typing import Any

import keras
from keras import ops

from keras_vit.model.layers import runtime
from keras_vit.model.layers.base import BaseLayer, DenseRules, Dropout, LayerNormalization, glorot_uniform_matrix
from keras_vit.model.layers.position_variants import as_rotary, relative_scores
from keras_vit.model.layers.runtime import Shape, Tensor

# Added to the scores of tokens that must not be attended to. The exponential of so small a score is exactly 0, and
# float16, which has no numbers beyond 65,504, can hold it.
MASKED = -1e4


@keras.saving.register_keras_serializable("keras_vit")
class SplitHeads(DenseRules, keras.layers.EinsumDense):
    """Project (batch, tokens, width) to (batch, heads, tokens, head size), times `scale`."""

    def __init__(self, num_heads: int, head_size: int, *, use_bias: bool = True, scale: float = 1.0, **kwargs: Any):
        super().__init__(
            "btd,dhk->bthk",
            output_shape=(None, num_heads, head_size),
            bias_axes="hk" if use_bias else None,
            kernel_initializer=glorot_uniform_matrix(num_heads * head_size, num_heads * head_size),
            **kwargs,
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.use_bias = use_bias
        self.scale = scale

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return runtime.product_then(self, super().__call__, x, _heads_first, back=_heads_first, scale=self.scale)

    def get_config(self) -> dict[str, Any]:
        names = ("num_heads", "head_size", "use_bias", "scale")
        return {**keras.layers.Layer.get_config(self), **{name: getattr(self, name) for name in names}}


@keras.saving.register_keras_serializable("keras_vit")
class MergeHeads(DenseRules, keras.layers.EinsumDense):
    """Project (batch, heads, tokens, head size) to (batch, tokens, width)."""

    def __init__(self, width: int, *, use_bias: bool = True, **kwargs: Any) -> None:
        super().__init__(
            "bthk,hkd->btd",
            output_shape=(None, width),
            bias_axes="d" if use_bias else None,
            kernel_initializer=glorot_uniform_matrix(width, width),
            **kwargs,
        )
        self.width = width
        self.use_bias = use_bias

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return runtime.product_then(self, super().__call__, _swap_heads_and_tokens(x), axes=2)

    def get_config(self) -> dict[str, Any]:
        return {**keras.layers.Layer.get_config(self), "width": self.width, "use_bias": self.use_bias}


@keras.saving.register_keras_serializable("keras_vit")
class MultiHeadAttention(BaseLayer):
    """Compute softmax(q k' / sqrt(head size)) v and project it to hidden_size.

    `projects_query` is whether the queries are projected, `key_bias` whether the keys have a bias where queries and
    values have one, `out_bias` whether the projection has one; `rotary` are the arguments of a `Rotary` as a dict.
    `norm_epsilon`: that of a LayerNorm of all heads together before the output projection; None means no such norm.
    `causal`: a token attends only to itself and to tokens in front of it, as in CLIP's text tower; it needs queries and
    attended tokens of the same length, and excludes relative positions.

    Inputs: queries (batch, tokens, hidden_size), other tokens to attend to, the result of a `RelativePosition`, a
    `RelativeBias` or a `RotaryFrequencies`; the last two may be None. Kernels: query, key, value (hidden_size, heads,
    head size), out (heads, head size, hidden_size).
    """

    def __init__(
        self,
        num_heads: int,
        *,
        projects_query: bool = True,
        use_bias: bool = True,
        key_bias: bool = True,
        out_bias: bool = True,
        rotary: dict[str, Any] | None = None,
        norm_epsilon: float | None = None,
        causal: bool = False,
        dropout_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.causal = causal
        self.projects_query = projects_query
        self.use_bias = use_bias
        self.key_bias = key_bias
        self.out_bias = out_bias
        self.rotary = None if rotary is None else as_rotary(rotary)
        self.norm_epsilon = norm_epsilon
        self.dropout_rate = dropout_rate
        self.dropout = Dropout(dropout_rate, dtype=self.dtype_policy, name="dropout")

    def build(self, input_shape: Shape, *_: Any) -> None:
        hidden_size = input_shape[-1]
        head_size = hidden_size // self.num_heads
        self.scale = head_size**-0.5
        heads, policy = (self.num_heads, head_size), {"dtype": self.dtype_policy}
        has_key_bias = self.use_bias and self.key_bias
        self.query: Any = None
        if self.projects_query:
            self.query = SplitHeads(*heads, use_bias=self.use_bias, scale=self.scale, name="query", **policy)
        self.key = SplitHeads(*heads, use_bias=has_key_bias, name="key", **policy)
        self.value = SplitHeads(*heads, use_bias=self.use_bias, name="value", **policy)
        for projection in (self.query, self.key, self.value):
            if projection is not None:
                projection.build((None, None, hidden_size))
        if self.norm_epsilon is not None:
            self.norm = LayerNormalization(epsilon=self.norm_epsilon, name="norm", **policy)
            self.norm.build((None, None, hidden_size))
        self.out = MergeHeads(hidden_size, use_bias=self.out_bias, name="out", **policy)
        self.out.build((None, None, *heads))

    def call(
        self, queries: Tensor, attended: Tensor = None, relative: Tensor = None, training: bool | None = None
    ) -> Tensor:
        attended = queries if attended is None else attended
        query, key, added = self._score_inputs(queries, attended, relative)
        value = self.value(attended)
        if training and self.dropout_rate:
            weights = self.dropout(runtime.attention_weights(query, key, added), training=True)
            mixed = ops.matmul(weights, value)
        else:
            mixed = runtime.attend(query, key, added, value, training=training)
        return self.out(mixed if self.norm_epsilon is None else self._normalized(mixed))

    def _normalized(self, mixed: Tensor) -> Tensor:
        """Normalize each token of (batch, heads, tokens, head size) over all heads."""
        heads_last = _swap_heads_and_tokens(mixed)
        batch, tokens, heads, size = ops.shape(heads_last)
        joined = self.norm(ops.reshape(heads_last, (batch, tokens, heads * size)))
        return _swap_heads_and_tokens(ops.reshape(joined, (batch, tokens, heads, size)))

    def weights_of(self, queries: Tensor, attended: Tensor, relative: Tensor = None) -> Tensor:
        """Compute the attention weights, (batch, heads, queries, attended); every row sums to 1."""
        return runtime.attention_weights(*self._score_inputs(queries, attended, relative))

    def _score_inputs(self, queries: Tensor, attended: Tensor, relative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries and keys of every head, and the bias that is added to their products, or None."""
        query, key = self._split(queries) if self.query is None else self.query(queries), self.key(attended)
        if self.rotary is not None:
            learned, relative = (None, relative) if self.rotary.block is None else (relative, None)
            query, key = self.rotary.turn(query, learned), self.rotary.turn(key, learned)
        if self.causal:
            if relative is not None:
                raise ValueError(
                    "Causal attention takes no relative positions. Received: relative positions and causal=True"
                )
            tokens = ops.shape(attended)[1]
            return query, key, ops.triu(ops.full((tokens, tokens), MASKED, query.dtype), 1)
        if relative is None or len(relative.shape) == 3:
            return query, key, None if relative is None else relative_scores(query, relative)
        return query, key, relative[:, :, : query.shape[2]]

    def _split(self, queries: Tensor) -> Tensor:
        """Scale queries that are not projected, and turn them into (batch, heads, tokens, head size)."""
        batch, tokens, width = ops.shape(queries)
        by_head = ops.reshape(queries, (batch, tokens, self.num_heads, width // self.num_heads))
        return _heads_first(by_head, scale=self.scale)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "rotary": None if self.rotary is None else dataclasses.asdict(self.rotary)}


def _heads_first(x: Tensor, *, scale: float) -> Tensor:
    """Turn (batch, tokens, heads, head size) into (batch, heads, tokens, head size), times `scale`; or the reverse."""
    return _swap_heads_and_tokens(x if scale == 1.0 else x * scale)


def _swap_heads_and_tokens(x: Tensor) -> Tensor:
    return ops.transpose(x, (0, 2, 1, 3))
