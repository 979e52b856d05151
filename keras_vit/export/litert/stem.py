"""ResNet of a hybrid as LiteRT operators: standardized kernels are constants, GroupNorm has at most four dimensions."""

import dataclasses
from typing import Any

import numpy as np

from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.folding import Array, float64
from keras_vit.export.litert.images import ImageInput
from keras_vit.export.litert.operators import Operators, static_dim
from keras_vit.export.litert.storage import FLOAT32
from keras_vit.model.layers.resnet import GROUPS


def stem(ops: Operators, model: Any, image: ImageInput) -> Tensor:
    """Add the ResNet of a hybrid and return its feature map, float32 (batch, height, width, channels)."""
    x = _root(ops, model.get_layer("root"), image)
    for stage, units in enumerate(model.config.resnet.num_layers, start=1):
        for unit in range(1, units + 1):
            x = _unit(ops, model.get_layer(f"stage_{stage}_unit_{unit}"), x, is_first=stage == unit == 1)
    return x


def _root(ops: Operators, layer: Any, image: ImageInput) -> Tensor:
    """Add a 7x7 convolution with stride 2, GroupNorm, ReLU and 3x3 max pooling with stride 2.

    The kernel is always float32: it is small, its errors grow through all later layers (4 dB in a trained hybrid), and
    quantizing the image takes longer than 8-bit products of three channels save.
    """
    float32_ops = dataclasses.replace(ops, storage=FLOAT32)
    kernel = standardized_kernel(layer.conv)
    if image.scale is not None:
        kernel = kernel * image.scale[:, None]
    x, shift = _convolution_and_norm(float32_ops, layer, "", image.tensor, kernel)
    x = ops.add(x, shift, "root/gn", activation="relu")
    return ops.max_pool(x, "root/pool", size=3, strides=2)


def _unit(ops: Operators, layer: Any, x: Tensor, *, is_first: bool) -> Tensor:
    """Add a bottleneck: convolutions of 1x1, 3x3 and 1x1, plus the shortcut, then ReLU.

    The kernels that read the root's output are float32 for the same reasons as the root's: they are small (80 KiB).
    """
    shortcut, branch = x, x
    outer_ops = dataclasses.replace(ops, storage=FLOAT32) if is_first else ops
    for number in ("1", "2"):
        branch, shift = _convolution_and_norm(outer_ops if number == "1" else ops, layer, number, branch)
        branch = ops.add(branch, shift, f"{layer.name}/gn{number}", activation="relu")
    branch, shift = _convolution_and_norm(ops, layer, "3", branch)
    if layer.conv_proj is not None:
        shortcut, shortcut_shift = _convolution_and_norm(outer_ops, layer, "_proj", x)
        shift = ops.add(shift, shortcut_shift, f"{layer.name}/shift")  # both shifts in one pass over the map
    return ops.add(ops.add(shortcut, branch, f"{layer.name}/sum"), shift, layer.name, activation="relu")


def _convolution_and_norm(
    ops: Operators, unit: Any, number: str, x: Tensor, kernel: Array | None = None
) -> tuple[Tensor, Tensor]:
    """Add a convolution of a unit and its norm; return what `group_norm` returns.

    1x1 convolutions are dense layers: the runtime quantizes each pixel by itself, and LiteRT's GPU computes an int8
    CONV_2D of 1x1 with a stride wrong.
    """
    conv, norm = getattr(unit, f"conv{number}"), getattr(unit, f"gn{number}")
    kernel = np.moveaxis(standardized_kernel(conv) if kernel is None else kernel, -1, 0)
    strides = (conv.strides, conv.strides)
    name, bias = f"{unit.name}/conv{number}", np.zeros(conv.filters, np.float32)
    if kernel.shape[1:3] == (1, 1):
        x = ops.dense(_skip_pixels(ops, x, conv.strides, name), kernel[:, 0, 0], bias, name)
    else:
        x = ops.convolution(x, kernel, bias, name, strides=strides, same=True)
    return group_norm(ops, norm, x, f"{unit.name}/gn{number}")


def _skip_pixels(ops: Operators, x: Tensor, step: int, name: str) -> Tensor:
    """Return every `step`-th row and column of x, (batch, height, width, channels): pixels of a strided convolution.

    Slices of reshaped tensors take whole rows, then whole pixels: XNNPACK slices with a stride of 1 only.
    """
    if step == 1:
        return x
    x = ops.pad(x, (0, 0, 0, 0), f"{name}/even", after=(0, *(-static_dim(side) % step for side in x.shape[1:3]), 0))
    batch, height, width, channels = x.shape
    rows, columns, depth = static_dim(height) // step, static_dim(width) // step, static_dim(channels)
    x = ops.reshape(x, (batch, rows, step * step * columns * depth), f"{name}/row_pairs")
    x = ops.slice(x, 2, 0, step * columns * depth, f"{name}/rows")
    x = ops.reshape(x, (batch, rows * columns, step * depth), f"{name}/pixel_pairs")
    x = ops.slice(x, 2, 0, depth, f"{name}/pixels")
    return ops.reshape(x, (batch, rows, columns, depth), f"{name}/input")


def standardized_kernel(layer: Any) -> Array:
    """Return the kernel that a StandardizedConv2D applies: float64 (height, width, inputs, outputs)."""
    kernel = float64(layer.kernel)
    kernel = kernel - kernel.mean(axis=(0, 1, 2))
    variance = np.square(kernel).mean(axis=(0, 1, 2))
    if layer.epsilon_place == "std":
        return kernel / (np.sqrt(variance) + layer.epsilon)
    return kernel / np.sqrt(variance + layer.epsilon)


def group_norm(ops: Operators, layer: Any, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Add GroupNorm without its last addition; return x * scale and the shift to add, (batch, 1, 1, channels).

    The variance is the mean of squared differences. mean(x^2) - mean(x)^2 is not faster, and its error was ten times as
    large where channels lay three deviations from zero. Everything else is computed on small tensors.
    """
    gamma, beta = (float64(weight).reshape(1, 1, GROUPS, -1) for weight in (layer.gamma, layer.beta))
    groups = (x.shape[0], *gamma.shape[1:])

    def constant(array: np.ndarray, part: str) -> Tensor:
        return ops.constant(array, f"{name}/{part}")

    def group_mean(values: Tensor, part: str) -> Tensor:
        """Return (batch, 1, groups, 1). Row by row: one long sum over the map has twice the rounding error."""
        rows = ops.mean(values, [2], f"{name}/{part}/rows", keepdims=True)
        channels = ops.mean(rows, [1], f"{name}/{part}/channels", keepdims=True)
        return ops.mean(ops.reshape(channels, groups, f"{name}/{part}/groups"), [3], f"{name}/{part}", keepdims=True)

    def by_channel(values: Tensor, part: str) -> Tensor:
        return ops.reshape(values, (x.shape[0], 1, 1, x.shape[3]), f"{name}/{part}")

    mean = group_mean(x, "mean")
    centers = ops.multiply(mean, constant(np.ones_like(gamma[:, :, :1]), "ones"), f"{name}/centers")
    squares = ops.squared_difference(x, by_channel(centers, "center"), f"{name}/squares")
    variance = ops.add(group_mean(squares, "variance"), constant(np.array(layer.epsilon), "epsilon"), f"{name}/safe")
    scales = ops.multiply(ops.unary("RSQRT", variance, f"{name}/rsqrt"), constant(gamma, "gamma"), f"{name}/scales")
    shifts = ops.subtract(constant(beta, "beta"), ops.multiply(mean, scales, f"{name}/moved"), f"{name}/shifts")
    return ops.multiply(x, by_channel(scales, "scale"), f"{name}/scaled"), by_channel(shifts, "shift")
