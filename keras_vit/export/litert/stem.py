"""Writers of the layers of a hybrid's or BiT's ResNet: kernels are constants, GroupNorm has at most four axes."""

import dataclasses
from typing import Any

import numpy as np

from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.folding import Array, float64
from keras_vit.export.litert.operators import FLOAT32, Operators, static_dim
from keras_vit.export.litert.writer import FileWriter, PendingTensor, honours, source, writes
from keras_vit.model import layers as vit

EPSILON_PLACES = ("std", "variance")
RESNET_FIELDS = ("width", "groups", "norm_epsilon", "conv_epsilon")
honours(vit.ResNetRoot, *RESNET_FIELDS, conv_epsilon_place=EPSILON_PLACES, version=(1, 2))
honours(vit.ResNetUnit, *RESNET_FIELDS, "channels", "strides", conv_epsilon_place=EPSILON_PLACES, version=(1, 2))
honours(
    vit.StandardizedConv2D, "filters", "kernel_size", "strides", "epsilon", "symmetric", epsilon_place=EPSILON_PLACES
)
honours(vit.GroupNormalization, "epsilon", "groups")


@writes(vit.ResNetRoot)
def write_root(file: FileWriter, layer: Any, image: Any) -> PendingTensor:
    """Write a 7x7 convolution with stride 2, GroupNorm and ReLU (version 1), and 3x3 max pooling with stride 2.

    The kernel is always float32: it is small, its errors grow through all later layers, and quantizing the image takes
    longer than 8-bit products of three channels save.
    """
    ops = file.ops
    value = file.tensor_of(image)
    kernel = standardized_kernel(layer.conv)
    if value.affine is not None:
        kernel = kernel * value.affine.gain[:, None]
    x = _convolution(_float32(ops), layer, "", value.tensor, kernel)
    if layer.version == 2:
        x = _pad_sides(ops, x, 1, "root/padded")
        # LiteRT's GPU merges PAD into MAX_POOL_2D, which pads with the lowest value instead of zeros.
        x = ops.add(x, ops.constant(np.zeros((1, 1, 1, static_dim(x.shape[3]))), "root/zeros"), "root/apart")
        return PendingTensor(ops.max_pool(x, "root/pool", size=3, strides=2, same=False))
    x = norm_and_relu(ops, layer.gn, x, "root/gn")
    return PendingTensor(ops.max_pool(x, "root/pool", size=3, strides=2, same=True))


@writes(vit.ResNetUnit)
def write_unit(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Write a bottleneck: convolutions of 1x1, 3x3 and 1x1, plus the shortcut.

    The kernels that read the root's output are float32 for the same reasons as the root's.
    """
    outer_ops = _float32(file.ops) if isinstance(source(x)[0], vit.ResNetRoot) else file.ops
    write = _unit if layer.version == 1 else _unit_v2
    return PendingTensor(write(file.ops, outer_ops, layer, file.tensor_of(x).tensor))


def _float32(ops: Operators) -> Operators:
    return dataclasses.replace(ops, storage=FLOAT32)


def _unit(ops: Operators, outer_ops: Operators, layer: Any, x: Tensor) -> Tensor:
    """Add a unit of version 1, which ends in ReLU; `outer_ops` are for kernels that read x."""
    shortcut = branch = x
    for number, norm in (("1", layer.gn1), ("2", layer.gn2)):
        branch = _convolution(outer_ops if number == "1" else ops, layer, number, branch)
        branch = norm_and_relu(ops, norm, branch, f"{layer.name}/gn{number}")
    branch, shift = group_norm(ops, layer.gn3, _convolution(ops, layer, "3", branch), f"{layer.name}/gn3")
    if layer.conv_proj is not None:
        shortcut = _convolution(outer_ops, layer, "_proj", x)
        shortcut, shortcut_shift = group_norm(ops, layer.gn_proj, shortcut, f"{layer.name}/gn_proj")
        shift = ops.add(shift, shortcut_shift, f"{layer.name}/shift")  # both shifts in one pass over the map
    return ops.add(ops.add(shortcut, branch, f"{layer.name}/sum"), shift, layer.name, activation="relu")


def _unit_v2(ops: Operators, outer_ops: Operators, layer: Any, x: Tensor) -> Tensor:
    """Add a unit of version 2, with norm and ReLU in front of each convolution."""
    first = branch = norm_and_relu(ops, layer.gn1, x, f"{layer.name}/gn1")
    shortcut = x if layer.conv_proj is None else _convolution(outer_ops, layer, "_proj", first)
    for number, norm in (("1", layer.gn2), ("2", layer.gn3)):
        branch = _convolution(outer_ops if number == "1" else ops, layer, number, branch)
        branch = norm_and_relu(ops, norm, branch, f"{layer.name}/{norm.name}")
    return ops.add(shortcut, _convolution(ops, layer, "3", branch), layer.name)


def norm_and_relu(ops: Operators, norm: Any, x: Tensor, name: str) -> Tensor:
    """Add a GroupNormalization and a ReLU."""
    x, shift = group_norm(ops, norm, x, name)
    return ops.add(x, shift, name, activation="relu")


def _pad_sides(ops: Operators, x: Tensor, width: int, name: str) -> Tensor:
    return ops.pad(x, (0, width, width, 0), name, after=(0, width, width, 0))


def _convolution(ops: Operators, unit: Any, number: str, x: Tensor, kernel: Array | None = None) -> Tensor:
    """Add a convolution of a unit.

    1x1 convolutions are dense layers: the runtime quantizes each pixel by itself, and LiteRT's GPU computes an int8
    CONV_2D of 1x1 with a stride wrong.
    """
    conv = getattr(unit, f"conv{number}")
    kernel = np.moveaxis(standardized_kernel(conv) if kernel is None else kernel, -1, 0)
    strides = (conv.strides, conv.strides)
    name = f"{unit.name}/conv{number}"
    bias = np.zeros(conv.filters, np.float32)
    if kernel.shape[1:3] == (1, 1):
        return ops.dense(_skip_pixels(ops, x, conv.strides, name), kernel[:, 0, 0], bias, name)
    is_same = not conv.symmetric or conv.strides == 1  # with a stride, SAME pads fewer zeros in front than behind
    if not is_same:
        x = _pad_sides(ops, x, conv.kernel_size // 2, f"{name}/padded")
    return ops.convolution(x, kernel, bias, name, strides=strides, same=is_same)


def _skip_pixels(ops: Operators, x: Tensor, step: int, name: str) -> Tensor:
    """Take every `step`-th row and column of x, (batch, height, width, channels), as a strided convolution does.

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
    """Compute the kernel that a StandardizedConv2D applies: float64 (height, width, inputs, outputs)."""
    kernel = float64(layer.kernel)
    kernel = kernel - kernel.mean(axis=(0, 1, 2))
    variance = np.square(kernel).mean(axis=(0, 1, 2))
    if layer.epsilon_place == "std":
        return kernel / (np.sqrt(variance) + layer.epsilon)
    return kernel / np.sqrt(variance + layer.epsilon)


def group_norm(ops: Operators, layer: Any, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Add GroupNorm without its last addition; return x * scale and the shift to add, (batch, 1, 1, channels).

    The variance is the mean of squared differences: mean(x^2) - mean(x)^2 is not faster, and cancels where channels lie
    far from zero. Everything else is computed on small tensors.
    """
    gamma, beta = (float64(weight).reshape(1, 1, layer.groups, -1) for weight in (layer.gamma, layer.beta))
    groups = (x.shape[0], *gamma.shape[1:])

    def constant(array: np.ndarray, part: str) -> Tensor:
        return ops.constant(array, f"{name}/{part}")

    def group_mean(values: Tensor, part: str) -> Tensor:
        """Compute means (batch, 1, groups, 1) row by row: one long sum over the map rounds more."""
        rows = ops.mean(values, [2], f"{name}/{part}/rows", keepdims=True)
        channels = ops.mean(rows, [1], f"{name}/{part}/channels", keepdims=True)
        return ops.mean(ops.reshape(channels, groups, f"{name}/{part}/groups"), [3], f"{name}/{part}", keepdims=True)

    def by_channel(values: Tensor, part: str) -> Tensor:
        return ops.reshape(values, (x.shape[0], 1, 1, x.shape[3]), f"{name}/{part}")

    mean = group_mean(x, "mean")
    centers = ops.multiply(mean, constant(np.ones_like(gamma[:, :, :1]), "ones"), f"{name}/centers")
    squares = ops.squared_difference(x, by_channel(centers, "center"), f"{name}/squares")
    variance = ops.add(group_mean(squares, "variance"), constant(np.array(layer.epsilon), "epsilon"), f"{name}/safe")
    root = ops.reciprocal_root(variance, name)
    scales = ops.multiply(root, constant(gamma, "gamma"), f"{name}/scales")
    shifts = ops.subtract(constant(beta, "beta"), ops.multiply(mean, scales, f"{name}/moved"), f"{name}/shifts")
    return ops.multiply(x, by_channel(scales, "scale"), f"{name}/scaled"), by_channel(shifts, "shift")
