"""Fold constant computations into weights, in float64, before a file is written.

The gain and shift of a norm move into the dense layer that reads it. Layers that write to the residual stream write
channels with mean zero, so that the LayerNorms that read it need not subtract the mean.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import numpy.typing as npt

from keras_vit.model.layers.position_variants import (
    bias_numbers,
    cosines_and_sines,
    log_offsets,
    rotary_angles,
    rotary_coordinates,
)

Array = npt.NDArray[np.float64]


class Affine(NamedTuple):
    """Affine part of a norm, x * gain + shift + constant, float64 (width,). The layer that reads it applies it."""

    gain: Array
    shift: Array
    constant: Array  # compensates the constant that is subtracted from x because of outliers


class Stream(NamedTuple):
    """The form that tokens of the residual stream have in a file."""

    scales: Array  # factors of the channels, (width,) or (1,)
    is_centered: bool  # whether the mean of the channels is subtracted before, as LayerNorm would; an RMSNorm keeps it


class DenseWeights(NamedTuple):
    """Weights of x @ kernel.T + bias: kernel float64 (outputs, inputs), bias float64 (outputs,)."""

    kernel: Array
    bias: Array

    def fold_affine(self, affine: Affine | None) -> Self:
        """Fold a norm's gain and shift into the weights: they then take the norm's result before both."""
        if affine is None:
            return self
        return self._replace(
            kernel=self.kernel * affine.gain, bias=self.bias + self.kernel @ (affine.shift + affine.constant)
        )

    def scale_outputs(self, factors: Array | float) -> Self:
        """Multiply the outputs by one factor, or by one for each, (outputs,)."""
        factors = np.broadcast_to(np.asarray(factors, np.float64), self.bias.shape)
        return self._replace(kernel=self.kernel * factors[:, None], bias=self.bias * factors)

    def to_stream(self, stream: Stream | None) -> Self:
        """Make the outputs tokens of the residual stream."""
        return self._replace(kernel=to_stream(self.kernel.T, stream).T, bias=to_stream(self.bias, stream))


def float64(weight: Any) -> Array:
    """Convert a variable or an array to float64."""
    return np.asarray(keras.ops.convert_to_numpy(weight), np.float64)


def center(values: Array, axis: int = -1) -> Array:
    """Subtract the mean along the axis of the channels."""
    return values - values.mean(axis=axis, keepdims=True)


def to_stream(tokens: Array, stream: Stream | None) -> Array:
    """Bring tokens, (..., width), into the form of the residual stream; None leaves them as they are."""
    if stream is None:
        return tokens
    return (center(tokens) if stream.is_centered else tokens) * stream.scales


def norm_affine(layer: Any, scales: Array | None = None) -> Affine:
    """Gain and shift of a norm whose input is already multiplied by `scales`, (width,); an RMSNorm's shift is 0."""
    gain = float64(layer.gamma)
    shift = np.zeros(len(gain)) if layer.beta is None else float64(layer.beta)
    return Affine(gain if scales is None else gain / scales, shift, np.zeros(len(gain)))


def dense_weights(layer: Any) -> DenseWeights:
    """Read the weights of a Dense, or of one of attention's EinsumDense with its heads side by side."""
    kernel = float64(layer.kernel)
    outputs = kernel.shape[-1] if layer.name == "out" or kernel.ndim == 2 else kernel.shape[1] * kernel.shape[2]
    kernel = kernel.reshape(-1, outputs).T
    return DenseWeights(kernel, np.zeros(outputs) if layer.bias is None else float64(layer.bias).reshape(-1))


def residual_weights(weights: DenseWeights, layer_scale: Any, stream: Stream | None) -> DenseWeights:
    """Fold a LayerScale (or None) into the weights of a layer that writes to the residual stream."""
    if layer_scale is not None:
        weights = weights.scale_outputs(float64(layer_scale.gamma))
    return weights.to_stream(stream)


def query_weights(attention: Any) -> DenseWeights:
    """Weights of a MultiHeadAttention's queries, with the factor 1 / sqrt(head size) folded in."""
    if attention.query is None:  # queries are not projected
        width = attention.num_heads * attention.key.kernel.shape[-1]
        weights = DenseWeights(np.eye(width), np.zeros(width))
    else:
        weights = dense_weights(attention.query)
    return _deinterleave_heads(weights.scale_outputs(attention.scale), attention)


def key_weights(attention: Any) -> DenseWeights:
    """Weights of a MultiHeadAttention's keys."""
    return _deinterleave_heads(dense_weights(attention.key), attention)


def _deinterleave_heads(weights: DenseWeights, attention: Any) -> DenseWeights:
    """Order the channels of each head as a Rotary that is not interleaved has them.

    Scores do not depend on the order of channels, if it is the same in queries and keys.
    """
    if attention.rotary is None or not attention.rotary.interleaved:
        return weights
    channels = np.arange(len(weights.bias)).reshape(attention.num_heads, -1, 2)
    order = channels.swapaxes(1, 2).reshape(-1)
    return DenseWeights(weights.kernel[order], weights.bias[order])


def rotary_tables(rotary: Any, queries: int, size: int, learned: Any = None) -> tuple[Array, Array]:
    """Cosines, and sines with the signs of a quarter turn, for the first queries: (heads or 1, queries, size).

    `learned` is the model's RotaryFrequencies, if the block has its angles from one.
    """
    if rotary.block is None:
        plain = dataclasses.replace(rotary, interleaved=False)
        cosines, sines = (table[None, :queries].copy() for table in cosines_and_sines(plain, size, "float64"))
    else:
        angles = rotary_angles(rotary_coordinates(rotary)[:queries], float64(learned.frequencies))[rotary.block]
        angles = np.tile(angles, 2)
        cosines, sines = np.cos(angles), np.sin(angles)
    sines[..., : size // 2] *= -1
    return cosines, sines


def probe_weights(pooling: Any) -> DenseWeights:
    """Weights that compute the scores of an AttentionPooling's probe, (heads,) for each token.

    The query is the same for every image and becomes part of the kernel. Softmax ignores the bias of the keys.
    """
    heads = pooling.attention.num_heads
    query = query_weights(pooling.attention)
    query_of_head = (query.kernel @ float64(pooling.probe).reshape(-1) + query.bias).reshape(heads, 1, -1)
    keys = dense_weights(pooling.attention.key).kernel
    kernel = (query_of_head @ keys.reshape(heads, -1, keys.shape[-1]))[:, 0]
    return DenseWeights(kernel, np.zeros(heads))


def patch_weights(layer: Any, scale: Array | None) -> tuple[Array, Array]:
    """Kernel (outputs, height, width, inputs) and bias of a PatchEmbedding whose image is x * scale."""
    kernel = np.moveaxis(float64(layer.kernel), -1, 0)
    bias = np.zeros(len(kernel)) if layer.bias is None else float64(layer.bias)
    return kernel if scale is None else kernel * scale, bias


def prefix_tokens(layer: Any) -> Array:
    """Tokens that a PrefixTokens puts in front of the patches, (tokens, width)."""
    return np.concatenate([float64(token)[0] for token in layer.prefix])


def relative_table(layer: Any, queries: int) -> Array:
    """Table of a RelativePosition for the first queries, (heads, tokens + queries, head size), reversed:
    row m belongs to the key m - (queries - 1) + q of query q, with a row of zeros at the end.
    """
    table = float64(layer.table)
    tokens = (len(table) + 1) // 2
    reversed_table = np.moveaxis(table[::-1], 1, 0)[:, tokens - queries :]
    return np.pad(reversed_table, ((0, 0), (0, 1), (0, 0)))


def relative_bias(layer: Any, queries: int) -> Array:
    """Numbers of a RelativeBias that are added to the scores of the first queries, (1, heads, queries, tokens)."""
    numbers = bias_numbers(layer.grid, layer.prefix_tokens)[:queries]
    if layer.mlp_dim is None:
        return np.moveaxis(float64(layer.table)[numbers], -1, 0)[None]
    (kernel1, bias1), (kernel2, bias2) = (map(float64, dense.weights) for dense in (layer.dense1, layer.dense2))
    table = np.maximum(log_offsets(layer.grid) @ kernel1 + bias1, 0) @ kernel2 + bias2
    return np.moveaxis(np.pad(table, ((0, 3), (0, 0)))[numbers], -1, 0)[None]
