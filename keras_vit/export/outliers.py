"""Find the outliers of a model: channels of tokens so large that integers lose the precision of the others.

Trained Vision Transformers have channels that are far from zero in every token, which the gains of the norms then
suppress, gains many times larger than others, and single tokens with huge channels. The weights of the next layers undo
all factors, so that the file computes the same function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np

from keras_vit.export.litert import folding
from keras_vit.export.litert.builder import Builder, Tensor
from keras_vit.export.litert.folding import Array, float64
from keras_vit.export.litert.head import write_model
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.plan import FilePlan
from keras_vit.export.litert.writer import FileWriter
from keras_vit.export.modes import Smoothing
from keras_vit.model import layers as vit
from keras_vit.model.layers import runtime

FINAL_NORM = "encoder_norm"
INNER_NORM = "/norm"  # end of the names of norms in attention or an MLP, which do not read the residual stream
NUM_IMAGES = 8  # the factors depend on the largest values alone, which few images show
DEFAULT_SAMPLES = [0, 3]  # two of the built-in images, smooth and noise: every export runs the model on them
BATCH = 2  # images in a call, for few activations in memory
INT8_LEVELS = 127  # steps of an 8-bit constant
# Of the squares of the residual stream, of which GPUs add up those of a token in half precision: with room for other
# images, a quarter of the largest float16.
LARGEST_SUM = float(np.finfo(np.float16).max) / 4
MAX_OUTLIER_RATIO = 2  # of a scaled channel's largest value to the median channel's


class Outliers(NamedTuple):
    """Values for `FilePlan.scales`, `smoothing` and `shifts`; None and {} for a model without outliers."""

    scales: Array | None = None
    smoothing: dict[str, Array] = {}
    shifts: dict[str, Array] = {}


def find_outliers(model: keras.Model, images: np.ndarray, smoothing: Smoothing | None) -> Outliers:
    """Measure activations on some of these prepared images and return the factors that make them easier to quantize.

    In every mode the residual stream is scaled by a power of two, which is exact, if the sum of a token's squares comes
    near the largest float16, because GPUs compute in half precision. The rest is for a mode with `smoothing`.

    The channels of a row of activations share one scale, as do the inputs of a kernel's output: one very large channel
    takes the precision of all others. Smoothing divides the difficulty between x * f and kernel / f.

        f = max |kernel|**(1 - alpha) / max |x|**alpha  for each channel

    Large channels of x that are nearly constant lose their constant first: it becomes part of the next bias (Outlier
    Suppression+, arXiv 2304.09145).

    Only norms where a channel of x or the kernel exceeds the median one `smoothing.threshold` times get factors, and
    only the channels of the residual stream above `smoothing.stream` times the median one are scaled.
    """
    blocks = [layer for layer in model.layers if isinstance(layer, vit.EncoderBlock)]
    if not blocks:
        return Outliers()
    file = FileWriter(model, Operators(_BuilderWithoutWeights()), FilePlan())
    stream, ranges, largest_sum = _measure(model, images, last_block=blocks[-1])
    scales = np.ones(len(stream))
    if file.stream is not None and smoothing is not None and smoothing.stream is not None:
        scales = _stream_scales(stream, smoothing.stream)
    power = 1.0
    if file.stream is not None:
        # A norm adds the squares as they are before `scales`: see `_mean_square` of the writer.
        power = 0.5 ** np.ceil(np.log2(max(largest_sum / LARGEST_SUM, 1)) / 2)
    outliers = Outliers(None if (scales * power == 1).all() else scales * power, {}, {})
    if smoothing is not None:
        write_model(file)
        for name, largest_weights in file.largest_weights.items():
            if name in ranges:
                factors_in = 1.0 if name.endswith(INNER_NORM) else scales
                gains = np.abs(float64(file.norms[name].gamma))
                weights = _above_zero(largest_weights * gains / factors_in)
                _balance(outliers, name, ranges[name] * factors_in, weights, smoothing)
    return outliers


def _balance(outliers: Outliers, name: str, extremes: Array, weights: Array, smoothing: Smoothing) -> None:
    """Add the factors and the shift of a norm, where it needs them.

    `extremes` are the least and the largest value of each channel of its result, `weights` the largest |kernel|.
    """
    least, most = extremes
    middle, reach = (least + most) / 2, (most - least) / 2
    impact = _above_zero(np.maximum(-least, most))
    is_constant = (np.abs(middle) > reach) & (np.abs(middle) > smoothing.threshold * np.median(impact))
    if is_constant.any():
        outliers.shifts[name] = np.where(is_constant, middle, 0)
        impact = _above_zero(np.where(is_constant, reach, impact))
    if max(side.max() / np.median(side) for side in (impact, weights)) > smoothing.threshold:
        factors = weights ** (1 - smoothing.alpha) / impact**smoothing.alpha
        outliers.smoothing[name] = factors if smoothing.stream is None else round_to_int8_steps(factors)


class _BuilderWithoutWeights(Builder):
    """Builder of a file that is not written: the writers run only to collect norms and largest weights."""

    def constant(self, array: np.ndarray, name: str) -> Tensor:
        """Add a constant without its values."""
        return self._tensor(name, array.shape, array.dtype.name)


def round_to_int8_steps(values: Array) -> Array:
    """Round values above 0 to integer multiples of the largest / 127, at least one: exact as 8-bit constants.

    The kernels that follow are divided by the rounded values.
    """
    step = values.max() / INT8_LEVELS
    return np.maximum(np.rint(values / step), 1) * step


def _stream_scales(maxima: Array, most: float) -> Array:
    """Factors of the channels of the residual stream: below 1 for outliers, else 1."""
    median = max(np.median(maxima), 1e-30)
    is_outlier = maxima > most * median
    scales = np.ones(len(maxima))
    if is_outlier.any():
        # A norm multiplies the squares by 1 / scale**2 - 1, an 8-bit constant.
        missing = round_to_int8_steps((maxima[is_outlier] / (MAX_OUTLIER_RATIO * median)) ** 2 - 1)
        scales[is_outlier] = 1 / np.sqrt(1 + missing)
    return scales


def _measure(model: keras.Model, images: np.ndarray, *, last_block: Any) -> tuple[Array, dict[str, Array], float]:
    """Measure the largest |value| of each channel of the residual stream, (width,), the least and largest value of
    each channel of the blocks' and the final norm before their gains, (2, width), and the largest sum of the squares
    of a token of the stream.
    """
    stream: Array = np.zeros(1)
    largest_sum = 0.0
    ranges: dict[str, Array] = {}

    def update(name: str, tensor: Any) -> None:
        nonlocal stream, largest_sum
        if not name.startswith("block_") and name != FINAL_NORM:
            return
        tokens = np.array(keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32")))
        tokens = tokens if last_block.norm1.is_rms else folding.center(tokens)
        tokens = tokens.reshape(-1, tokens.shape[-1])
        if not name.endswith(INNER_NORM):
            stream = np.maximum(stream, np.abs(tokens).max(axis=0))
            largest_sum = max(largest_sum, float(np.square(tokens).sum(axis=-1).max()))
        tokens /= np.sqrt(np.square(tokens).mean(axis=-1, keepdims=True) + last_block.norm1.epsilon)
        least, most = ranges.get(name, (np.inf, -np.inf))
        ranges[name] = np.array([np.minimum(least, tokens.min(axis=0)), np.maximum(most, tokens.max(axis=0))])

    run_blocks = keras.Function(model.inputs[0], last_block.output)
    images = images[np.linspace(0, len(images) - 1, min(len(images), NUM_IMAGES)).astype(int)]
    for start in range(0, len(images), BATCH):
        with runtime.observe_norms(update):
            tokens = run_blocks(images[start : start + BATCH])
        update(FINAL_NORM, tokens)  # where the final norm follows the pooling, its tokens are the means of these
    return stream, ranges, largest_sum


def _above_zero(values: Array) -> Array:
    """Convert maxima of channels to float64; channels that are never used get a very small one."""
    values = values.astype(np.float64)
    return np.maximum(values, 1e-5 * max(values.max(), 1e-30))
