"""Weights as a file keeps them: what is known before an image is there is computed here, in float64, layer by layer.

What a norm scales and shifts by, the next dense layer takes over (`Dense.after`). What writes to the residual stream
writes channels whose mean is zero (`Dense.centered`): every reader is a LayerNorm, which subtracts that mean anyway,
and so has nothing left to subtract.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import keras
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Affine(NamedTuple):
    """What a norm leaves to whoever reads it: x * gain + shift, both float64 (width,)."""

    gain: Array
    shift: Array


class Dense(NamedTuple):
    """x @ kernel.T + bias: kernel float64 (outputs, inputs), bias float64 (outputs,)."""

    kernel: Array
    bias: Array

    def after(self, affine: Affine | None) -> Self:
        """The layer that takes the norm's result before its gain and shift."""
        if affine is None:
            return self
        return self._replace(kernel=self.kernel * affine.gain, bias=self.bias + self.kernel @ affine.shift)

    def times(self, factors: Array | float) -> Self:
        """The layer whose outputs, (outputs,) or all, are multiplied."""
        factors = np.broadcast_to(np.asarray(factors, np.float64), self.bias.shape)
        return self._replace(kernel=self.kernel * factors[:, None], bias=self.bias * factors)

    def centered(self) -> Self:
        """The layer whose outputs have the mean zero."""
        return self._replace(kernel=centered(self.kernel, axis=0), bias=centered(self.bias))


def array(weight: Any) -> Array:
    """A variable or an array, float64."""
    return np.asarray(keras.ops.convert_to_numpy(weight), np.float64)


def centered(values: Array, axis: int = -1) -> Array:
    """The values less their mean along the axis of the channels."""
    return values - values.mean(axis=axis, keepdims=True)


def norm(layer: Any, factors: np.ndarray | None = None) -> Affine:
    """The gain and shift of a LayerNorm whose result is multiplied by `factors` (width,) already."""
    gain = array(layer.gamma)
    return Affine(gain if factors is None else gain / factors, array(layer.beta))


def dense(layer: Any) -> Dense:
    """A Dense or one of attention's EinsumDense, its heads in a row."""
    kernel = array(layer.kernel)
    outputs = kernel.shape[-1] if layer.name == "out" or kernel.ndim == 2 else kernel.shape[1] * kernel.shape[2]
    kernel = kernel.reshape(-1, outputs).T
    return Dense(kernel, np.zeros(outputs) if layer.bias is None else array(layer.bias).reshape(-1))


def query(attention: Any) -> Dense:
    """The queries of a MultiHeadAttention, 1 / sqrt(head size) included."""
    return dense(attention.query).times(attention.scale)


def probe_scores(pooling: Any) -> Dense:
    """The scores of an AttentionPooling's probe as a layer of the tokens: its query is the same for every image.

    What the keys' bias adds is the same for all tokens of a head, and softmax does not see it.
    """
    heads = pooling.attention.num_heads
    first = query(pooling.attention)
    asked = (first.kernel @ array(pooling.probe).reshape(-1) + first.bias).reshape(heads, 1, -1)
    keys = dense(pooling.attention.key).kernel
    kernel = (asked @ keys.reshape(heads, -1, keys.shape[-1]))[:, 0]
    return Dense(kernel, np.zeros(heads))


def patches(layer: Any, scale: Array | None) -> tuple[Array, Array]:
    """The kernel (outputs, height, width, inputs) and bias of a PatchEmbedding whose image is x * scale."""
    kernel = np.moveaxis(array(layer.kernel), -1, 0)
    bias = np.zeros(len(kernel)) if layer.bias is None else array(layer.bias)
    return kernel if scale is None else kernel * scale, bias


def prefix(layer: Any) -> Array:
    """The tokens that a PrefixTokens puts in front, (tokens, width)."""
    return np.concatenate([array(token)[0] for token in layer.prefix])


def positions(layer: Any) -> Array:
    """What a PositionEmbedding adds, (tokens, width)."""
    if layer.kind == "sincos2d":
        return array(layer.fixed)[0]
    if layer.kind == "learned":
        return array(layer.embedding)[0]
    count, (height, width) = layer.prefix_tokens, layer.grid
    along_x, along_y = array(layer.x_embedding)[0], array(layer.y_embedding)[0]
    places = np.concatenate([np.tile(along_x[count:], (height, 1)), along_y[count:].repeat(width, axis=0)], axis=1)
    return np.concatenate([np.concatenate([along_x[:count], along_y[:count]], axis=1), places])


def relative_table(layer: Any, queries: int) -> Array:
    """A RelativePosition's table for the first queries of the sequence: (heads, tokens + queries, head size).

    Backwards, so that row m belongs to the key m - (queries - 1) + q of query q, and a row of zeros at the end: see
    `layers.relative.relative_scores`.
    """
    table = array(layer.table)
    tokens = (len(table) + 1) // 2
    backwards = np.moveaxis(table[::-1], 1, 0)[:, tokens - queries :]
    return np.pad(backwards, ((0, 0), (0, 1), (0, 0)))
