"""The ResNet of a hybrid: kernels standardised beforehand, GroupNorm in four dimensions (`keras_vit.layers.resnet`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.images import Input
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.storage import FLOAT32
from keras_vit.model.layers.resnet import GROUPS


def stem(ops: Operators, model: Any, image: Input) -> Tensor:
    """The map that a hybrid's patch embedding takes.

    Args:
        ops: of the file.
        model: a VisionTransformer with `config.resnet`.
        image: what `images.input` gave; its scale is seen to here.

    Returns:
        float32 (batch, height, width, channels).
    """
    x = _root(ops, model.get_layer("root"), image)
    for stage, units in enumerate(model.config.resnet.num_layers, start=1):
        for unit in range(1, units + 1):
            x = _unit(ops, model.get_layer(f"stage_{stage}_unit_{unit}"), x)
    return x


def _root(ops: Operators, layer: Any, image: Input) -> Tensor:
    """7x7 convolution with stride 2, GroupNorm, ReLU, 3x3 maximum with stride 2.

    Its kernel stays float32: it is small, all later errors grow out of its own (4 dB less noise in a trained hybrid),
    and quantizing the image takes longer than 8-bit products of its three channels save.
    """
    exact = dataclasses.replace(ops, storage=FLOAT32)
    x, kernel = image.tensor, standardized(layer.conv)
    if image.scale is not None:
        kernel = kernel * image.scale[:, None]
    x = ops.add(*_convolved(exact, layer, "", x, kernel), "root/gn", activation="relu")
    return ops.max_pool(x, "root/pool", size=3, strides=2)


def _unit(ops: Operators, layer: Any, x: Tensor) -> Tensor:
    """A bottleneck: 1x1, 3x3, 1x1 and the shortcut, ReLU after the sum."""
    shortcut, inner = x, x
    for number in ("1", "2"):
        inner = ops.add(*_convolved(ops, layer, number, inner), f"{layer.name}/gn{number}", activation="relu")
    inner, shift = _convolved(ops, layer, "3", inner)
    if layer.conv_proj is not None:
        shortcut, other = _convolved(ops, layer, "_proj", x)
        shift = ops.add(shift, other, f"{layer.name}/shift")  # one pass over the map instead of two
    return ops.add(ops.add(shortcut, inner, f"{layer.name}/sum"), shift, layer.name, activation="relu")


def _convolved(
    ops: Operators, unit: Any, number: str, x: Tensor, kernel: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """A convolution of a unit and its norm: what `normalized` gives."""
    conv, norm = getattr(unit, f"conv{number}"), getattr(unit, f"gn{number}")
    kernel = np.moveaxis(standardized(conv) if kernel is None else kernel, -1, 0)
    step = (conv.strides, conv.strides)
    name, bias = f"{unit.name}/conv{number}", np.zeros(conv.filters, np.float32)
    x = ops.convolution(x, kernel, bias, name, strides=step, same=True)
    return normalized(ops, norm, x, f"{unit.name}/gn{number}")


def standardized(layer: Any) -> np.ndarray:
    """The kernel that a StandardizedConv2D uses: float64 (height, width, inputs, outputs)."""
    kernel = _array(layer.kernel)
    kernel = kernel - kernel.mean(axis=(0, 1, 2))
    variance = np.square(kernel).mean(axis=(0, 1, 2))
    if layer.epsilon_place == "std":
        return kernel / (np.sqrt(variance) + layer.epsilon)
    return kernel / np.sqrt(variance + layer.epsilon)


def normalized(ops: Operators, layer: Any, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """GroupNorm as x * scale, over the map, and a shift (batch, 1, 1, channels) that is still to be added.

    The variance is that of the differences from the mean: mean(x^2) - mean(x)^2 passes over the map as often, and
    where channels lay three deviations off zero it was ten times as wrong. Everything else is on small tensors.
    """
    gamma, beta = (_array(weight).reshape(1, 1, GROUPS, -1) for weight in (layer.gamma, layer.beta))
    groups = (x.shape[0], *gamma.shape[1:])

    def constant(array: np.ndarray, what: str) -> Tensor:
        return ops.constant(array, f"{name}/{what}")

    def group_mean(values: Tensor, what: str) -> Tensor:
        """(batch, 1, groups, 1). Row by row: one long sum over the map has twice the rounding error."""
        rows = ops.mean(values, [2], f"{name}/{what}/rows", keep=True)
        channels = ops.mean(rows, [1], f"{name}/{what}/channels", keep=True)
        return ops.mean(ops.reshape(channels, groups, f"{name}/{what}/groups"), [3], f"{name}/{what}", keep=True)

    def by_channel(values: Tensor, what: str) -> Tensor:
        return ops.reshape(values, (x.shape[0], 1, 1, x.shape[3]), f"{name}/{what}")

    mean = group_mean(x, "mean")
    centers = ops.multiply(mean, constant(np.ones_like(gamma[:, :, :1]), "ones"), f"{name}/centers")
    squares = ops.squared_difference(x, by_channel(centers, "center"), f"{name}/squares")
    variance = ops.add(group_mean(squares, "variance"), constant(np.array(layer.epsilon), "epsilon"), f"{name}/safe")
    scales = ops.multiply(ops.unary("RSQRT", variance, f"{name}/rsqrt"), constant(gamma, "gamma"), f"{name}/scales")
    shifts = ops.subtract(constant(beta, "beta"), ops.multiply(mean, scales, f"{name}/moved"), f"{name}/shifts")
    return ops.multiply(x, by_channel(scales, "scale"), f"{name}/scaled"), by_channel(shifts, "shift")


def _array(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable), np.float64)
