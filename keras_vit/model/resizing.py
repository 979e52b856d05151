"""Resize and crop images in NumPy as `preprocess` does in TensorFlow: a plan, a matrix for each side, products."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_vit import position
from keras_vit.model.config import Preprocessing

Matrix = npt.NDArray[np.float64]
Size = tuple[int, int]  # height, width

PILLOW_ONE = 2**22  # Pillow's weights are whole numbers of this fraction
MAX_ASPECT = 64  # longer side / shorter side: a crop uses only the middle of a longer image
ROWS = 16  # of a matrix that are multiplied at a time: they use the pixels near them alone
MAX_PRODUCTS = 1 << 18  # in one call: above it OpenBLAS starts threads, which wait for each other on a busy machine


def resize_arrays(images: np.ndarray, target: Size, preprocessing: Preprocessing) -> np.ndarray:
    """Resize and crop images (batch, height, width, channels) of 0..255 as `preprocess` does: float32, 0..255.

    Equal to TensorFlow for `Preprocessing.matches_pillow`, and for bilinear without antialias. Other sums are float64,
    rounded where TensorFlow rounds each step to float32.
    """
    source = images.shape[1], images.shape[2]
    if preprocessing.resize == "crop":
        shown = [min(side, MAX_ASPECT * min(source)) for side in source]
        top, left = ((side - kept) // 2 for side, kept in zip(source, shown, strict=True))
        images = images[:, top : top + shown[0], left : left + shown[1]]
        source = shown[0], shown[1]
    size, corner = resize_plan(source, target, preprocessing)
    is_stepwise = preprocessing.overshoots or preprocessing.round_pixels  # clipped or rounded after each direction
    is_linear = preprocessing.interpolation == "bilinear" and not preprocessing.antialias
    if preprocessing.matches_pillow:
        axes = (0, 1) if is_height_first(source, size) else (1, 0)
    else:
        axes = (1, 0) if is_stepwise or is_linear else (0, 1)  # as TensorFlow
    for axis in axes:
        kept = corner[axis], corner[axis] + target[axis]
        if size[axis] == source[axis]:
            images = images[:, slice(*kept)] if axis == 0 else images[:, :, slice(*kept)]
            continue
        if is_linear:
            # To the bit as resize_bilinear_op.cc (TensorFlow), which computes in float32.
            places = _centers(size[axis], source[axis])[slice(*kept)].astype(np.float32)
            first = np.floor(places).astype(int)
            images = interpolate(images, axis + 1, first.clip(0), np.where(first < 0, 0, places - first))
        else:
            images = _multiply(images, _products(size[axis], source[axis], kept, preprocessing), axis, preprocessing)
        if is_stepwise:
            images = images.clip(0, 255)
        if preprocessing.round_pixels:
            images = images.round().astype(np.uint8)
    return images.astype(np.float32)


@functools.lru_cache(maxsize=64)
def _products(
    new: int, old: int, kept: tuple[int, int], preprocessing: Preprocessing
) -> list[tuple[slice, slice | np.ndarray, Matrix]]:
    """Divide the kept rows of a `resize_matrix`: some rows, the pixels that they use, and the factors of those."""
    matrix = resize_matrix(new, old, preprocessing)[slice(*kept)]
    products = []
    for start in range(0, len(matrix), ROWS):
        rows = matrix[start : start + ROWS]
        used = np.flatnonzero(rows.any(axis=0))
        is_range = len(used) == used[-1] - used[0] + 1
        pixels = slice(int(used[0]), int(used[-1]) + 1) if is_range else used
        products.append((slice(start, start + len(rows)), pixels, rows[:, used]))
    return products


def _multiply(
    images: np.ndarray,
    products: list[tuple[slice, slice | np.ndarray, Matrix]],
    axis: int,
    preprocessing: Preprocessing,
) -> np.ndarray:
    """Multiply the height (0) or the width (1) of images by a matrix, in small parts: float32, or bytes.

    The sums are float64, so that they are exact where the preprocessing `matches_pillow`, whose halves are rounded up.
    Buffers are used again: fresh memory takes longer than what is computed in it.
    """
    source = _swapped(images, axis)
    source = source.reshape(len(source), -1)
    length = products[-1][0].stop
    result = np.empty((length, source.shape[1]), np.uint8 if preprocessing.matches_pillow else np.float32)
    most = max(rows.shape[1] for *_, rows in products)
    step = max(1, MAX_PRODUCTS // (ROWS * most))
    for start in range(0, source.shape[1], step):
        part = source[:, start : start + step]
        pixels, product = np.empty((most, part.shape[1])), np.empty((ROWS, part.shape[1]))
        for places, used, rows in products:
            factors, sums = pixels[: rows.shape[1]], product[: len(rows)]
            factors[:] = part[used]
            np.matmul(rows, factors, out=sums)
            if preprocessing.matches_pillow:
                sums += 0.5
                np.floor(sums, out=sums).clip(0, 255, out=sums)
            result[places, start : start + step] = sums
    others = [side for place, side in enumerate(images.shape) if place != axis + 1]
    return _swapped(result.reshape(length, *others), axis, back=True)


def _swapped(images: np.ndarray, axis: int, *, back: bool = False) -> np.ndarray:
    """Move the height (0) or the width (1) to the front, or back: the values of a pixel are copied at once."""
    pixels = np.ascontiguousarray(images)
    whole = pixels.view(f"V{pixels.itemsize * pixels.shape[-1]}")[..., 0]
    moved = np.moveaxis(whole, 0, axis + 1) if back else np.moveaxis(whole, axis + 1, 0)
    moved = np.ascontiguousarray(moved)[..., None]
    return moved.view(images.dtype).reshape(*moved.shape[:-1], images.shape[-1])


def size_before_crop(image_size: tuple[int, int], preprocessing: Preprocessing) -> tuple[int, int]:
    """Size (height, width) of which `crop_fraction` is kept."""
    # Rounded down as in timm (224 / 0.9 is 248); 1e-6 corrects floats, so that 384 / (384 / 448) is 448.
    height, width = (math.floor(side / preprocessing.crop_fraction + 1e-6) for side in image_size)
    return height, width


def resize_plan(source: Size, target: Size, preprocessing: Preprocessing) -> tuple[Size, Size]:
    """Plan a resize and crop as `preprocess`: (height, width) to resize to, (top, left) of the part that stays."""
    size = size_before_crop(target, preprocessing)
    if preprocessing.resize == "crop":
        ratios = np.array(size, np.float32) / np.array(source, np.float32)  # float32, as in TensorFlow
        if preprocessing.crop_rounding == "nearest":
            scaled = [int(np.round(np.float32(side) * np.max(ratios))) for side in source]
        else:
            axis = int(np.argmax(ratios))
            scaled = [side * size[axis] // source[axis] for side in source]
        size = max(scaled[0], target[0]), max(scaled[1], target[1])
    margins = [old - new for old, new in zip(size, target, strict=True)]
    is_even = preprocessing.crop_rounding == "half_even"
    top, left = (round(margin / 2) if is_even else margin // 2 for margin in margins)
    return size, (top, left)


def is_height_first(source: Any, size: Any) -> Any:
    """Whether Pillow 13 resizes, rounds and clips the height before the width, unlike earlier versions."""
    removed_rows, removed_columns = source[0] - size[0], source[1] - size[1]
    return (removed_rows > 0) & (removed_rows > 2 * removed_columns)


def _lanczos3(distance: Any, *, xp: Any = np) -> Any:
    """Sinc kernel of three lobes."""
    return xp.where(xp.abs(distance) < 3, xp.sinc(distance) * xp.sinc(distance / 3), 0.0)


# Interpolation of images -> kernel, and the distance at which it ends.
_KERNELS: dict[str, tuple[Callable[..., Any], int]] = {
    "bilinear": (position.triangle, 1),
    "bicubic": (functools.partial(position.cubic, a=-0.5), 2),
    "lanczos3": (_lanczos3, 3),
}


def pillow_weights(
    new: Any,
    old: Any,
    interpolation: str,
    *,
    xp: Any = np,
    arange: Callable[..., Any] = np.arange,
    cast: Callable[..., Any] = np.asarray,
) -> tuple[Any, Any]:
    """Compute the first of the `old` pixels for each of `new` ones, and the weights of the pixels from there on.

    The weights are float64 (pixels, new), and `PILLOW_ONE` is 1. Who rounds them, half to even, has Pillow's, with
    which sums of bytes are exact. In a graph `xp`, `arange` and `cast` are TensorFlow's.
    """
    kernel, reach = _KERNELS[interpolation]
    scale = cast(old, "float64") / cast(new, "float64")
    widening = xp.maximum(scale, 1.0)
    centers = (arange(new, dtype="float64") + 0.5) * scale
    start = cast(xp.maximum(cast(centers - reach * widening + 0.5, "int32"), 0), "int32")
    end = cast(xp.minimum(cast(centers + reach * widening + 0.5, "int32"), old), "int32")
    pixels = start + arange(xp.max(end - start))[:, None]
    weights = kernel((cast(pixels, "float64") + 0.5 - centers) / widening, xp=xp)
    weights = xp.where(pixels < end, weights, 0.0)
    return start, weights / xp.sum(weights, axis=0) * PILLOW_ONE


def resize_matrix(new: int, old: int, preprocessing: Preprocessing) -> Matrix:
    """Matrix, float64 (new, old), by which `preprocess` multiplies one side; its rows sum to 1."""
    if new == old:
        return np.eye(old)
    if preprocessing.matches_pillow:
        start, weights = pillow_weights(new, old, preprocessing.interpolation)
        matrix = np.zeros((new, old + len(weights)))
        for tap, weight in enumerate(weights):
            matrix[np.arange(new), start + tap] = np.rint(weight) / PILLOW_ONE
        return matrix[:, :old]
    method, antialias = preprocessing.interpolation, preprocessing.antialias
    if method in ("area", "nearest"):
        return _area(new, old) if method == "area" else _nearest(new, old)
    if method == "bicubic" and not antialias:
        return _bicubic(new, old)
    kernel = _KERNELS[method][0]
    if method == "bilinear" and not antialias:  # as resize_bilinear_op.cc (TensorFlow), which repeats the border
        return position.kernel_matrix(_centers(new, old), old, kernel, widening=1.0)
    # As scale_and_translate_op.cc (TensorFlow), which computes places in float32.
    scale = np.float32(1) / (np.float32(new) / np.float32(old))
    widening = max(float(scale), 1.0) if antialias else 1.0
    centers = ((np.arange(new) + 0.5).astype(np.float32) * scale).astype(np.float64) - 0.5
    return position.kernel_matrix(centers, old, kernel, widening=widening)


def _rescale(values: npt.NDArray[Any], new: int, old: int) -> Matrix:
    """Map positions on a side of `new` pixels to a side of `old`, in float32 as TensorFlow does: see `_nearest`."""
    return (values.astype(np.float32) * (np.float32(old) / np.float32(new))).astype(np.float64)


def _centers(new: int, old: int) -> Matrix:
    """Positions of the centres of `new` pixels among `old` ones, whose centres are 0 .. old - 1."""
    return _rescale(np.arange(new) + 0.5, new, old) - 0.5


def _bicubic(new: int, old: int) -> Matrix:
    """Matrix of resize_bicubic_op.cc (TensorFlow): a = -0.5, positions rounded to 1/1024 of a pixel."""
    positions = _centers(new, old)
    start = np.floor(positions)
    fraction = np.rint((positions - start) * 1024)[:, None] / 1024
    pixels = start[:, None].astype(int) + np.arange(-1, 3)
    weights = position.cubic(fraction - np.arange(-1, 3), a=-0.5)
    weights[(pixels < 0) | (pixels >= old)] = 0
    matrix = np.zeros((new, old))
    np.add.at(matrix, (np.arange(new)[:, None], pixels.clip(0, old - 1)), weights)
    return matrix / matrix.sum(axis=1, keepdims=True)


def _nearest(new: int, old: int) -> Matrix:
    """Half-pixel centres. Where a centre falls between two pixels, the last bit of its float32 decides."""
    return np.eye(old)[np.floor(_centers(new, old) + 0.5).astype(int).clip(0, old - 1)]


def _area(new: int, old: int) -> Matrix:
    edges = _rescale(np.arange(new + 1.0), new, old)
    overlap = np.minimum(edges[1:, None], np.arange(old) + 1) - np.maximum(edges[:-1, None], np.arange(old))
    return np.maximum(overlap, 0) * new / old


def neighbours(new: int, old: int, *, align_corners: bool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Find the lower neighbour of each of `new` cells among `old` ones (its index), and the higher one's share.

    Source: area_pixel_compute_source_index of ATen/native/UpSample.h (PyTorch).
    """
    if align_corners:
        places = np.arange(new) * ((old - 1) / (new - 1) if new > 1 else 0.0)
    else:
        places = np.maximum((np.arange(new) + 0.5) * old / new - 0.5, 0)
    first = np.minimum(places.astype(np.int32), old - 1)
    return first, np.minimum(places - first, 1)


def resize_axis(x: np.ndarray, axis: int, new: int, *, align_corners: bool = False) -> np.ndarray:
    """Resize one axis of an array bilinearly, as `maps.ResizeBilinear` does."""
    return interpolate(x, axis, *neighbours(new, x.shape[axis], align_corners=align_corners))


def interpolate(x: np.ndarray, axis: int, first: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Interpolate between the cells `first` and those that follow them along an axis: float32."""
    weights = share.astype(np.float32).reshape(-1, *(1,) * (x.ndim - 1 - axis))
    places = first, np.minimum(first + 1, x.shape[axis] - 1)
    low, high = (np.take(x, place, axis).astype(np.float32, copy=False) for place in places)
    mixed: np.ndarray = low + (high - low) * weights
    return mixed
