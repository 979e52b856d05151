"""From pixels to logits: connect the layers of a Vision Transformer, in order of computation (paper, figure 1)."""

import functools
from typing import Any

import keras
import numpy as np

from keras_vit.model import layers as vit
from keras_vit.model.config import ViTConfig
from keras_vit.model.layers.base import activation_function, dense_layer, initializer
from keras_vit.model.layers.position_variants import RelativeBias, RelativePosition, RotaryFrequencies
from keras_vit.model.layers.runtime import Tensor


def rotary_arguments(c: ViTConfig, block: int | None = None, *, queries: int = 0) -> dict[str, Any] | None:
    """Arguments of the `Rotary` of a block, None without one; `queries` are tokens in front of all others."""
    if c.rotary_theta is None:
        return None
    return {
        "grid": c.grid,
        "prefix_tokens": queries + c.num_prefix_tokens,
        "theta": c.rotary_theta,
        "trained_grid": c.rotary_grid,
        "interleaved": c.rotary_interleaved,
        "offset": c.rotary_offset,
        "axes": c.rotary_axes,
        "block": block if c.rotary_learned else None,
    }


def image_kernel(config: ViTConfig) -> str:
    """Path of the kernel that reads the images' channels."""
    return "embedding/kernel" if config.resnet is None else "root/conv/kernel"


def adapt_channels(kernel: np.ndarray, num_channels: int) -> np.ndarray:
    """Adapt a convolution's kernel (height, width, channels, filters) to images of another number of channels.

    One channel gets the sum over the channels. More get the channels again and again, multiplied by the share
    old / new, so that images of equal channels give what they gave. Source: timm/models/_manipulate.py,
    adapt_input_conv.
    """
    old = kernel.shape[2]
    if num_channels == old:
        return kernel
    numbers = kernel.astype(np.float32)
    if num_channels == 1:
        numbers = numbers.sum(axis=2, keepdims=True)
    else:
        numbers = numbers[:, :, np.arange(num_channels) % old] * (old / num_channels)
    return numbers.astype(kernel.dtype)


class Network:
    """Symbolic Keras tensors of a Vision Transformer, under a dtype policy."""

    def __init__(self, config: ViTConfig, policy: Any) -> None:
        self.config = config
        self.policy = policy
        # At least float32 for logits and for the feature of a model without a head: a bfloat16 softmax has 3 digits.
        self.output_dtype = "float64" if policy.compute_dtype == "float64" else "float32"
        self.intermediates: dict[str, Any] = {}  # name -> tensor, in the order of computation
        self.block_inputs: dict[str, tuple[Any, ...]] = {}  # block -> tokens, and what is relative to others
        # The same layer each time that it is asked for.
        self._position_layer = functools.cache(self._new_position_layer)
        self._final_norm = functools.cache(functools.partial(self._norm, "encoder_norm"))

        height, width = config.size
        self.images = keras.Input((height, width, config.num_channels), dtype=self.output_dtype, name="images")
        x = self.images if config.resnet is None else self._resnet(self.images)
        x = self._tokens(x) if config.num_layers else self._cells(x)
        for i in range(config.num_layers):
            x = self._block(x, i)
        if config.num_layers and config.final_norm == "tokens":
            x = self._record("encoder_norm", self._final_norm()(x))
        self.output = self._distilled_output(x) if config.distilled else self._output(x)

    def _record(self, name: str, tensor: Tensor) -> Tensor:
        self.intermediates[name] = tensor
        return tensor

    # ---- from pixels to tokens

    def _resnet(self, x: Tensor) -> Tensor:
        """Apply the ResNet of a hybrid or a BiT."""
        resnet: Any = self.config.resnet
        names = ("version", "norm_epsilon", "conv_epsilon", "conv_epsilon_place", "groups")
        options = {"dtype": self.policy, **{name: getattr(resnet, name) for name in names}}
        x = self._record("root", vit.ResNetRoot(resnet.width, name="root", **options)(x))
        stages = zip(resnet.num_layers, resnet.widths, resnet.outputs, strict=True)
        for stage, (units, width, channels) in enumerate(stages, start=1):
            for unit in range(1, units + 1):
                strides = 2 if unit == 1 and stage > 1 else 1
                name = f"stage_{stage}_unit_{unit}"
                x = vit.ResNetUnit(width, channels=channels, strides=strides, name=name, **options)(x)
            self._record(f"stage_{stage}", x)
        if resnet.version == 2:
            norm = {"groups": resnet.groups, "name": "resnet_norm", "dtype": self.policy}
            x = vit.GroupNormalization(resnet.norm_epsilon, **norm)(x)
            x = self._record("resnet", keras.layers.ReLU(name="resnet", dtype=self.policy)(x))
        return x

    def _cells(self, x: Tensor) -> Tensor:
        """Take the cells of a ResNet without a Transformer as tokens."""
        flatten = keras.layers.Reshape((-1, self.config.hidden_size), name="tokens", dtype=self.policy)
        return self._record("tokens", flatten(x))

    def _tokens(self, x: Tensor) -> Tensor:
        """Embed patches, add positions and prefix tokens (equation 1)."""
        c = self.config
        x = vit.PatchEmbedding(c.hidden_size, c.patch, use_bias=c.patch_bias, name="embedding", dtype=self.policy)(x)
        self._record("embedding", x)
        if c.patch_norm:
            x = self._record("patch_norm", self._norm("patch_norm")(x))
        # Google prepends the class token first, big_vision adds the position embedding first.
        if c.position_prefix:
            x = self._prefix(x)
        if c.position != "none" and c.position_place == "stem":
            x = self._position_layer("position")(x)
        if not c.position_prefix:
            x = self._prefix(x)
        x = vit.Dropout(c.dropout_rate, name="dropout", dtype=self.policy)(x)
        if c.pre_norm:
            x = self._norm("pre_norm")(x)
        return self._record("tokens", x)

    def _prefix(self, x: Tensor) -> Tensor:
        c = self.config
        if not c.num_prefix_tokens:
            return x
        return vit.PrefixTokens(
            class_token=bool(c.class_token),
            num_class_tokens=c.num_class_tokens,
            distilled=c.distilled,
            num_registers=c.num_registers,
            name="prefix",
            dtype=self.policy,
        )(x)

    def _new_position_layer(self, name: str) -> keras.layers.Layer:
        c = self.config
        options = {"name": name, "dtype": self.policy}
        if c.position == "relative":
            return RelativePosition(c.grid, c.num_heads, prefix_tokens=c.num_prefix_tokens, **options)
        prefix = c.position_prefix_tokens
        return vit.PositionEmbedding(c.grid, prefix_tokens=prefix, kind=c.position, method=c.position_method, **options)

    def _new_bias_layer(self, name: str) -> RelativeBias:
        c = self.config
        return RelativeBias(
            c.grid,
            c.num_heads,
            prefix_tokens=c.num_prefix_tokens,
            mlp_dim=c.relative_bias_mlp_dim,
            method=c.position_method,
            name=name,
            dtype=self.policy,
        )

    def _rotary_frequencies(self) -> RotaryFrequencies:
        c = self.config
        return RotaryFrequencies(
            rotary_arguments(c) or {},
            num_layers=c.num_layers,
            num_heads=c.num_heads,
            head_size=c.hidden_size // c.num_heads,
            name="rotary",
            dtype=self.output_dtype,  # under every policy: angles of several turns need its digits
        )

    # ---- the encoder

    def _block(self, x: Tensor, i: int) -> Tensor:
        c = self.config
        is_last = i == c.num_layers - 1
        block = vit.EncoderBlock(
            c.block,
            rotary=rotary_arguments(c, i),
            stochastic_depth=c.stochastic_depth * i / max(1, c.num_layers - 1),
            final_tokens=c.num_final_tokens if is_last and c.classifier == "token" else None,
            name=f"block_{i}",
            dtype=self.policy,
        )
        self.block_inputs[block.name] = self._block_input(x, i)
        return self._record(block.name, block(*self.block_inputs[block.name]))

    def _block_input(self, x: Tensor, i: int) -> tuple[Tensor, ...]:
        """Inputs of block i: the tokens, with positions added, or with relative or learned rotary ones, or biases."""
        c = self.config
        inputs: tuple[Any, ...] = (x,)
        if c.position_place != "stem":
            positions = self._position_layer("position" if c.position_place == "shared" else f"position_{i}")(x)
            inputs = (x, positions) if c.position == "relative" else (positions,)
        if i and (c.relative_bias == "shared" or c.rotary_learned):
            return (*inputs, self.block_inputs["block_0"][-1])
        if c.rotary_learned:
            inputs += (self._rotary_frequencies()(x),)
        if c.relative_bias != "none":
            name = "relative_bias" if c.relative_bias == "shared" else f"relative_bias_{i}"
            inputs += (self._new_bias_layer(name)(x),)
        return inputs

    def _norm(self, name: str) -> vit.LayerNormalization:
        return vit.LayerNormalization(name=name, dtype=self.policy, **self.config.norm_options)

    # ---- from tokens to logits

    def _output(self, tokens: Tensor) -> Tensor:
        c = self.config
        x = self._pool(tokens)
        if c.final_norm == "pooled":
            x = self._final_norm()(x)
        if c.representation_size is not None:
            x = self._representation(c.representation_size)(x)
        if c.normalize_features:
            x = vit.L2Normalization(name="normalized", dtype=self.output_dtype)(x)
        self._record("pre_logits", x)
        return self._record("logits", self._classes("head")(x)) if c.num_classes else self._feature(x)

    def _distilled_output(self, tokens: Tensor) -> Tensor:
        """Average the heads of the class token and of DeiT's distillation token (arXiv 2012.12877)."""
        x, distilled = self._pool_token("pool", tokens, 0), self._pool_token("pool_1", tokens, 1)
        mean = keras.layers.Average(name="mean_feature", dtype=self.policy)([x, distilled])
        self._record("pre_logits", mean)
        if not self.config.num_classes:
            return self._feature(mean)
        heads = [self._classes("head")(x), self._classes("head_distillation")(distilled)]
        return self._record("logits", keras.layers.Average(name="mean_logits", dtype=self.output_dtype)(heads))

    def _pool(self, x: Tensor) -> Tensor:
        """Pool the tokens to one feature, as `config.classifier` says."""
        c = self.config
        if c.is_unpooled:
            return x
        parts = []
        for kind, number in c.feature_parts:
            if kind == "map":
                parts.append(self._pool_by_attention(x))
            elif kind not in ("token", "mean"):
                raise TypeError(f"Network does not know the part {kind!r} of a feature")
            else:
                name = "pool_mean" if kind == "mean" and c.classifier != "gap" else "pool"
                parts.append(self._pool_block(name, x, 0 if kind == "token" else None, number))
        return parts[0] if len(parts) == 1 else keras.layers.Concatenate(name="pools", dtype=self.policy)(parts)

    def _pool_block(self, name: str, last: Tensor, token: int | None, number: int) -> Tensor:
        """Pool the normalized tokens of the block that is `number` before the last, whose tokens are `last`."""
        if not number:
            return self._pool_token(name, last, token)
        block = list(self.block_inputs)[-1 - number]
        x = self.intermediates[block]
        if token is None or self.config.num_class_tokens > 1:
            return self._pool_token(f"{name}_{block}", self._final_norm()(x), token)
        return self._final_norm()(self._pool_token(f"{name}_{block}", x, token))  # a single token: less to normalize

    def _pool_token(self, name: str, x: Tensor, token: int | None) -> Tensor:
        numbers = {"num_tokens": self.config.num_class_tokens, "prefix_tokens": self.config.num_prefix_tokens}
        return vit.TokenPooling(token=token, **numbers, name=name, dtype=self.policy)(x)

    def _pool_by_attention(self, x: Tensor) -> Tensor:
        c = self.config
        return vit.AttentionPooling(
            c.pool_heads or c.num_heads,
            c.mlp_dim if c.pool_mlp_dim is None else c.pool_mlp_dim,
            activation=c.activation,
            norm_epsilon=c.norm_epsilon,
            prefix_tokens=0 if c.pool_prefix else c.num_prefix_tokens,
            use_bias=c.qkv_bias or c.pool_mlp_dim != 0,
            name="pool",
            dtype=self.policy,
        )(x)

    def _representation(self, width: int) -> keras.layers.Dense:
        return dense_layer(
            width,
            activation=activation_function(self.config.representation_activation),
            kernel_initializer=initializer("convolution"),
            name="pre_logits",
            dtype=self.policy,
        )

    def _classes(self, name: str) -> keras.layers.Dense:
        # The kernel starts at zero for fine-tuning, as in the paper (section 3.2).
        return dense_layer(
            self.config.num_classes,
            kernel_initializer="zeros",
            bias_initializer=keras.initializers.Constant(self.config.head_bias_init),
            name=name,
            dtype=self.output_dtype,
        )

    def _feature(self, x: Tensor) -> Tensor:
        return keras.layers.Identity(name="feature", dtype=self.output_dtype)(x)
