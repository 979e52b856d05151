"""Writers of the layers that make maps of tokens, resize them, and turn bins into depth."""

import dataclasses
from typing import Any

import numpy as np

from keras_vit.export.litert.folding import Affine
from keras_vit.export.litert.layers import apply_affine
from keras_vit.export.litert.operators import static_dim
from keras_vit.export.litert.writer import FileWriter, Value, honours, writes
from keras_vit.model.maps import DepthBins, PatchMap, ResizeBilinear

honours(PatchMap, "grid", "prefix_tokens", class_token=("drop", "add", "concat"))
honours(ResizeBilinear, "size", "align_corners")
honours(DepthBins, "least", "most")


@writes(PatchMap)
def write_patch_map(file: FileWriter, layer: Any, tokens: Any) -> Value:
    """Write the tokens of patches as a map; the gain and shift of a norm are left to the layer that reads it."""
    ops, name = file.ops, layer.name
    value = file.read(tokens)
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
def write_resize(file: FileWriter, layer: Any, x: Any) -> Value:
    """Write a bilinear resize; its weights sum to one, so that a gain and shift can be applied behind it."""
    value = file.read(x)
    resized = file.ops.resize_bilinear(value.tensor, layer.size, layer.name, align_corners=layer.align_corners)
    return dataclasses.replace(value, tensor=resized)


@writes(DepthBins)
def write_depth_bins(file: FileWriter, layer: Any, x: Any) -> Value:
    """Write the expected depth: a dense layer gives the sum over bins, and the same without their depths."""
    ops, name = file.ops, layer.name
    scores = ops.unary("RELU", apply_affine(ops, file.read(x), f"{name}/input"), f"{name}/scores")
    count = static_dim(scores.shape[-1])
    # The mean score is 0.1 above that of the ReLU, and the mean of the bins is half way.
    middle, bins = (layer.least + layer.most) / 2, np.linspace(layer.least, layer.most, count)
    total = ops.constant(np.array(0.1), f"{name}/least")
    mean = ops.add(ops.mean(scores, [len(scores.shape) - 1], f"{name}/mean", keepdims=True), total, f"{name}/total")
    offsets = ops.multiply(scores, ops.constant(bins - middle, f"{name}/bins"), f"{name}/weighted")
    offset = ops.mean(offsets, [len(scores.shape) - 1], f"{name}/offset", keepdims=True)
    depth = ops.divide(offset, mean, f"{name}/ratio")
    return Value(ops.add(depth, ops.constant(np.array(middle), f"{name}/middle"), name))
