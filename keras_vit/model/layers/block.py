"""Encoder block (paper, equations 2 and 3)."""

from math import prod
from typing import Any

import keras
from keras import ops

from keras_vit.model.layers import runtime
from keras_vit.model.layers.attention import MultiHeadAttention
from keras_vit.model.layers.base import BaseLayer
from keras_vit.model.layers.cost import Cost, Shape
from keras_vit.model.layers.dropout import Dropout, StochasticDepth
from keras_vit.model.layers.mlp import MLP
from keras_vit.model.layers.norm import LayerNormalization, LayerScale


@keras.saving.register_keras_serializable("keras_vit")
class EncoderBlock(BaseLayer):
    """Compute x + attention(norm1(x)), then x + mlp(norm2(x)), for tokens (batch, tokens, hidden_size).

    An MLP over the tokens replaces attention if `tokens_mlp_dim` is given (MLP-Mixer, arXiv 2105.01601).
    The arguments are fields of `ViTConfig`; `stochastic_depth` is the probability of dropping a branch of this block,
    `rotary` the arguments of a `Rotary`.
    For relative attention the table of a `RelativePosition` is a second input. `final_tokens` is the number of tokens,
    from the first, that the model's head reads of this block; None means all.
    """

    def __init__(
        self,
        num_heads: int,
        mlp_dim: int,
        *,
        activation: str = "gelu_tanh",
        norm_epsilon: float = 1e-6,
        qkv_bias: bool = True,
        key_bias: bool = True,
        gated_mlp: bool = False,
        mlp_norm: bool = False,
        rotary: dict[str, Any] | None = None,
        layer_scale: float | None = None,
        tokens_mlp_dim: int | None = None,
        dropout_rate: float = 0.0,
        attention_dropout_rate: float = 0.0,
        stochastic_depth: float = 0.0,
        final_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.mlp_dim = mlp_dim
        self.activation = activation
        self.norm_epsilon = norm_epsilon
        self.qkv_bias = qkv_bias
        self.key_bias = key_bias
        self.gated_mlp = gated_mlp
        self.mlp_norm = mlp_norm
        self.rotary = rotary
        self.layer_scale = layer_scale
        self.tokens_mlp_dim = tokens_mlp_dim
        self.dropout_rate = dropout_rate
        self.attention_dropout_rate = attention_dropout_rate
        self.stochastic_depth = stochastic_depth
        self.final_tokens = final_tokens
        policy = {"dtype": self.dtype_policy}
        self.norm1 = LayerNormalization(epsilon=norm_epsilon, is_fused=True, name="norm1", **policy)
        self.attention: Any = None
        self.token_mlp: Any = None
        if tokens_mlp_dim is None:
            self.attention = MultiHeadAttention(
                num_heads,
                use_bias=qkv_bias,
                key_bias=key_bias,
                rotary=rotary,
                dropout_rate=attention_dropout_rate,
                name="attention",
                **policy,
            )
        else:
            self.token_mlp = MLP(tokens_mlp_dim, activation=activation, name="token_mlp", **policy)
        self.norm2 = LayerNormalization(epsilon=norm_epsilon, is_fused=True, name="norm2", **policy)
        self.mlp = MLP(
            mlp_dim,
            activation=activation,
            gated=gated_mlp,
            norm_epsilon=norm_epsilon if mlp_norm else None,
            dropout_rate=dropout_rate,
            name="mlp",
            **policy,
        )
        self.dropout = Dropout(dropout_rate, name="dropout", **policy)
        self.depth = StochasticDepth(stochastic_depth, name="depth", **policy)
        self.scale1 = LayerScale(layer_scale, name="scale1", **policy) if layer_scale is not None else None
        self.scale2 = LayerScale(layer_scale, name="scale2", **policy) if layer_scale is not None else None

    def build(self, input_shape: tuple[Any, ...]) -> None:
        # Keras' `quantize` refuses a layer that is not built, also one without weights.
        parts = (self.norm1, self.attention, self.norm2, self.mlp, self.depth, self.scale1, self.scale2)
        for part in parts:
            if part is not None:
                part.build(input_shape)
        if self.token_mlp is not None:
            batch, tokens, hidden_size = input_shape
            self.token_mlp.build((batch, hidden_size, tokens))

    def call(self, x: Any, relative: Any = None, training: bool | None = None) -> Any:
        tensors = (x,) if relative is None else (x, relative)
        # With dropout all tokens are computed, so that the masks of a seed do not depend on `final_tokens`.
        draws = training and (self.dropout_rate or self.attention_dropout_rate)
        tokens = None if draws else runtime.tokens_to_compute(self.final_tokens)
        return runtime.as_one_block(self._residuals, *tensors, tokens=tokens, training=training)

    def _residuals(self, x: Any, relative: Any = None, *, tokens: int | None, training: bool | None) -> Any:
        """Compute equations 2 and 3 for the first `tokens` of x (None: for all)."""
        mixed = self._mix(self.norm1(x), relative, tokens, training)
        x = _first(x, tokens) + self._drop(mixed, self.scale1, training)
        return x + self._drop(self.mlp(self.norm2(x), training=training), self.scale2, training)

    def _mix(self, x: Any, relative: Any, tokens: int | None, training: bool | None) -> Any:
        """Return what each of the first `tokens` takes from all tokens."""
        if self.attention is not None:
            mixed = self.attention(_first(x, tokens), x, relative=relative, training=training)
        else:
            mixed = _first(ops.swapaxes(self.token_mlp(ops.swapaxes(x, 1, 2), training=training), 1, 2), tokens)
        return self.dropout(mixed, training=training)

    def _drop(self, branch: Any, scale: LayerScale | None, training: bool | None) -> Any:
        """Scale a residual branch, and drop it for some images."""
        return self.depth(branch if scale is None else scale(branch), training=training)

    def part_costs(self, shape: Shape, relative: Shape | None = None, *, tokens: int | None = None) -> dict[str, Cost]:
        """Return the cost of the attention (or token MLP) and of the MLP, each with its norm and LayerScale, by title.

        `shape` is (tokens, hidden_size); `tokens` are those that the block computes in its results (None: all).
        """
        few = (shape[0] if tokens is None else tokens, shape[1])
        stream, scale = prod(shape), Cost() if self.scale1 is None else self.scale1.cost(few)
        if self.token_mlp is None:
            mixer, title = self.attention.cost(few, shape, relative), self.attention.title
        else:
            mixer, title = self.token_mlp.cost(shape[::-1]), f"MLP over the tokens, {self.token_mlp.title}"
        if self.dropout_rate:
            mixer += Cost(kept_masks=prod(few))
        return {
            title: self.norm1.cost(shape) + mixer.beside(stream) + scale,
            f"MLP, {self.mlp.title}": self.norm2.cost(few) + self.mlp.cost(few).beside(stream) + scale,
        }

    def attention_weights(self, x: Any, relative: Any = None) -> Any:
        """Return the attention weights for the block's input, (batch, heads, tokens, tokens); every row sums to 1."""
        x = self.norm1(x)
        return self.attention.weights_of(x, x, relative)


def _first(x: Any, tokens: int | None) -> Any:
    return x if tokens is None else x[:, :tokens]
