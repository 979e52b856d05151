"""Encoder blocks: attention and MLP with residual connections (ViT paper, equations 2 and 3)."""

import dataclasses
from typing import Any, Self

import keras
from keras import ops

from keras_vit.model.config import BlockConfig
from keras_vit.model.layers import runtime
from keras_vit.model.layers.attention import MultiHeadAttention
from keras_vit.model.layers.base import (
    BaseLayer,
    DenseRules,
    Dropout,
    LayerNormalization,
    LayerScale,
    StochasticDepth,
    activation_function,
    dense_layer,
    initializer,
)
from keras_vit.model.layers.runtime import Shape, Tensor


@keras.saving.register_keras_serializable("keras_vit")
class Dense(DenseRules, keras.layers.Dense):
    """Keras' Dense, with an activation by its name; `runtime` can make bias and activation one program."""

    def __init__(self, units: int, *, activation: str | None = None, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.after = None if activation is None else activation_function(activation)
        self.activation_name = activation

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Not `call`: the compiled piece takes the product before its bias, which Keras' __call__ has with its casts.
        return runtime.product_then(self, super().__call__, x, self.after)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "activation": self.activation_name}


@keras.saving.register_keras_serializable("keras_vit")
class MLP(BaseLayer):
    """Apply Dense, activation and Dense, with dropout after both, to (..., hidden_size).

    `gated`: the activation is that of a second Dense layer, and multiplies the first one (arXiv 2002.05202).
    `norm_epsilon`: that of a LayerNorm before the last Dense layer; None means no such norm. `use_bias`: of all layers.
    """

    def __init__(
        self,
        mlp_dim: int,
        *,
        activation: str = "gelu_tanh",
        gated: bool = False,
        norm_epsilon: float | None = None,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.mlp_dim = mlp_dim
        self.activation = activation
        self.gated = gated
        self.norm_epsilon = norm_epsilon
        self.use_bias = use_bias
        self.dropout_rate = dropout_rate
        self.dropout = Dropout(dropout_rate, dtype=self.dtype_policy, name="dropout")

    def build(self, input_shape: Shape) -> None:
        hidden_shape = (*input_shape[:-1], self.mlp_dim)
        self.dense1 = Dense(
            self.mlp_dim, activation=None if self.gated else self.activation, name="dense1", **self._options()
        )
        self.dense1.build(input_shape)
        if self.gated:
            self.gate = Dense(self.mlp_dim, activation=self.activation, name="gate", **self._options())
            self.gate.build(input_shape)
        if self.norm_epsilon is not None:
            self.norm = LayerNormalization(epsilon=self.norm_epsilon, name="norm", dtype=self.dtype_policy)
            self.norm.build(hidden_shape)
        self.dense2 = dense_layer(input_shape[-1], name="dense2", **self._options())
        self.dense2.build(hidden_shape)

    def _options(self) -> dict[str, Any]:
        return {
            "use_bias": self.use_bias,
            "kernel_initializer": initializer("dense"),
            "bias_initializer": initializer("dense_bias"),
            "dtype": self.dtype_policy,
        }

    def call(self, x: Tensor, training: bool | None = None) -> Tensor:
        x = self.gate(x) * self.dense1(x) if self.gated else self.dense1(x)
        if self.norm_epsilon is not None:
            x = self.norm(x)
        x = self.dropout(x, training=training)
        return self.dropout(self.dense2(x), training=training)


@keras.saving.register_keras_serializable("keras_vit")
class EncoderBlock(BaseLayer):
    """Compute x + attention(norm1(x)), then x + mlp(norm2(x)), for tokens (batch, tokens, hidden_size).

    An MLP over the tokens replaces attention if `config.tokens_mlp_dim` is given (MLP-Mixer, arXiv 2105.01601).
    `stochastic_depth` is the probability of dropping a branch, `rotary` the arguments of a `Rotary`, `causal` whether a
    token attends only to itself and to those in front of it. The result of a `RelativePosition`, a `RelativeBias` or a
    `RotaryFrequencies` is a second input. `final_tokens` is the number of tokens, from the first, that the model's head
    reads of this block; None means all.
    """

    def __init__(
        self,
        config: BlockConfig,
        *,
        rotary: dict[str, Any] | None = None,
        causal: bool = False,
        stochastic_depth: float = 0.0,
        final_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.config = config
        self.rotary = rotary
        self.causal = causal
        self.stochastic_depth = stochastic_depth
        self.final_tokens = final_tokens
        policy = {"dtype": self.dtype_policy}
        norm = {**config.norm_options, "is_fused": True, **policy}
        self.norm1 = LayerNormalization(name="norm1", **norm)
        self.attention: Any = None
        self.token_mlp: Any = None
        if config.tokens_mlp_dim is None:
            self.attention = MultiHeadAttention(
                config.num_heads,
                use_bias=config.qkv_bias,
                key_bias=config.key_bias,
                out_bias=config.dense_bias,
                rotary=rotary,
                norm_epsilon=config.norm_epsilon if config.attention_norm else None,
                causal=causal,
                dropout_rate=config.attention_dropout_rate,
                name="attention",
                **policy,
            )
        else:
            self.token_mlp = MLP(
                config.tokens_mlp_dim,
                activation=config.activation,
                use_bias=config.dense_bias,
                name="token_mlp",
                **policy,
            )
        self.norm2 = LayerNormalization(name="norm2", **norm)
        self.mlp = MLP(
            config.mlp_dim,
            activation=config.activation,
            gated=config.gated_mlp,
            norm_epsilon=config.norm_epsilon if config.mlp_norm else None,
            use_bias=config.dense_bias,
            dropout_rate=config.dropout_rate,
            name="mlp",
            **policy,
        )
        self.dropout = Dropout(config.dropout_rate, name="dropout", **policy)
        self.depth = StochasticDepth(stochastic_depth, name="depth", **policy)
        self.scale1: Any = None
        self.scale2: Any = None
        if config.layer_scale is not None:
            self.scale1 = LayerScale(config.layer_scale, name="scale1", **policy)
            self.scale2 = LayerScale(config.layer_scale, name="scale2", **policy)

    def build(self, input_shape: Shape) -> None:
        parts = (self.norm1, self.attention, self.norm2, self.mlp, self.depth, self.scale1, self.scale2)
        for part in parts:
            if part is not None:
                part.build(input_shape)
        if self.token_mlp is not None:
            batch, tokens, hidden_size = input_shape
            self.token_mlp.build((batch, hidden_size, tokens))

    def call(self, x: Tensor, relative: Tensor = None, training: bool | None = None) -> Tensor:
        tensors = (x,) if relative is None else (x, relative)
        # With dropout all tokens are computed, so that the masks of a seed do not depend on `final_tokens`.
        draws = training and (self.config.dropout_rate or self.config.attention_dropout_rate)
        tokens = None if draws else runtime.tokens_to_compute(self.final_tokens)
        return runtime.as_one_block(self._residuals, *tensors, tokens=tokens, training=training)

    def _residuals(self, x: Tensor, relative: Tensor = None, *, tokens: int | None, training: bool | None) -> Tensor:
        """Compute equations 2 and 3 for the first `tokens` of x (None: for all)."""

        def drop(branch: Tensor, scale: Tensor) -> Tensor:
            return self.depth(branch if scale is None else scale(branch), training=training)

        mixed = self._mix(self.norm1(x), relative, tokens, training)
        x = _first(x, tokens) + drop(mixed, self.scale1)
        return x + drop(self.mlp(self.norm2(x), training=training), self.scale2)

    def _mix(self, x: Tensor, relative: Tensor, tokens: int | None, training: bool | None) -> Tensor:
        """Mix the tokens: results for the first `tokens`, which attend to all."""
        if self.attention is not None:
            mixed = self.attention(_first(x, tokens), x, relative=relative, training=training)
        else:
            mixed = _first(ops.swapaxes(self.token_mlp(ops.swapaxes(x, 1, 2), training=training), 1, 2), tokens)
        return self.dropout(mixed, training=training)

    def attention_weights(self, x: Tensor, relative: Tensor = None) -> Tensor:
        """Compute the attention weights for the block's input, (batch, heads, tokens, tokens); every row sums to 1."""
        x = self.norm1(x)
        return self.attention.weights_of(x, x, relative)

    def get_config(self) -> dict[str, Any]:
        """Arguments of the layer, with those of the block's config spelled flat."""
        config = super().get_config()
        block: BlockConfig = config.pop("config")
        return {**config, **block.to_dict()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        names = {field.name for field in dataclasses.fields(BlockConfig)}
        block = BlockConfig(**{name: value for name, value in config.items() if name in names})
        return super().from_config({"config": block, **{k: v for k, v in config.items() if k not in names}})


def _first(x: Tensor, tokens: int | None) -> Tensor:
    return x if tokens is None else x[:, :tokens]
