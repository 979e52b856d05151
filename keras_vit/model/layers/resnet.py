"""ResNet: version 1 of hybrids (paper, section 3.1; vit_jax/models_resnet.py), version 2 of BiT (arXiv 1912.11370)."""

from typing import Any

import keras
from keras import ops

from keras_vit.model.layers.base import BaseLayer, initializer
from keras_vit.model.layers.runtime import Shape, Tensor


@keras.saving.register_keras_serializable("keras_vit")
class StandardizedConv2D(BaseLayer):
    """Convolve with a kernel of mean 0 and standard deviation 1 for every output channel (arXiv 1903.10520).

    Adds `epsilon` to the standard deviation ("std", Google) or the variance ("variance", timm). SAME padding, or, if
    `symmetric`, as many zeros on both sides. No bias.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int,
        *,
        strides: int = 1,
        epsilon: float = 1e-5,
        epsilon_place: str = "std",
        symmetric: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.filters = filters
        self.kernel_size = kernel_size
        self.strides = strides
        self.epsilon = epsilon
        self.epsilon_place = epsilon_place
        self.symmetric = symmetric

    def build(self, input_shape: Shape) -> None:
        shape = (self.kernel_size, self.kernel_size, input_shape[-1], self.filters)
        self.kernel = self.add_weight(
            shape=shape, initializer=initializer("convolution"), name="kernel", autocast=False
        )

    def standardized_kernel(self) -> Tensor:
        """Compute the kernel that the convolution applies, in the dtype of the variable."""
        kernel = ops.convert_to_tensor(self.kernel)
        kernel = kernel - ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
        variance = ops.mean(ops.square(kernel), axis=(0, 1, 2), keepdims=True)
        if self.epsilon_place == "std":
            return kernel / (ops.sqrt(variance) + self.epsilon)
        return kernel / ops.sqrt(variance + self.epsilon)

    def call(self, x: Tensor) -> Tensor:
        kernel = ops.cast(self.standardized_kernel(), x.dtype)
        if self.symmetric:
            x = _pad_sides(x, self.kernel_size // 2)
        padding = "valid" if self.symmetric else "same"
        return ops.conv(x, kernel, strides=self.strides, padding=padding, data_format="channels_last")

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        height, width = (-(-side // self.strides) for side in input_shape[1:3])
        return (input_shape[0], height, width, self.filters)


@keras.saving.register_keras_serializable("keras_vit")
class GroupNormalization(BaseLayer):
    """Normalize groups of channels (arXiv 1803.08494) of (batch, height, width, channels).

    Moments of channels are averaged over groups: no tensor has more than 4 axes.
    """

    def __init__(
        self, epsilon: float = 1e-6, *, groups: int = 32, gamma_initializer: str = "ones", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.epsilon = epsilon
        self.groups = groups
        self.gamma_initializer = gamma_initializer

    def build(self, input_shape: Shape) -> None:
        channels = (input_shape[-1],)
        # Not cast to the compute dtype: the statistics are at least float32, as in LayerNorm.
        self.gamma = self.add_weight(shape=channels, initializer=self.gamma_initializer, name="gamma", autocast=False)
        self.beta = self.add_weight(shape=channels, initializer="zeros", name="beta", autocast=False)

    def call(self, x: Tensor) -> Tensor:
        wide = ops.cast(x, keras.backend.result_type(x.dtype, "float32"))
        centered = wide - self._group_mean(ops.mean(wide, axis=(1, 2)))
        variance = self._group_mean(ops.mean(ops.square(centered), axis=(1, 2)))
        scale = ops.rsqrt(variance + self.epsilon) * ops.cast(self.gamma, wide.dtype)
        return ops.cast(centered * scale + ops.cast(self.beta, wide.dtype), x.dtype)

    def _group_mean(self, channels: Tensor) -> Tensor:
        """Turn (batch, channels) into (batch, 1, 1, channels) in which every channel has the mean of its group."""
        width = channels.shape[-1]
        mean = ops.mean(ops.reshape(channels, (-1, self.groups, width // self.groups)), axis=-1)
        return ops.reshape(ops.repeat(mean, width // self.groups, axis=-1), (-1, 1, 1, width))


class _ResNetLayer(BaseLayer):
    """Base of a ResNet's layers: fields of `ResNetConfig`, and convolutions and norms with them."""

    def __init__(
        self,
        width: int,
        *,
        norm_epsilon: float,
        conv_epsilon: float,
        conv_epsilon_place: str,
        version: int = 1,
        groups: int = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.width = width
        self.version = version
        self.groups = groups
        self.norm_epsilon = norm_epsilon
        self.conv_epsilon = conv_epsilon
        self.conv_epsilon_place = conv_epsilon_place

    def _new_conv(self, name: str, filters: int, kernel_size: int, strides: int) -> StandardizedConv2D:
        return StandardizedConv2D(
            filters,
            kernel_size,
            strides=strides,
            epsilon=self.conv_epsilon,
            epsilon_place=self.conv_epsilon_place,
            symmetric=self.version == 2,
            name=name,
            dtype=self.dtype_policy,
        )

    def _new_norm(self, name: str, gamma_initializer: str = "ones") -> GroupNormalization:
        options = {"groups": self.groups, "gamma_initializer": gamma_initializer, "dtype": self.dtype_policy}
        return GroupNormalization(self.norm_epsilon, name=name, **options)


@keras.saving.register_keras_serializable("keras_vit")
class ResNetRoot(_ResNetLayer):
    """Apply the stem: 7x7 convolution with stride 2, GroupNorm, ReLU, 3x3 max pooling with stride 2.

    Version 2 has no norm and no ReLU here, and the pooling's padding is zeros instead of the lowest value.
    """

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(width, **kwargs)
        self.conv = self._new_conv("conv", width, 7, 2)
        self.gn: Any = self._new_norm("gn") if self.version == 1 else None

    def build(self, input_shape: Shape) -> None:
        self.conv.build(input_shape)
        if self.gn is not None:
            self.gn.build(self.conv.compute_output_shape(input_shape))

    def call(self, x: Tensor) -> Tensor:
        if self.gn is None:
            return ops.max_pool(_pad_sides(self.conv(x), 1), 3, 2, padding="valid", data_format="channels_last")
        x = ops.relu(self.gn(self.conv(x)))
        return ops.max_pool(x, 3, strides=2, padding="same", data_format="channels_last")

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        batch, height, width, channels = self.conv.compute_output_shape(input_shape)
        return (batch, -(-height // 2), -(-width // 2), channels)


@keras.saving.register_keras_serializable("keras_vit")
class ResNetUnit(_ResNetLayer):
    """Apply a bottleneck: 1x1, 3x3 (strided) and 1x1, plus the shortcut, then ReLU; `channels` None is 4 * width.

    Version 2 has norm and ReLU in front of each convolution; a shortcut's projection comes after the first of them.
    """

    def __init__(self, width: int, *, channels: int | None = None, strides: int = 1, **kwargs: Any) -> None:
        super().__init__(width, **kwargs)
        self.channels = 4 * width if channels is None else channels
        self.strides = strides
        self.conv1, self.gn1 = self._new_conv("conv1", width, 1, 1), self._new_norm("gn1")
        self.conv2, self.gn2 = self._new_conv("conv2", width, 3, strides), self._new_norm("gn2")
        # Version 1: gn3 starts at zero, so that a new unit adds nothing to its shortcut.
        initial = "zeros" if self.version == 1 else "ones"
        self.conv3, self.gn3 = self._new_conv("conv3", self.channels, 1, 1), self._new_norm("gn3", initial)
        self.conv_proj: Any = None
        self.gn_proj: Any = None

    def build(self, input_shape: Shape) -> None:
        if input_shape[-1] != self.channels or self.strides != 1:
            self.conv_proj = self._new_conv("conv_proj", self.channels, 1, self.strides)
            self.conv_proj.build(input_shape)
            if self.version == 1:
                self.gn_proj = self._new_norm("gn_proj")
                self.gn_proj.build(self.conv_proj.compute_output_shape(input_shape))
        shape = input_shape
        for conv, norm in ((self.conv1, self.gn1), (self.conv2, self.gn2), (self.conv3, self.gn3)):
            conv.build(shape)
            output_shape = conv.compute_output_shape(shape)
            norm.build(output_shape if self.version == 1 else shape)
            shape = output_shape

    def call(self, x: Tensor) -> Tensor:
        if self.version == 2:
            first = ops.relu(self.gn1(x))
            shortcut = x if self.conv_proj is None else self.conv_proj(first)
            x = self.conv2(ops.relu(self.gn2(self.conv1(first))))
            return shortcut + self.conv3(ops.relu(self.gn3(x)))
        shortcut = x if self.conv_proj is None else self.gn_proj(self.conv_proj(x))
        x = ops.relu(self.gn1(self.conv1(x)))
        x = ops.relu(self.gn2(self.conv2(x)))
        return ops.relu(shortcut + self.gn3(self.conv3(x)))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return self.conv3.compute_output_shape(self.conv2.compute_output_shape(input_shape))


def _pad_sides(x: Tensor, width: int) -> Tensor:
    return ops.pad(x, ((0, 0), (width, width), (width, width), (0, 0)))
