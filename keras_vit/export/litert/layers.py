"""Layers of encoder and head as LiteRT operators: norm, dense, MLP, activations, attention heads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_vit.export.litert import folding
from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.folding import Affine, Array, DenseWeights
from keras_vit.export.litert.operators import Operators, static_dim


@dataclass
class Layers:
    """Add layers to a file, one for each call. Names of layers become the names of tensors, as in `block_0/norm1`."""

    ops: Operators
    scales: Array  # of the residual stream, (hidden_size,); the largest is a power of two
    smoothing: Mapping[str, np.ndarray] = field(default_factory=dict)  # see `Options`
    shifts: Mapping[str, np.ndarray] = field(default_factory=dict)
    norm_names: list[str] = field(default_factory=list)  # names of the norms added so far

    def norm(self, x: Tensor, layer: Any, name: str, scales: Array | None) -> tuple[Tensor, Affine]:
        """Apply a LayerNormalization to x, (..., width), and return the gain and shift separately, for the layer that
        reads it. `scales`: of x, if it is in the residual stream (see `folding.to_stream`), else None.
        """
        ops, factors, shift = self.ops, self.smoothing.get(name), self.shifts.get(name)
        self.norm_names.append(name)
        if scales is None:
            x = self.center(x, name)
        scale = 1.0  # a power of two for all channels; rounding the squares in half precision must not lose epsilon
        if scales is not None:
            scale, scales = scales.max(), scales / scales.max()
        epsilon = max(layer.epsilon * scale**2, min(layer.epsilon, 2.0**-24))
        variance = self._mean_square(x, name, scales)
        variance = ops.add(variance, ops.constant(np.array(epsilon, np.float32), "epsilon"), f"{name}/safe")
        steps = [(ops.multiply, ops.unary("RSQRT", variance, f"{name}/rsqrt"), "normal")]
        affine = folding.norm_affine(layer, scales)
        if shift is not None:
            steps.append((ops.subtract, ops.constant(np.asarray(shift, np.float64), f"{name}/constant"), "shifted"))
            affine = affine._replace(constant=affine.gain * shift)
        if factors is not None:
            steps.append((ops.multiply, ops.constant(np.asarray(factors, np.float64), f"{name}/factors"), "smoothed"))
            affine = affine._replace(gain=affine.gain / factors)
        for number, (operator, operand, part) in enumerate(steps):
            x = operator(x, operand, name if number == len(steps) - 1 else f"{name}/{part}")
        return x, affine

    def _mean_square(self, x: Tensor, name: str, scales: Array | None) -> Tensor:
        """Return the mean square of x / scales. What scaled channels lack is a sum of its own: in integers with one
        range, a tensor of all channels' true squares would lose those of the other channels.
        """
        ops = self.ops
        squares = ops.multiply(x, x, f"{name}/squares")
        variance = ops.mean(squares, [-1], f"{name}/variance", keepdims=True)
        if scales is None or (scales == 1).all():
            return variance
        missing = ops.constant((scales**-2 - 1) / len(scales), f"{name}/missing")
        missing = ops.sum(ops.multiply(squares, missing, f"{name}/large"), [-1], f"{name}/large/sum", keepdims=True)
        return ops.add(variance, missing, f"{name}/whole")

    def apply_affine(self, x: Tensor, affine: Affine | None, name: str) -> Tensor:
        """Apply a norm's gain and shift where no dense layer follows into which they could be folded."""
        if affine is None:
            return x
        x = self.ops.multiply(x, self.ops.constant(affine.gain, f"{name}/gain"), f"{name}/scaled")
        return self.ops.add(x, self.ops.constant(affine.shift + affine.constant, f"{name}/shift"), f"{name}/shifted")

    def center(self, x: Tensor, name: str) -> Tensor:
        """Subtract the mean of the channels."""
        return self.ops.subtract(x, self.ops.mean(x, [-1], f"{name}/mean", keepdims=True), f"{name}/centered")

    def dense(self, x: Tensor, weights: DenseWeights, name: str) -> Tensor:
        """Apply a dense layer to the last axis."""
        return self.ops.dense(x, weights.kernel, weights.bias, name)

    def mlp(
        self,
        x: Tensor,
        affine: Affine | None,
        layer: Any,
        name: str,
        layer_scale: Any = None,
        scales: Array | None = None,
    ) -> Tensor:
        """Apply an MLP and its LayerScale, if any, to the result x of a norm whose `affine` is still to be applied.
        `scales` are those of the residual stream if the result goes there.
        """
        hidden = self.dense(x, folding.dense_weights(layer.dense1).fold_affine(affine), f"{name}/dense1")
        gate, rest = hidden, None
        if layer.gated:
            gate = self.dense(x, folding.dense_weights(layer.gate).fold_affine(affine), f"{name}/gate")
        gate = self.activation(layer.activation, gate, f"{name}/activation")
        hidden = self.ops.multiply(gate, hidden, f"{name}/gated") if layer.gated else gate
        if layer.norm_epsilon is not None:
            hidden, rest = self.norm(hidden, layer.norm, f"{name}/norm", None)
        return self.dense(hidden, folding.residual_weights(layer.dense2, layer_scale, scales, rest), f"{name}/dense2")

    def token_mlp(self, x: Tensor, layer: Any, queries: int, name: str) -> Tensor:
        """Apply an MLP over the tokens of x, (batch, tokens, width), and return the first `queries` tokens."""
        last = folding.dense_weights(layer.dense2)
        last = DenseWeights(last.kernel[:queries], last.bias[:queries])
        x = self.ops.transpose(x, (0, 2, 1), f"{name}/channels_first")
        hidden = self.dense(x, folding.dense_weights(layer.dense1), f"{name}/dense1")
        hidden = self.activation(layer.activation, hidden, f"{name}/activation")
        return self.ops.transpose(self.dense(hidden, last, f"{name}/dense2"), (0, 2, 1), name)

    def activation(self, function: str, x: Tensor, name: str) -> Tensor:
        """Apply one of `config.ACTIVATIONS`."""
        ops = self.ops
        if function == "linear":
            return x
        if function in ("relu", "tanh"):
            return ops.unary(function.upper(), x, name)
        if function in ("gelu_tanh", "gelu_erf"):
            return ops.gelu(x, name, approximate=function == "gelu_tanh")
        gate = x  # silu
        if function == "gelu_quick":
            gate = ops.multiply(x, ops.constant(np.array(1.702, np.float32), "gelu_quick"), f"{name}/slope")
        return ops.multiply(x, ops.unary("LOGISTIC", gate, f"{name}/gate"), name)

    def split_heads(self, x: Tensor, heads: int, name: str) -> Tensor:
        """Turn (batch, tokens, heads * size) into (batch, heads, tokens, size)."""
        batch, tokens, width = x.shape
        x = self.ops.reshape(x, (batch, tokens, heads, static_dim(width) // heads), f"{name}/heads")
        return self.ops.transpose(x, (0, 2, 1, 3), f"{name}/heads_first")

    def merge_heads(self, x: Tensor, name: str) -> Tensor:
        """Turn (batch, heads, tokens, size) into (batch, tokens, heads * size)."""
        batch, heads, tokens, size = x.shape
        if tokens != 1:
            x = self.ops.transpose(x, (0, 2, 1, 3), f"{name}/heads_last")
        return self.ops.reshape(x, (batch, tokens, static_dim(heads) * static_dim(size)), f"{name}/joined")
