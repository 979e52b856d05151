"""Connect the layers of a Vision Transformer, from a config (paper, figure 1)."""

import functools
from typing import Any

import keras

from keras_vit.model import layers as vit
from keras_vit.model.config import ViTConfig
from keras_vit.model.layers.activations import activation_function
from keras_vit.model.layers.base import initializer
from keras_vit.model.layers.relative import RelativePosition

# Fields of a config that are arguments of its encoder blocks.
BLOCK_FIELDS = (
    *("num_heads", "mlp_dim", "activation", "norm_epsilon", "qkv_bias", "key_bias", "gated_mlp", "mlp_norm"),
    *("layer_scale", "tokens_mlp_dim", "dropout_rate", "attention_dropout_rate"),
)


class Network:
    """Connect the layers of a Vision Transformer as symbolic Keras tensors, under a dtype policy."""

    def __init__(self, config: ViTConfig, policy: Any) -> None:
        self.config = config
        self.policy = policy
        # At least float32 for logits and for the feature of a model without a head: a bfloat16 softmax has 3 digits.
        self.output_dtype = "float64" if policy.compute_dtype == "float64" else "float32"
        self.intermediates: dict[str, Any] = {}  # name -> tensor, in the order of computation
        self.block_inputs: dict[str, tuple[Any, ...]] = {}  # block -> tokens, and the table of relative positions
        self._position_layer = functools.cache(self._new_position_layer)
        height, width = config.size
        self.images = keras.Input((height, width, config.num_channels), dtype=self.output_dtype, name="images")
        tokens = self._encoder(self._tokens(self._stem(self.images)))
        self.output = self._head(tokens)

    def _record(self, name: str, tensor: Any) -> Any:
        self.intermediates[name] = tensor
        return tensor

    def _stem(self, x: Any) -> Any:
        resnet = self.config.resnet
        if resnet is None:
            return x
        names = ("version", "norm_epsilon", "conv_epsilon", "conv_epsilon_place")
        options = {"dtype": self.policy, **{name: getattr(resnet, name) for name in names}}
        x = self._record("root", vit.ResNetRoot(resnet.width, name="root", **options)(x))
        for stage, (units, width) in enumerate(zip(resnet.num_layers, resnet.widths, strict=True), start=1):
            for unit in range(1, units + 1):
                strides = 2 if unit == 1 and stage > 1 else 1
                name = f"stage_{stage}_unit_{unit}"
                x = vit.ResNetUnit(width, strides=strides, name=name, **options)(x)
            self._record(f"stage_{stage}", x)
        if resnet.version == 2:
            x = vit.GroupNormalization(resnet.norm_epsilon, name="resnet_norm", dtype=self.policy)(x)
            x = self._record("resnet", keras.layers.ReLU(name="resnet", dtype=self.policy)(x))
        return x

    def _tokens(self, x: Any) -> Any:
        c = self.config
        if not c.num_layers:  # a ResNet: its cells are the tokens
            flatten = keras.layers.Reshape((-1, c.hidden_size), name="tokens", dtype=self.policy)
            return self._record("tokens", flatten(x))
        x = vit.PatchEmbedding(c.hidden_size, c.patch, use_bias=c.patch_bias, name="embedding", dtype=self.policy)(x)
        self._record("embedding", x)
        # Google prepends the class token first, big_vision adds the position embedding first.
        steps = (self._prefix, self._position) if c.position_prefix else (self._position, self._prefix)
        for step in steps:
            x = step(x)
        x = vit.Dropout(c.dropout_rate, name="dropout", dtype=self.policy)(x)
        if c.pre_norm:
            x = self._norm("pre_norm")(x)
        return self._record("tokens", x)

    def _prefix(self, x: Any) -> Any:
        c = self.config
        if not c.num_prefix_tokens:
            return x
        return vit.PrefixTokens(
            class_token=bool(c.class_token),
            distilled=c.distilled,
            num_registers=c.num_registers,
            name="prefix",
            dtype=self.policy,
        )(x)

    def _position(self, x: Any) -> Any:
        c = self.config
        return x if c.position == "none" or c.position_place != "stem" else self._position_layer("position")(x)

    def _block_input(self, x: Any, i: int) -> tuple[Any, ...]:
        """Return the inputs of block i: the tokens, with positions added, or with the table of relative positions."""
        c = self.config
        if c.position_place == "stem":
            return (x,)
        positions = self._position_layer("position" if c.position_place == "shared" else f"position_{i}")(x)
        return (x, positions) if c.position == "relative" else (positions,)

    def _new_position_layer(self, name: str) -> keras.layers.Layer:
        c = self.config
        if c.position == "relative":
            return RelativePosition(
                c.grid, c.num_heads, prefix_tokens=c.num_prefix_tokens, name=name, dtype=self.policy
            )
        return vit.PositionEmbedding(
            c.grid,
            prefix_tokens=c.position_prefix_tokens,
            kind=c.position,
            method=c.position_method,
            name=name,
            dtype=self.policy,
        )

    def _encoder(self, x: Any) -> Any:
        c = self.config
        rotary = {
            "grid": c.grid,
            "prefix_tokens": c.num_prefix_tokens,
            "theta": c.rotary_theta,
            "trained_grid": c.rotary_grid,
            "interleaved": c.rotary_interleaved,
        }
        for i in range(c.num_layers):
            block = vit.EncoderBlock(
                **{name: getattr(c, name) for name in BLOCK_FIELDS},
                rotary=None if c.rotary_theta is None else rotary,
                stochastic_depth=c.stochastic_depth * i / max(1, c.num_layers - 1),
                final_tokens=c.num_final_tokens if i == c.num_layers - 1 and c.classifier == "token" else None,
                name=f"block_{i}",
                dtype=self.policy,
            )
            self.block_inputs[block.name] = self._block_input(x, i)
            x = self._record(block.name, block(*self.block_inputs[block.name]))
        if c.final_norm == "tokens" and c.num_layers:
            x = self._record("encoder_norm", self._norm("encoder_norm")(x))
        return x

    def _head(self, tokens: Any) -> Any:
        c = self.config
        x = self._representation(self._pool(tokens, token=0))
        if c.normalize_features:
            x = vit.L2Normalization(name="normalized", dtype=self.output_dtype)(x)
        if not c.distilled:
            self._record("pre_logits", x)
            return self._record("logits", self._classes("head")(x)) if c.num_classes else self._feature(x)
        distilled = self._pool(tokens, token=1)
        self._record("pre_logits", keras.layers.Average(name="mean_feature", dtype=self.policy)([x, distilled]))
        if not c.num_classes:
            return self._feature(self.intermediates["pre_logits"])
        heads = [self._classes("head")(x), self._classes("head_distillation")(distilled)]
        return self._record("logits", keras.layers.Average(name="mean_logits", dtype=self.output_dtype)(heads))

    def _pool(self, x: Any, token: int) -> Any:
        c = self.config
        if c.has_map_head:
            x = vit.AttentionPooling(
                c.num_heads,
                c.mlp_dim,
                activation=c.activation,
                norm_epsilon=c.norm_epsilon,
                prefix_tokens=c.num_prefix_tokens,
                name="pool",
                dtype=self.policy,
            )(x)
        elif not c.is_unpooled:
            options = {"prefix_tokens": c.num_prefix_tokens, "dtype": self.policy}
            name = "pool" if token == 0 else f"pool_{token}"
            parts = [] if c.classifier == "gap" else [vit.TokenPooling(token=token, name=name, **options)(x)]
            if c.classifier != "token":
                parts.append(vit.TokenPooling(name="pool_mean" if parts else "pool", **options)(x))
            x = parts[0] if len(parts) == 1 else keras.layers.Concatenate(name="pools", dtype=self.policy)(parts)
        return self._norm("encoder_norm")(x) if c.final_norm == "pooled" else x

    def _representation(self, x: Any) -> Any:
        if self.config.representation_size is None:
            return x
        return keras.layers.Dense(
            self.config.representation_size,
            activation=activation_function(self.config.representation_activation),
            kernel_initializer=initializer("convolution"),
            name="pre_logits",
            dtype=self.policy,
        )(x)

    def _classes(self, name: str) -> keras.layers.Dense:
        # The kernel starts at zero for fine-tuning, as in the paper (section 3.2).
        return keras.layers.Dense(
            self.config.num_classes,
            kernel_initializer="zeros",
            bias_initializer=keras.initializers.Constant(self.config.head_bias_init),
            name=name,
            dtype=self.output_dtype,
        )

    def _norm(self, name: str) -> vit.LayerNormalization:
        return vit.LayerNormalization(epsilon=self.config.norm_epsilon, name=name, dtype=self.policy)

    def _feature(self, x: Any) -> Any:
        return keras.layers.Identity(name="feature", dtype=self.output_dtype)(x)
