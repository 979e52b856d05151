"""Write the heads of segmentation and depth: tokens to maps, convolutions."""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.folding import Affine, Array, float64
from keras_vit.export.litert.layers import activation, apply_affine
from keras_vit.export.litert.operators import static_dim
from keras_vit.export.litert.stem import norm_and_relu
from keras_vit.export.litert.writer import FileWriter, PendingTensor, honours, source, unsupported, writes
from keras_vit.model import layers as vit
from keras_vit.model.config import ACTIVATIONS
from keras_vit.model.layers.base import activation_function
from keras_vit.model.maps import DepthBins, FirstTokens, MaskLogits, PatchMap, ResizeBilinear

honours(PatchMap, "grid", "prefix_tokens", class_token=("drop", "add", "concat"))
honours(ResizeBilinear, "size", "align_corners")
honours(DepthBins, "least", "most")
honours(FirstTokens, "count")
honours(MaskLogits)


@writes(PatchMap)
def write_patch_map(file: FileWriter, layer: Any, tokens: Any) -> PendingTensor:
    """Write the tokens of patches as a map; the gain and shift of a norm are left to the layer that reads it."""
    ops, name = file.ops, layer.name
    value = file.tensor_of(tokens)
    x = patches = value.tensor
    batch, count, width = x.shape
    if layer.prefix_tokens:
        patches = ops.slice(x, 1, layer.prefix_tokens, static_dim(count), f"{name}/patches")
    if layer.class_token != "drop":
        first = ops.slice(x, 1, 0, 1, f"{name}/class_token")
        if layer.class_token == "add":
            patches = ops.add(patches, first, f"{name}/added")
            affine = value.affine and Affine(value.affine.gain, 2 * value.affine.shift, 2 * value.affine.constant)
            value = dataclasses.replace(value, affine=affine)
        else:
            zeros = ops.subtract(patches, patches, f"{name}/zeros")  # XNNPACK has no BROADCAST_TO
            patches = ops.concatenate([patches, ops.add(zeros, first, f"{name}/repeated")], 2, f"{name}/pairs")
            value = dataclasses.replace(value, affine=value.affine and Affine(*(np.tile(a, 2) for a in value.affine)))
    shape = (batch, *layer.grid, patches.shape[2])
    return dataclasses.replace(value, tensor=ops.reshape(patches, shape, name))


@writes(ResizeBilinear)
def write_resize(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Write a bilinear resize; its weights sum to one, so that a gain and shift can be applied behind it."""
    value = file.tensor_of(x)
    resized = file.ops.resize_bilinear(value.tensor, layer.size, layer.name, align_corners=layer.align_corners)
    return dataclasses.replace(value, tensor=resized)


@writes(DepthBins)
def write_depth_bins(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Write the expected depth: a dense layer gives the sum over bins, and the same without their depths."""
    ops, name = file.ops, layer.name
    scores = ops.unary("RELU", apply_affine(ops, file.tensor_of(x), f"{name}/input"), f"{name}/scores")
    count = static_dim(scores.shape[-1])
    # The mean score is 0.1 above that of the ReLU, and the mean of the bins is half way.
    middle, bins = (layer.least + layer.most) / 2, np.linspace(layer.least, layer.most, count)
    total = ops.constant(np.array(0.1), f"{name}/least")
    mean = ops.add(ops.mean(scores, [len(scores.shape) - 1], f"{name}/mean", keepdims=True), total, f"{name}/total")
    offsets = ops.multiply(scores, ops.constant(bins - middle, f"{name}/bins"), f"{name}/weighted")
    offset = ops.mean(offsets, [len(scores.shape) - 1], f"{name}/offset", keepdims=True)
    depth = ops.divide(offset, mean, f"{name}/ratio")
    return PendingTensor(ops.add(depth, ops.constant(np.array(middle), f"{name}/middle"), name))


@writes(FirstTokens)
def write_first_tokens(file: FileWriter, layer: Any, tokens: Any) -> PendingTensor:
    """Write the first tokens of a norm's result; its gain and shift are left to the layers that read them."""
    value = file.tensor_of(tokens)
    return dataclasses.replace(value, tensor=file.ops.slice(value.tensor, 1, 0, layer.count, layer.name))


@writes(MaskLogits)
def write_mask_logits(file: FileWriter, layer: Any, queries: Any, maps: Any) -> PendingTensor:
    """Write the products of queries and cells; the few queries take the gain and shift of the cells' norm."""
    ops, name = file.ops, layer.name
    query, value = apply_affine(ops, file.tensor_of(queries), f"{name}/input"), file.tensor_of(maps)
    batch, rows, columns, width = value.tensor.shape
    cells = ops.reshape(value.tensor, (batch, static_dim(rows) * static_dim(columns), width), f"{name}/cells")
    shape = (batch, rows, columns, query.shape[1])
    if value.affine is None:
        return PendingTensor(ops.reshape(ops.matmul(cells, query, f"{name}/rows", transpose_b=True), shape, name))
    gain, shift = value.affine.gain, value.affine.shift + value.affine.constant
    scaled = ops.multiply(query, ops.constant(gain, f"{name}/gain"), f"{name}/scaled")
    shifts = ops.multiply(query, ops.constant(shift, f"{name}/shift"), f"{name}/shifts")
    offset = ops.reshape(ops.sum(shifts, [2], f"{name}/sums", keepdims=True), (batch, 1, shape[3]), f"{name}/offset")
    products = ops.matmul(cells, scaled, f"{name}/products", transpose_b=True)
    return PendingTensor(ops.reshape(ops.add(products, offset, f"{name}/rows"), shape, name))


_CONVOLUTIONS = (keras.layers.Conv2D, keras.layers.Conv2DTranspose)
_ACTIVATIONS = {"relu": "RELU", "sigmoid": "LOGISTIC", "tanh": "TANH"}  # Keras' name -> operator


for kind in _CONVOLUTIONS:
    honours(
        kind,
        "filters",
        "kernel_size",
        "strides",
        "activation",
        "use_bias",
        padding=("same", "valid"),
        data_format=("channels_last",),
        dilation_rate=((1, 1),),
        groups=(1,),
    )
honours(
    keras.layers.DepthwiseConv2D,
    "kernel_size",
    strides=((1, 1),),
    activation=("linear",),
    use_bias=(False,),
    depth_multiplier=(1,),
    padding=("same", "valid"),
    data_format=("channels_last",),
    dilation_rate=((1, 1),),
)
honours(keras.layers.BatchNormalization, "momentum", "epsilon", "center", "scale", "synchronized")
honours(keras.layers.Activation, "activation")
honours(keras.layers.ReLU)
honours(keras.layers.ZeroPadding2D, "padding", data_format=("channels_last",))
honours(keras.layers.Add)
honours(keras.layers.Rescaling, "scale", "offset")


@writes(keras.layers.BatchNormalization)
def write_batch_norm(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Fold batch normalization into the convolution in front of it, or leave it to the layer that reads it."""
    front, inputs = source(x)
    if isinstance(front, _CONVOLUTIONS) and _is_linear(front):
        return PendingTensor(_convolution(file, front, *inputs, norm=layer))
    gain, shift = _gain_and_shift(layer)
    value = file.tensor_of(x)
    before = value.affine or Affine(np.ones(len(gain)), *np.zeros((2, len(gain))))
    after = Affine(before.gain * gain, before.shift * gain + shift, before.constant * gain)
    return dataclasses.replace(value, affine=after)


def _gain_and_shift(norm: Any) -> tuple[Array, Array]:
    gain = (float64(norm.moving_variance) + norm.epsilon) ** -0.5
    gain = gain * float64(norm.gamma) if norm.scale else gain
    shift = -float64(norm.moving_mean) * gain
    return gain, shift + float64(norm.beta) if norm.center else shift


@writes(keras.layers.Activation, keras.layers.ReLU)
def write_activation(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Write an activation; a ReLU is part of the GroupNormalization, or of the convolution with or without batch
    normalization, in front of it.
    """
    name = "relu" if isinstance(layer, keras.layers.ReLU) else keras.activations.serialize(layer.activation)
    front, inputs = source(x)
    if name == "relu" and isinstance(front, vit.GroupNormalization):
        return PendingTensor(norm_and_relu(file.ops, front, file.tensor_of(*inputs).tensor, layer.name))
    norm = front if isinstance(front, keras.layers.BatchNormalization) else None
    front, inputs = source(*inputs) if norm else (front, inputs)
    if name == "relu" and isinstance(front, keras.layers.Conv2D) and _is_linear(front):
        return PendingTensor(_convolution(file, front, *inputs, norm=norm, activation="relu"))
    return PendingTensor(
        _activation(file, layer, name, apply_affine(file.ops, file.tensor_of(x), f"{layer.name}/input"))
    )


@writes(*_CONVOLUTIONS)
def write_convolution(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Write a convolution and its activation."""
    tensor = _convolution(file, layer, x)
    name = keras.activations.serialize(layer.activation)
    return PendingTensor(tensor if name == "linear" else _activation(file, layer, name, tensor))


@writes(keras.layers.DepthwiseConv2D)
def write_depthwise_convolution(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Write a convolution of each channel."""
    tensor = apply_affine(file.ops, file.tensor_of(x), f"{layer.name}/input")
    kernel = float64(layer.kernel)[..., 0]
    return PendingTensor(file.ops.depthwise_convolution(tensor, kernel, layer.name, same=layer.padding == "same"))


def _is_linear(layer: Any) -> bool:
    return bool(layer.activation is keras.activations.linear)


def _activation(file: FileWriter, layer: Any, name: Any, x: Tensor) -> Tensor:
    if isinstance(name, str) and name in _ACTIVATIONS:
        return file.ops.unary(_ACTIVATIONS[name], x, f"{layer.name}/{name}")
    ours = next((known for known in ACTIVATIONS if activation_function(known) is layer.activation), None)
    if ours is None:
        raise unsupported(layer, f" with the activation {name!r}")
    return activation(file, layer, ours, x, f"{layer.name}/{ours}")


def _convolution(file: FileWriter, layer: Any, x: Any, *, norm: Any = None, activation: str | None = None) -> Tensor:
    """Write a convolution without its own activation, with the batch normalization and ReLU behind it."""
    is_transposed = isinstance(layer, keras.layers.Conv2DTranspose)
    kernel = np.moveaxis(float64(layer.kernel), 2 if is_transposed else 3, 0)  # (outputs, height, width, inputs)
    bias = float64(layer.bias) if layer.use_bias else np.zeros(len(kernel))
    if norm is not None:
        gain, shift = _gain_and_shift(norm)
        kernel, bias = kernel * gain[:, None, None, None], bias * gain + shift
    tensor = apply_affine(file.ops, file.tensor_of(x), f"{layer.name}/input")
    options: dict[str, Any] = {"strides": tuple(layer.strides), "same": layer.padding == "same"}
    if is_transposed:
        if tensor.shape[0] is None and layer.kernel_size != layer.strides:
            raise unsupported(layer, " whose cells overlap, for any number of images (batch=None)")
        return file.ops.transposed_convolution(tensor, kernel, bias, layer.name, **options)
    return file.ops.convolution(tensor, kernel, bias, layer.name, activation=activation, **options)


@writes(keras.layers.ZeroPadding2D)
def write_padding(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Write zeros around a map."""
    x = apply_affine(file.ops, file.tensor_of(x), f"{layer.name}/input")
    (top, bottom), (left, right) = layer.padding
    return PendingTensor(file.ops.pad(x, (0, top, left, 0), layer.name, after=(0, bottom, right, 0)))


@writes(keras.layers.Add)
def write_add(file: FileWriter, layer: Any, *inputs: Any) -> PendingTensor:
    """Write a sum."""
    first, *others = (apply_affine(file.ops, file.tensor_of(x), f"{layer.name}/{i}") for i, x in enumerate(inputs))
    for number, other in enumerate(others, start=1):
        first = file.ops.add(first, other, layer.name if number == len(others) else f"{layer.name}/sum_{number}")
    return PendingTensor(first)


@writes(keras.layers.Rescaling)
def write_rescaling(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Leave a factor and a constant to the layer that reads the result."""
    value = file.tensor_of(x)
    scale, offset = (
        np.full(static_dim(value.tensor.shape[-1]), float(number)) for number in (layer.scale, layer.offset)
    )
    if value.affine is not None:
        value = PendingTensor(apply_affine(file.ops, value, f"{layer.name}/input"))
    return dataclasses.replace(value, affine=Affine(scale, offset, np.zeros_like(offset)))
