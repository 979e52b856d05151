"""Writers of layers that all parts of a network have: norm, dense, activation, MLP."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_vit.export.litert import folding
from keras_vit.export.litert.builder import MAX_RANK, Tensor
from keras_vit.export.litert.folding import Array, DenseWeights, Stream
from keras_vit.export.litert.operators import Operators, static_dim
from keras_vit.export.litert.writer import FileWriter, PendingTensor, honours, unsupported, writes
from keras_vit.model import layers as vit
from keras_vit.model.config import ACTIVATIONS
from keras_vit.model.layers.base import LEAKY_SLOPE, QUICK_SLOPE, activation_function
from keras_vit.model.layers.block import Dense

honours(vit.Dropout, "rate", "noise_shape", "seed")
honours(vit.StochasticDepth, "rate")
honours(keras.layers.Identity)


@writes(vit.Dropout, keras.layers.Identity, reads_stream=True)
def write_identity(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Write a layer that does nothing outside of training."""
    del layer
    return file.tensor_of(x)


honours(
    vit.LayerNormalization,
    "epsilon",
    "is_rms",
    "is_fused",
    axis=(-1, [-1]),
    center=(True,),
    scale=(True,),
    rms_scaling=(False,),
)
honours(vit.LayerScale, "initial")


@writes(vit.LayerNormalization, reads_stream=True)
def write_norm(file: FileWriter, layer: Any, x: Any) -> PendingTensor:
    """Write a LayerNormalization."""
    return norm(file, layer, file.tensor_of(x), layer.name)


# How `config.ACTIVATIONS` are written: operators, tensor, name -> tensor. Another one is refused.
_WRITE_ACTIVATION: dict[str, Callable[[Operators, Tensor, str], Tensor]] = {
    "linear": lambda ops, x, name: x,
    "gelu_tanh": lambda ops, x, name: ops.gelu(x, name, approximate=True),
    "gelu_erf": lambda ops, x, name: ops.gelu(x, name, approximate=False),
    "gelu_quick": lambda ops, x, name: _gated(ops, x, name, slope=QUICK_SLOPE),
    "silu": lambda ops, x, name: _gated(ops, x, name),
    "leaky_relu": lambda ops, x, name: ops.unary("LEAKY_RELU", x, name, options="LeakyReluOptions", alpha=LEAKY_SLOPE),
    "relu": lambda ops, x, name: ops.unary("RELU", x, name),
    "relu6": lambda ops, x, name: ops.unary("RELU6", x, name),
    "hard_swish": lambda ops, x, name: ops.unary("HARD_SWISH", x, name),
    "sigmoid": lambda ops, x, name: ops.unary("LOGISTIC", x, name),
    "tanh": lambda ops, x, name: ops.unary("TANH", x, name),
}
_DENSE_FIELDS = ("units", "activation", "use_bias", "lora_rank", "lora_alpha")
honours(keras.layers.Dense, *_DENSE_FIELDS)
honours(Dense, *_DENSE_FIELDS)


@writes(keras.layers.Dense)
def write_dense(file: FileWriter, layer: Any, x: Any, *, factor: float | None = None) -> PendingTensor:
    """Write a Dense layer and its activation; a factor multiplies the results of the dense layer."""
    value = file.tensor_of(x)
    weights = file.fold(folding.dense_weights(layer), value)
    if factor is not None:
        weights = weights.scale_outputs(factor)
    if layer.activation is keras.activations.linear:
        return PendingTensor(file.ops.dense(value.tensor, *weights, layer.name))
    function = next((name for name in ACTIVATIONS if activation_function(name) is layer.activation), "")
    if not function:
        raise unsupported(layer, f" with the activation {keras.activations.serialize(layer.activation)!r:.200}")
    x = file.ops.dense(value.tensor, *weights, f"{layer.name}/dense")
    return PendingTensor(activation(file, layer, function, x, layer.name))


def norm(file: FileWriter, layer: Any, x: PendingTensor, name: str) -> PendingTensor:
    """Apply a LayerNormalization or an RMSNorm; its gain and shift are left to the layers that read the result.

    It writes (x - mean) / sqrt(mean((x - mean)^2) + epsilon), without the mean for an RMSNorm and for a stream that is
    centered. A scaled stream has x * S: with s, the largest of S, the root is that of mean((x * s)^2) + epsilon * s^2,
    and the gain divides by S / s.
    With factors in `FilePlan.smoothing`, the result is multiplied by them; the constants in `FilePlan.shifts` are
    subtracted before. The gain and the constant of the affine make up for both.
    """
    ops = file.ops
    file.norms[name] = layer
    tensor, scales = apply_affine(ops, x, f"{name}/input"), None
    scale = 1.0  # a power of two for all channels; rounding the squares in half precision must not lose epsilon
    if x.stream is not None:
        scale = x.stream.scales.max()
        scales = x.stream.scales / scale
    elif not layer.is_rms:
        tensor = center(ops, tensor, name)
    epsilon = max(layer.epsilon * scale**2, min(layer.epsilon, 2.0**-24))
    variance = _mean_square(ops, tensor, name, scales)
    variance = ops.add(variance, ops.constant(np.array(epsilon, np.float32), "epsilon"), f"{name}/safe")
    reciprocal = ops.reciprocal_root(variance, name)
    steps = [(ops.multiply, reciprocal, "normal")]
    affine = folding.norm_affine(layer, scales)
    shift, factors = file.plan.shifts.get(name), file.plan.smoothing.get(name)
    if shift is not None:
        steps.append((ops.subtract, ops.constant(np.asarray(shift, np.float64), f"{name}/constant"), "shifted"))
        affine = affine._replace(constant=affine.gain * shift)
    if factors is not None:
        steps.append((ops.multiply, ops.constant(np.asarray(factors, np.float64), f"{name}/factors"), "smoothed"))
        affine = affine._replace(gain=affine.gain / factors)
    for number, (operator, operand, part) in enumerate(steps, start=1):
        tensor = operator(tensor, operand, name if number == len(steps) else f"{name}/{part}")
    return PendingTensor(tensor, affine, norm=name)


def _mean_square(ops: Operators, x: Tensor, name: str, scales: Array | None) -> Tensor:
    """Compute the mean square of x / scales.

    In integers, a tensor of squares has one range for all, and most would round to zero beside the largest. So they are
    added up within BATCH_MATMUL, which has 32 bits there. A second sum adds the part that scaled channels lack.
    """
    is_scaled = scales is not None and (scales != 1).any()
    if ops.norms == "float" and not is_scaled:
        return ops.mean(ops.multiply(x, x, f"{name}/squares"), [-1], f"{name}/variance", keepdims=True)
    width = x.shape[-1]
    sides = x.shape[1:-1] if len(x.shape) < MAX_RANK else (math.prod(map(static_dim, x.shape[1:-1])),)
    rows = ops.reshape(x, (x.shape[0], *sides, 1, width), f"{name}/rows")
    square = ops.matmul(rows, rows, f"{name}/square", transpose_b=True)
    variance = ops.multiply(
        square, ops.constant(np.array(1 / static_dim(width)), f"{name}/width"), f"{name}/square/mean"
    )
    if scales is not None and is_scaled:
        missing = ops.constant((scales**-2 - 1) / len(scales), f"{name}/missing")
        large = ops.matmul(rows, ops.multiply(rows, missing, f"{name}/large"), f"{name}/large/sum", transpose_b=True)
        variance = ops.add(variance, large, f"{name}/whole")
    return ops.reshape(variance, (*x.shape[:-1], 1), f"{name}/variance")


def apply_affine(ops: Operators, x: PendingTensor, name: str) -> Tensor:
    """Apply a norm's gain and shift where no dense layer follows into which they could be folded."""
    if x.affine is None:
        return x.tensor
    scaled = ops.multiply(x.tensor, ops.constant(x.affine.gain, f"{name}/gain"), f"{name}/scaled")
    return ops.add(scaled, ops.constant(x.affine.shift + x.affine.constant, f"{name}/shift"), f"{name}/shifted")


def center(ops: Operators, x: Tensor, name: str) -> Tensor:
    """Subtract the mean of the channels."""
    return ops.subtract(x, ops.mean(x, [-1], f"{name}/mean", keepdims=True), f"{name}/centered")


def residual_dense(
    file: FileWriter,
    layer: Any,
    x: PendingTensor,
    name: str,
    *,
    layer_scale: Any = None,
    stream: Stream | None = None,
    few_rows: bool = False,
) -> Tensor:
    """Apply a Dense or EinsumDense layer and its LayerScale, if any; `stream` is that which it writes to."""
    weights = file.fold(folding.dense_weights(layer), x)
    weights = folding.residual_weights(weights, layer_scale, stream)
    return file.ops.dense(x.tensor, *weights, name, few_rows=few_rows)


honours(vit.MLP, "mlp_dim", "gated", "norm_epsilon", "use_bias", "dropout_rate", activation=tuple(_WRITE_ACTIVATION))


def mlp(
    file: FileWriter, layer: Any, x: PendingTensor, name: str, *, layer_scale: Any = None, stream: Stream | None = None
) -> Tensor:
    """Apply an MLP; LayerScale and stream are those of its last layer, see `residual_dense`."""
    hidden = gate = file.dense(x, folding.dense_weights(layer.dense1), f"{name}/dense1")
    if layer.gated:
        gate = file.dense(x, folding.dense_weights(layer.gate), f"{name}/gate")
    gate = activation(file, layer, layer.activation, gate, f"{name}/activation")
    value = PendingTensor(file.ops.multiply(gate, hidden, f"{name}/gated") if layer.gated else gate)
    if layer.norm_epsilon is not None:
        value = norm(file, layer.norm, value, f"{name}/norm")
    return residual_dense(file, layer.dense2, value, f"{name}/dense2", layer_scale=layer_scale, stream=stream)


def token_mlp(file: FileWriter, layer: Any, x: Tensor, name: str, *, queries: int) -> Tensor:
    """Apply an MLP over the tokens of x, (batch, tokens, width), and return the first `queries` tokens."""
    ops = file.ops
    last = folding.dense_weights(layer.dense2)
    last = DenseWeights(last.kernel[:queries], last.bias[:queries])
    x = ops.transpose(x, (0, 2, 1), f"{name}/channels_first")
    hidden = ops.dense(x, *folding.dense_weights(layer.dense1), f"{name}/dense1")
    hidden = activation(file, layer, layer.activation, hidden, f"{name}/activation")
    return ops.transpose(ops.dense(hidden, *last, f"{name}/dense2"), (0, 2, 1), name)


def activation(file: FileWriter, layer: Any, function: str, x: Tensor, name: str) -> Tensor:
    """Apply a layer's activation, one of `config.ACTIVATIONS`; raise a ValueError for one without operators."""
    if function not in _WRITE_ACTIVATION:
        raise unsupported(layer, f" with the activation {function!r}")
    return _WRITE_ACTIVATION[function](file.ops, x, name)


def _gated(ops: Operators, x: Tensor, name: str, *, slope: float = 1.0) -> Tensor:
    """Compute x * sigmoid(slope * x)."""
    gate = x
    if slope != 1:
        gate = ops.multiply(x, ops.constant(np.array(slope, np.float32), "gelu_quick"), f"{name}/slope")
    return ops.multiply(x, ops.unary("LOGISTIC", gate, f"{name}/gate"), name)
