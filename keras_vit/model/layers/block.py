"""Encoder block (paper, equations 2 and 3)."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import keras
from keras import ops

from keras_vit.model.layers.activations import KEPT_TENSORS, PEAK_TENSORS, activation
from keras_vit.model.layers.attention import MultiHeadAttention
from keras_vit.model.layers.base import BaseLayer
from keras_vit.model.layers.cost import Cost, Shape, norm_cost
from keras_vit.model.layers.fusion import layer_norm, product_then
from keras_vit.model.layers.initializers import initializer
from keras_vit.model.layers.quantized import load_quantization, save_quantization
from keras_vit.model.layers.randomness import Dropout, StochasticDepth, as_one_block

_final_tokens_only: ContextVar[bool] = ContextVar("final_tokens_only", default=False)


@contextmanager
def final_tokens_only() -> Iterator[None]:
    """Let blocks inside the context compute only the tokens that are read of them, `EncoderBlock.final_tokens`."""
    token = _final_tokens_only.set(True)
    try:
        yield
    finally:
        _final_tokens_only.reset(token)


@keras.saving.register_keras_serializable("keras_vit")
class MLP(BaseLayer):
    """Apply Dense, activation and Dense, with dropout after both, to (..., hidden_size) (paper, section 3.1).

    `gated`: the activation is that of a second Dense layer, and multiplies the first one (arXiv 2002.05202).
    `norm_epsilon`: that of a LayerNorm before the last Dense layer; None means no such norm.
    """

    def __init__(
        self,
        mlp_dim: int,
        *,
        activation: str = "gelu_tanh",
        gated: bool = False,
        norm_epsilon: float | None = None,
        dropout_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.mlp_dim = mlp_dim
        self.activation = activation
        self.gated = gated
        self.norm_epsilon = norm_epsilon
        self.dropout_rate = dropout_rate
        self.dropout = Dropout(dropout_rate, dtype=self.dtype_policy, name="dropout")

    def build(self, input_shape: tuple[Any, ...]) -> None:
        hidden_shape = (*input_shape[:-1], self.mlp_dim)
        self.dense1 = self._dense("dense1", self.mlp_dim)
        self.dense1.build(input_shape)
        if self.gated:
            self.gate = self._dense("gate", self.mlp_dim)
            self.gate.build(input_shape)
        if self.norm_epsilon is not None:
            self.norm = keras.layers.LayerNormalization(epsilon=self.norm_epsilon, name="norm", dtype=self.dtype_policy)
            self.norm.build(hidden_shape)
        self.dense2 = self._dense("dense2", input_shape[-1])
        self.dense2.build(hidden_shape)

    def _dense(self, name: str, units: int) -> keras.layers.Dense:
        return keras.layers.Dense(
            units,
            kernel_initializer=initializer("dense"),
            bias_initializer=initializer("dense_bias"),
            dtype=self.dtype_policy,
            name=name,
        )

    def hidden(self, x: Any) -> Any:
        """Return what the norm, if any, and the last Dense layer read, (..., mlp_dim)."""
        if self.gated:
            return product_then(self.gate, x, activation(self.activation)) * product_then(self.dense1, x)
        return product_then(self.dense1, x, activation(self.activation))

    def call(self, x: Any, training: bool | None = None) -> Any:
        x = self.hidden(x)
        x = self.dropout(x if self.norm_epsilon is None else self.norm(x), training=training)
        return self.dropout(self.dense2(x), training=training)

    @property
    def title(self) -> str:
        """The layer in words."""
        return f"{self.mlp_dim:,} wide, {'gated by ' if self.gated else ''}{self.activation}"

    def cost(self, shape: Shape) -> Cost:
        """Return the cost for (positions, width)."""
        positions, width = shape
        hidden = positions * self.mlp_dim
        denses = 3 if self.gated else 2
        cost = Cost(
            multiply_adds=denses * hidden * width,
            kept=positions * width + (KEPT_TENSORS[self.activation] + self.gated) * hidden,
            kernel_outputs=(denses - 1) * self.mlp_dim + width,
            peak=(PEAK_TENSORS[self.activation] + self.gated) * hidden,
            widest=hidden,
        )
        if self.norm_epsilon is not None:
            cost += norm_cost(hidden) + Cost(kept=hidden)
        return cost + Cost(kept_masks=hidden + positions * width) if self.dropout_rate else cost

    @property
    def _dense_layers(self) -> tuple[keras.layers.Dense, ...]:
        return (self.dense1, self.gate, self.dense2) if self.gated else (self.dense1, self.dense2)

    def save_own_variables(self, store: Any) -> None:
        save_quantization(store, self._dense_layers)

    def load_own_variables(self, store: Any) -> None:
        load_quantization(store, self._dense_layers)


@keras.saving.register_keras_serializable("keras_vit")
class LayerScale(BaseLayer):
    """Multiply every channel by a learned factor that starts small (CaiT, arXiv 2103.17239)."""

    def __init__(self, initial: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initial = initial

    def build(self, input_shape: tuple[Any, ...]) -> None:
        constant = keras.initializers.Constant(self.initial)
        self.gamma = self.add_weight(shape=(input_shape[-1],), initializer=constant, name="gamma")

    def call(self, x: Any) -> Any:
        return x * self.gamma

    def cost(self, shape: Shape) -> Cost:
        """Return the cost for tokens (tokens, hidden_size)."""
        return Cost(kept=prod(shape))


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
        self.norm1 = keras.layers.LayerNormalization(epsilon=norm_epsilon, name="norm1", **policy)
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
        self.norm2 = keras.layers.LayerNormalization(epsilon=norm_epsilon, name="norm2", **policy)
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
        tokens = self.final_tokens if _final_tokens_only.get() and not draws else None
        # `training` is passed explicitly: a recomputed block has no outer call from which Keras could take it.
        return as_one_block(functools.partial(self._residuals, tokens=tokens, training=training), *tensors)

    def _residuals(self, x: Any, relative: Any = None, *, tokens: int | None, training: bool | None) -> Any:
        mixed = self._mix(layer_norm(self.norm1, x), relative, training, tokens)
        x = _first(x, tokens) + self._branch(self.dropout(mixed, training=training), self.scale1, training)
        return x + self._branch(self.mlp(layer_norm(self.norm2, x), training=training), self.scale2, training)

    def _mix(self, x: Any, relative: Any, training: bool | None, tokens: int | None = None) -> Any:
        """Return what each of the first `tokens` (None: of all) takes from all tokens."""
        if self.token_mlp is None:
            return self.attention(_first(x, tokens), x, relative=relative, training=training)
        return _first(ops.swapaxes(self.token_mlp(ops.swapaxes(x, 1, 2), training=training), 1, 2), tokens)

    def _branch(self, x: Any, scale: LayerScale | None, training: bool | None) -> Any:
        return self.depth(x if scale is None else scale(x), training=training)

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
            title: norm_cost(stream) + mixer.beside(stream) + scale,
            f"MLP, {self.mlp.title}": norm_cost(prod(few)) + self.mlp.cost(few).beside(stream) + scale,
        }

    def attention_weights(self, x: Any, relative: Any = None) -> Any:
        """Return the attention weights for the block's input, (batch, heads, tokens, tokens); every row sums to 1."""
        x = self.norm1(x)
        return self.attention.weights_of(x, x, relative)


def _first(x: Any, tokens: int | None) -> Any:
    return x if tokens is None else x[:, :tokens]
