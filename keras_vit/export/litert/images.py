"""Input of a LiteRT file: prepared images, or pixels that the file itself prepares as `preprocess` does."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.folding import Affine
from keras_vit.export.litert.operators import Operators, static_dim
from keras_vit.export.litert.plan import FilePlan, image_config
from keras_vit.export.litert.writer import FileWriter, PendingTensor, honours, unknown_fields, writes
from keras_vit.model.config import Preprocessing, ViTConfig
from keras_vit.model.resizing import Matrix, Size, is_height_first, resize_matrix, resize_plan


class ImageInput(NamedTuple):
    """An image in the graph. The prepared image is tensor * scale; the first layer's kernel applies the scale."""

    image: Tensor  # the graph's input: float32, or uint8 pixels of any size
    tensor: Tensor  # float32 (batch, height, width, channels) of the model's size, zero where a prepared image is zero
    scale: Matrix | None = None  # float64 (channels,); None where the tensor is already prepared


honours(keras.layers.InputLayer, "batch_shape", "sparse", "ragged", "optional")
honours(
    Preprocessing,
    "antialias",
    "crop_fraction",
    "round_pixels",
    "mean",
    "std",
    "bits",  # these two say how values that are not bytes become pixels; a file takes pixels
    "range",
    interpolation=("bilinear", "bicubic", "area", "nearest", "lanczos3"),
    resize=("squash", "crop"),
    crop_rounding=("nearest", "down", "half_even"),
)


@writes(keras.layers.InputLayer)
def write_input(file: FileWriter, layer: Any) -> PendingTensor:
    """Write the model's input, an image."""
    del layer
    given = add_image_input(file.ops, image_config(file.model), file.plan)
    file.inputs["image"] = given.image
    if given.scale is None:
        return PendingTensor(given.tensor)
    return PendingTensor(given.tensor, Affine(given.scale, *np.zeros((2, len(given.scale)))))


def add_image_input(ops: Operators, config: ViTConfig, plan: FilePlan) -> ImageInput:
    """Add the file's input, called "image", and the operators that turn it into an image of the model's size.

    Of the normalization (x - mean) / std, only the shift is computed here; the first kernel applies the scale. The
    shift cannot be folded: a hybrid's convolution pads prepared images with zeros, and values of 0 to 255 would use
    only half of the range of 8 bits.
    """
    target = config.size
    size = plan.source_size or target
    image = ops.builder.input("image", (plan.batch, *size, config.num_channels), plan.input_dtype)
    if plan.input_dtype == "float32":
        return ImageInput(image, image)
    preprocessing = config.preprocessing
    if fields := unknown_fields(preprocessing):
        raise ValueError(
            f"The LiteRT file cannot prepare pixels with these fields of Preprocessing: {fields}. Write a file of "
            "prepared images, with input_dtype='float32'"
        )
    x = image
    if plan.source_size is not None:
        x = _RESIZERS[plan.resize](ops, x, target, preprocessing)
    std = np.broadcast_to(np.array(preprocessing.std), config.num_channels)
    mean = np.broadcast_to(np.array(preprocessing.mean), config.num_channels)
    shifted = ops.add(_cast_to_float(ops, x), ops.constant(-255 * mean, "image/shift"), "image/shifted")
    return ImageInput(image, shifted, scale=1 / (255 * std))


def _cast_to_float(ops: Operators, x: Tensor) -> Tensor:
    return x if x.dtype == "float32" else ops.cast(x, "float32", "image/floats")


def _resize_builtin(ops: Operators, x: Tensor, target: Size, preprocessing: Preprocessing) -> Tensor:
    """Resize bilinearly and crop; the interpolation of the preprocessing is ignored."""
    size, corner = resize_plan(_size(x), target, preprocessing)
    x = ops.resize_bilinear(_cast_to_float(ops, x), size, "image/resized")
    for axis, (start, kept) in enumerate(zip(corner, target, strict=True), start=1):
        if x.shape[axis] != kept:
            x = ops.slice(x, axis, start, start + kept, f"image/cut_{axis}")
    return x


def _resize_exact(ops: Operators, x: Tensor, target: Size, preprocessing: Preprocessing) -> Tensor:
    """Multiply each channel by a matrix for the side that Pillow resizes first, then by one for the other.

    These are BATCH_MATMULs instead of dense layers, because the quantizer does not change these. LiteRT's GPU refuses a
    constant in front, and computes one behind wrong if it broadcasts over channels or adj_y transposes it.
    """
    matrices = []
    source, (size, corner) = _size(x), resize_plan(_size(x), target, preprocessing)
    for axis, (old, new, start, kept) in enumerate(zip(source, size, corner, target, strict=True), start=1):
        matrix = resize_matrix(new, old, preprocessing)[start : start + kept]
        used = np.flatnonzero(matrix.any(axis=0))
        first, last = int(used[0]), int(used[-1]) + 1
        if last - first < old:
            x = ops.slice(x, axis, first, last, f"image/used_{axis}")
        matrices.append(matrix[:, first:last].T)
    weights = [ops.constant(matrix, f"image/matrix_{axis}") for axis, matrix in enumerate(matrices)]
    passes = list(zip(("rows", "columns"), weights, strict=True))
    height_first = preprocessing.matches_pillow and is_height_first(source, size)
    if not height_first:
        passes.reverse()
    x = ops.transpose(_cast_to_float(ops, x), (0, 3, 2, 1) if height_first else (0, 3, 1, 2), "image/channels_first")
    for name, side in passes:  # pixels that are added lie side by side
        if name != passes[0][0]:
            x = ops.transpose(x, (0, 1, 3, 2), f"image/{passes[0][0]}_first")
        x = _clip_and_round(ops, ops.matmul(x, side, f"image/{name}"), preprocessing, f"image/{name}")
    return ops.transpose(x, (0, 2, 3, 1) if height_first else (0, 3, 2, 1), "image/resized")


def _clip_and_round(ops: Operators, x: Tensor, preprocessing: Preprocessing, name: str) -> Tensor:
    """Clip pixels to 0 to 255 if the interpolation leaves this range, and round them if the preprocessing does."""
    if preprocessing.overshoots:
        white = ops.constant(np.array(255, np.float32), "image/white")
        below = ops.unary("RELU", ops.subtract(white, x, f"{name}/below"), f"{name}/dark")
        x = ops.unary("RELU", ops.subtract(white, below, f"{name}/light"), f"{name}/clipped")
    if preprocessing.round_pixels:
        half = ops.constant(np.array(0.5, np.float32), "image/half")
        x = ops.unary("FLOOR", ops.add(x, half, f"{name}/next"), f"{name}/rounded")
    return x


def _size(x: Tensor) -> Size:
    height, width = x.shape[1:3]
    return static_dim(height), static_dim(width)


_RESIZERS: dict[str, Callable[..., Tensor]] = {"exact": _resize_exact, "builtin": _resize_builtin}
