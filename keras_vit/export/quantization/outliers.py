"""Find the outliers of a model: channels of tokens that are so large that integers lose the others beside them.

Trained Vision Transformers have some: a few channels far from zero in every token, which the gains of the norms then
suppress, gains that are many times the others', and single tokens with huge channels. Everything here is undone in the
weights of the next layers, so that the file computes the same function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_vit.export.litert import folding
from keras_vit.export.litert.folding import Array, DenseWeights, float64
from keras_vit.export.quantization.modes import Smoothing
from keras_vit.model.layers import runtime
from keras_vit.model.vision_transformer import VisionTransformer

FINAL = "encoder_norm"
IN_MLP = "/mlp/norm"  # end of the names of norms that do not read the residual stream
NUM_IMAGES = 8  # the factors depend on the largest values alone, which few images show
BUILT_IN = slice(0, 4, 3)  # of the built-in images two, smooth and noise: every export has to run them
BATCH = 2  # images in a call, for few activations in memory
LEVELS = 127  # steps of an 8-bit constant
LARGEST = 127  # |value| of the residual stream; its square, with room, is a quarter of the largest float16
ROOM = 2  # a channel that is scaled down is then at most this many times the median one


class Outliers(NamedTuple):
    """Values for `Options.scales`, `smoothing` and `shifts`; None and {} for a model without outliers."""

    scales: Array | None = None
    smoothing: dict[str, Array] = {}
    shifts: dict[str, Array] = {}


def find(model: VisionTransformer, images: np.ndarray, smoothing: Smoothing | None) -> Outliers:
    """Measure activations on some of these prepared images and return the factors that make them easier to quantize.

    In every mode the residual stream is scaled by a power of two, which is exact, if a square comes near the largest
    float16, because GPUs compute in half precision. The rest is for a mode with `smoothing`.

    The channels of a row of activations share one scale, as do the inputs of a kernel's output: one very large channel
    takes the precision of all others. Smoothing divides the difficulty between x * f and kernel / f.

        f = max |kernel|**(1 - alpha) / max |x|**alpha  for each channel

    Large channels of x that are nearly constant lose their constant first: it becomes part of the next bias (Outlier
    Suppression+, arXiv 2304.09145).

    Only norms where a channel of x or the kernel exceeds the median one `smoothing.threshold` times get factors, and
    only the channels of the residual stream above `smoothing.stream` times the median one are scaled.
    """
    if not model.config.num_layers:
        return Outliers()
    stream, ranges = _measure(model, images)
    is_centered = not (model.config.has_map_head and model.config.final_norm == "pooled")
    scales = np.ones(len(stream))
    if is_centered and smoothing is not None and smoothing.stream is not None:
        scales = _stream_scales(stream, smoothing.stream)
    half = 0.5 ** max(0, np.ceil(np.log2(max((stream * scales).max() / LARGEST, 1)))) if is_centered else 1
    found = Outliers(None if (scales * half == 1).all() else scales * half, {}, {})
    if smoothing is None:
        return found
    for name, norm, readers in _norms(model):
        factors_in = 1.0 if name.endswith(IN_MLP) else scales
        least, most = ranges[name] * factors_in
        weights = np.max([np.abs(layer.kernel).max(axis=0) for layer in readers], axis=0)
        weights = _above_zero(weights * np.abs(float64(norm.gamma)) / factors_in)
        middle, reach = (least + most) / 2, (most - least) / 2
        impact = _above_zero(np.maximum(-least, most))
        is_constant = (np.abs(middle) > reach) & (np.abs(middle) > smoothing.threshold * np.median(impact))
        if is_constant.any():
            found.shifts[name] = np.where(is_constant, middle, 0)
            impact = _above_zero(np.where(is_constant, reach, impact))
        if max(side.max() / np.median(side) for side in (impact, weights)) > smoothing.threshold:
            factors = weights ** (1 - smoothing.alpha) / impact**smoothing.alpha
            found.smoothing[name] = factors if smoothing.stream is None else on_grid(factors)
    return found


def on_grid(values: Array) -> Array:
    """Return values above 0 as whole multiples of the largest / 127, at least one: 8-bit constants keep them exactly.

    The kernels that follow are divided by these very values.
    """
    step = values.max() / LEVELS
    return np.maximum(np.rint(values / step), 1) * step


def _stream_scales(maxima: Array, most: float) -> Array:
    """Return what the channels of the residual stream are multiplied by: 1 but for outliers."""
    median = max(np.median(maxima), 1e-30)
    is_outlier, scales = maxima > most * median, np.ones(len(maxima))
    if is_outlier.any():
        # A norm multiplies the squares by 1 / scale**2 - 1, an 8-bit constant.
        missing = on_grid((maxima[is_outlier] / (ROOM * median)) ** 2 - 1)
        scales[is_outlier] = 1 / np.sqrt(1 + missing)
    return scales


def _measure(model: VisionTransformer, images: np.ndarray) -> tuple[Array, dict[str, Array]]:
    """Return the largest |value| of each channel of the residual stream, (width,), and the least and the largest value
    of each channel of the norms before their gains, (2, width).
    """
    stream = np.zeros(model.config.hidden_size)
    ranges: dict[str, Array] = {}
    images = images[np.unique(np.linspace(0, len(images) - 1, NUM_IMAGES).astype(int))]
    for start in range(0, len(images), BATCH):
        for name, epsilon, tensor in _norm_inputs(model, images[start : start + BATCH]):
            tokens = folding.center(np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32"))))
            tokens = tokens.reshape(-1, tokens.shape[-1])
            if not name.endswith(IN_MLP):
                stream = np.maximum(stream, np.abs(tokens).max(axis=0))
            tokens /= np.sqrt(np.square(tokens).mean(axis=-1, keepdims=True) + epsilon)
            least, most = ranges.get(name, (np.inf, -np.inf))
            ranges[name] = np.array([np.minimum(least, tokens.min(axis=0)), np.maximum(most, tokens.max(axis=0))])
    return stream, ranges


def _norm_inputs(model: VisionTransformer, images: np.ndarray) -> Iterator[tuple[str, float, Any]]:
    """Yield the name, the epsilon and the input, (batch, tokens, width), of the norms, in their order."""
    found: dict[str, Any] = {}
    last = f"block_{model.config.num_layers - 1}"
    with runtime.observe_norms(found.__setitem__):
        tokens = model.features(images, [last])[last]
    found[FINAL] = tokens  # where the final norm follows the pooling, its tokens are the means of these
    for name, tensor in found.items():
        if name.startswith("block_") or name == FINAL:
            yield name, model.config.norm_epsilon, tensor


def _norms(model: VisionTransformer) -> Iterator[tuple[str, Any, list[DenseWeights]]]:
    """Yield the name of every norm that dense layers read, its layer, and the weights of these layers."""
    for i in range(model.config.num_layers):
        block = model.get_layer(f"block_{i}")
        attention, mlp = block.attention, block.mlp
        if attention is not None:
            first = [folding.query_weights(attention), *map(folding.dense_weights, (attention.key, attention.value))]
            yield f"block_{i}/norm1", block.norm1, first
        second = (mlp.dense1, mlp.gate) if mlp.gated else (mlp.dense1,)
        yield f"block_{i}/norm2", block.norm2, list(map(folding.dense_weights, second))
        if model.config.mlp_norm:
            yield f"block_{i}{IN_MLP}", mlp.norm, [folding.dense_weights(mlp.dense2)]
    if readers := _final_readers(model):
        yield FINAL, model.get_layer(FINAL), readers


def _final_readers(model: VisionTransformer) -> list[DenseWeights]:
    """Return the weights of the layers that read the final norm; none where no layer reads it directly."""
    c = model.config
    if c.has_map_head and c.final_norm == "tokens":
        pooling = model.get_layer("pool")
        return [folding.probe_weights(pooling), folding.dense_weights(pooling.attention.value)]
    names = ["head", "head_distillation"][: c.distilled + 1] if c.num_classes and not c.normalize_features else []
    if c.representation_size is not None:
        names = ["pre_logits"]
    readers = [folding.dense_weights(model.get_layer(name)) for name in names]
    width = c.hidden_size  # of "token_gap", token and mean are read side by side
    return [
        weights._replace(kernel=weights.kernel[:, start : start + width])
        for weights in readers
        for start in range(0, c.feature_size, width)
    ]


def _above_zero(values: Array) -> Array:
    """Return float64 maxima of channels; channels that are never used get a very small one."""
    values = values.astype(np.float64)
    return np.maximum(values, 1e-5 * max(values.max(), 1e-30))
