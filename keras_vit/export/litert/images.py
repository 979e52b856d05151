"""What the caller of a file gives: prepared images, or pixels that the file prepares as `preprocess` does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.options import Options
from keras_vit.model.config import Preprocessing, ViTConfig

Matrix = npt.NDArray[np.float64]


class Input(NamedTuple):
    """An image in the graph: prepared = tensor * scale, which the first layer's kernel takes over.

    Attributes:
        image: the graph's input, of which the signature speaks: float32, or uint8 pixels of their own size.
        tensor: float32 (batch, height, width, channels) of the model's size, zero where a prepared image is.
        scale: float64 (channels,), or None where the tensor is prepared already.
    """

    image: Tensor
    tensor: Tensor
    scale: Matrix | None = None


def input(ops: Operators, config: ViTConfig, options: Options) -> Input:
    """Adds the file's input, called "image", and what makes it an image of the model's size.

    The first kernel takes the scale over, kernel * scale[channel]. The shift stays in front of it: a hybrid's
    convolution pads prepared images with zeros, and 0..255 would use half of what 8 bits hold (4 dB on the digits).

    Args:
        ops: of the file.
        config: of the model.
        options: checked ones, of which these are read:
            batch: None for an open one.
            dtype: "float32": prepared images; "uint8": pixels from 0 to 255.
            source_size: (height, width) of the pixels; None: they have the model's size and are not resized.
            resize: "exact": as `preprocess`, two products with constant matrices; "builtin": the runtime's bilinear
                with half-pixel centres and no antialias, whatever the model's preprocessing says.
    """
    target = config.size
    size = options.source_size or target
    image = ops.builder.input("image", (options.batch, *size, config.num_channels), options.dtype)
    if options.dtype == "float32":
        return Input(image, image)
    preprocessing = config.preprocessing
    x = image
    if options.source_size is not None:
        x = _RESIZERS[options.resize](ops, x, target, preprocessing)
    std = np.broadcast_to(np.array(preprocessing.std), config.num_channels)
    mean = np.broadcast_to(np.array(preprocessing.mean), config.num_channels)
    shifted = ops.add(_floats(ops, x), ops.constant(-255 * mean, "image/shift"), "image/shifted")
    return Input(image, shifted, scale=1 / (255 * std))


def _floats(ops: Operators, x: Tensor) -> Tensor:
    return x if x.dtype == "float32" else ops.cast(x, "float32", "image/floats")


class Plan(NamedTuple):
    """A resize followed by a cut.

    Attributes:
        sides: (height, width) to resize to.
        corner: (top, left) of what is kept.
    """

    sides: tuple[int, int]
    corner: tuple[int, int]


def plan(source: tuple[int, int], target: tuple[int, int], preprocessing: Preprocessing) -> Plan:
    """How `preprocess` takes an image of one size to another: see its `_squash` and `_crop`, whose float32 this has."""
    if preprocessing.resize == "squash":
        return Plan(target, (0, 0))
    wanted = [math.floor(side / preprocessing.crop_fraction + 1e-6) for side in target]
    ratio = np.max(np.array(wanted, np.float32) / np.array(source, np.float32))
    height, width = (
        max(int(np.round(np.float32(side) * ratio)), least) for side, least in zip(source, target, strict=True)
    )
    return Plan((height, width), ((height - target[0]) // 2, (width - target[1]) // 2))


def _builtin(ops: Operators, x: Tensor, size: tuple[int, int], preprocessing: Preprocessing) -> Tensor:
    sides, corner = plan(_size(x), size, preprocessing)
    x = ops.resize_bilinear(_floats(ops, x), sides, "image/resized")
    for axis, (start, kept) in enumerate(zip(corner, size, strict=True), start=1):
        if x.shape[axis] != kept:
            x = ops.take(x, axis, start, start + kept, f"image/cut_{axis}")
    return x


def _exact(ops: Operators, x: Tensor, size: tuple[int, int], preprocessing: Preprocessing) -> Tensor:
    """The rows' and the columns' matrix times the image, channel by channel.

    Columns first, which then lie side by side. Products of two tensors, not dense layers: nothing quantizes them.
    """
    matrices = []
    sides, corner = plan(_size(x), size, preprocessing)
    for axis, (old, new, start, kept) in enumerate(zip(_size(x), sides, corner, size, strict=True), start=1):
        matrix = resize_matrix(new, old, preprocessing)[start : start + kept]
        used = np.flatnonzero(matrix.any(axis=0))
        first, last = int(used[0]), int(used[-1]) + 1
        if last - first < old:
            x = ops.take(x, axis, first, last, f"image/used_{axis}")
        matrices.append(matrix[None, None, :, first:last])
    rows, columns = (ops.constant(matrix, f"image/matrix_{axis}") for axis, matrix in enumerate(matrices))
    x = ops.transpose(_floats(ops, x), (0, 3, 1, 2), "image/channels_first")
    x = ops.matmul(x, columns, "image/columns", transpose_b=True)
    x = ops.matmul(rows, x, "image/rows")
    return ops.transpose(x, (0, 2, 3, 1), "image/resized")


def _size(x: Tensor) -> tuple[int, int]:
    height, width = x.shape[1:3]
    assert height is not None and width is not None  # only the batch is ever open
    return height, width


_RESIZERS: dict[str, Callable[..., Tensor]] = {"exact": _exact, "builtin": _builtin}


def resize_matrix(new: int, old: int, preprocessing: Preprocessing) -> Matrix:
    """What `tf.image.resize` multiplies one side of an image with.

    Args:
        new: length wanted.
        old: length of the image.
        preprocessing: interpolation and antialias are read; "area" and "nearest" know no antialias.

    Returns:
        float64 (new, old), the sums of whose rows are 1.
    """
    if new == old:
        return np.eye(old)
    method, antialias = preprocessing.interpolation, preprocessing.antialias
    if method in ("area", "nearest"):
        return _area(new, old) if method == "area" else _nearest(new, old)
    if method == "bicubic" and not antialias:
        return _bicubic(new, old)
    kernel, radius = _KERNELS[method]
    return _kernel_matrix(new, old, kernel, radius, widening=max(old / new, 1.0) if antialias else 1.0)


def _kernel_matrix(new: int, old: int, kernel: Callable[[Matrix], Matrix], radius: int, *, widening: float) -> Matrix:
    """TensorFlow's scale_and_translate_op.cc: taps outside of the image are left out, the others made to sum to 1.

    Bilinear without antialias repeats the border instead, which is the same: one of its two taps is always inside.
    """
    distance = np.abs(_centers(new, old)[:, None] - np.arange(old)) / widening
    matrix = np.where(distance < radius, kernel(distance), 0.0)
    return matrix / matrix.sum(axis=1, keepdims=True)


def _scaled(values: npt.NDArray[Any], new: int, old: int) -> Matrix:
    """Places on a side of `new` pixels as places on one of `old`, rounded as TensorFlow does: see `_nearest`."""
    return (values.astype(np.float32) * (np.float32(old) / np.float32(new))).astype(np.float64)


def _centers(new: int, old: int) -> Matrix:
    """Where the centres of `new` pixels lie among `old` ones, whose centres are 0 .. old - 1."""
    return _scaled(np.arange(new) + 0.5, new, old) - 0.5


def _triangle(x: Matrix) -> Matrix:
    return np.maximum(1 - x, 0)


def _cubic(x: Matrix) -> Matrix:
    """Cubic convolution (Keys, 1981, equation 4), a = -0.5."""
    return np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2)


def _lanczos3(x: Matrix) -> Matrix:
    return np.sinc(x) * np.sinc(x / 3)


_KERNELS: dict[str, tuple[Callable[[Matrix], Matrix], int]] = {
    "bilinear": (_triangle, 1),
    "bicubic": (_cubic, 2),
    "lanczos3": (_lanczos3, 3),
}


def _bicubic(new: int, old: int) -> Matrix:
    """TensorFlow's resize_bicubic_op.cc: a = -0.5, places rounded to the 1024th of a pixel, as its table has them."""
    places = _centers(new, old)
    start = np.floor(places)
    fraction = np.rint((places - start) * 1024)[:, None] / 1024
    taps = start[:, None].astype(int) + np.arange(-1, 3)
    weights = _cubic(np.abs(fraction - np.arange(-1, 3)))
    weights[(taps < 0) | (taps >= old)] = 0
    matrix = np.zeros((new, old))
    np.add.at(matrix, (np.arange(new)[:, None], taps.clip(0, old - 1)), weights)
    return matrix / matrix.sum(axis=1, keepdims=True)


def _nearest(new: int, old: int) -> Matrix:
    """Half-pixel centres. Where a centre falls between two pixels the last bit of its float32 decides."""
    return np.eye(old)[np.floor(_centers(new, old) + 0.5).astype(int).clip(0, old - 1)]


def _area(new: int, old: int) -> Matrix:
    """The share that every old pixel has in a new one."""
    edges = _scaled(np.arange(new + 1.0), new, old)
    overlap = np.minimum(edges[1:, None], np.arange(old) + 1) - np.maximum(edges[:-1, None], np.arange(old))
    return np.maximum(overlap, 0) * new / old
