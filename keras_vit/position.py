"""Resize position embeddings and patch kernels, and compute fixed sin-cos embeddings.

Each family of checkpoints interpolates in its own way, and the differences are visible in the logits.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["METHODS", "resize", "resize_patches", "sincos2d"]

Grid: TypeAlias = int | Sequence[int]
Matrix: TypeAlias = npt.NDArray[np.float64]


def resize(
    embedding: npt.ArrayLike,
    grid: Grid,
    *,
    source_grid: Grid | None = None,
    prefix_tokens: int = 1,
    method: str = "official",
) -> np.ndarray:
    """Interpolate a position embedding to another grid of patches.

    The arithmetic is float64, rounded once to the dtype of the input. NaN and infinity are accepted and propagate.

    Args:
        embedding: floats, (1, prefix_tokens + height * width, hidden_size) or the same without the 1. The patches are
            in row-major order.
        grid: the new (height, width) in patches; one number means a square.
        source_grid: (height, width) of `embedding` in patches, or its side; None means a square.
        prefix_tokens: number of rows in front that belong to no patch (class token, registers). They are not changed.
        method: one of `METHODS`.

            * `"official"`: linear, with end points aligned, as `scipy.ndimage.zoom(order=1)` in google-research's
              `vit_jax/checkpoint.py` and big_vision's `models/vit.py`. A side of one takes the first value. For some
              sizes (28 to 48, which is B/8 from 224 to 384 pixels) SciPy rounds past the edge and sets the last row and
              column to zero; the official code and this function do so too.
            * `"bilinear"`: half-pixel centres, no antialias (`tf.image.resize`, PyTorch's `interpolate`).
            * `"bilinear-antialias"`: the same with antialias (`jax.image.resize`, in the model of FlexiViT).
            * `"bicubic"`: half-pixel centres, a = -0.75, no antialias (Hugging Face ViT).
            * `"bicubic-offset"`: the same for a grid that is 0.1 patches larger (Meta's DINOv2 without registers).
            * `"bicubic-antialias"`: half-pixel centres, a = -0.5, with antialias (timm's `resample_abs_pos_embed`).

    Returns:
        A new array of the same rank and dtype with height * width patches after the prefix. For an equal grid it is an
        exact copy of `embedding`. A grid of the same area with other sides is interpolated.

    Raises:
        TypeError: the embedding contains integers, booleans, complex numbers or text.
        ValueError: a shape, grid, number of prefix tokens or method does not fit.

    Example:
        >>> embedding = np.zeros((1, 1 + 14 * 14, 768), np.float32)  # ViT-B/16 at 224 pixels
        >>> keras_vit.position.resize(embedding, (24, 24)).shape  # at 384 pixels
        (1, 577, 768)
    """
    table = _floats(embedding, "A position embedding", method)
    old = _source_grid(table.shape, source_grid, prefix_tokens)
    new = _sides(grid, "grid")
    if new == old:
        return table.copy()
    hidden = table.shape[-1]
    prefix, patches = np.split(table.reshape(-1, hidden), [prefix_tokens])
    rows, columns = (_MATRICES[method](*sizes) for sizes in zip(new, old, strict=True))
    source = patches.astype(np.float64).reshape(*old, hidden)
    resized = np.einsum("hi,wj,ijd->hwd", rows, columns, source, optimize=True).reshape(-1, hidden)
    return np.concatenate([prefix, resized.astype(table.dtype)]).reshape(*table.shape[:-2], -1, hidden)


def resize_patches(kernel: npt.ArrayLike, patch_size: Grid, *, method: str = "official") -> np.ndarray:
    """Resize the kernel of a patch embedding, so that patches of another size give nearly the same tokens.

    The result is the least-squares solution of FlexiViT (arXiv 2212.08013, section 3.4): with B the matrix that resizes
    a patch, it is pinv(B)' times the kernel. Source: `resample_patchemb` in big_vision's `models/proj/flexi/vit.py`.

    Args:
        kernel: floats, (height, width, channels, hidden_size).
        patch_size: the new (height, width) in pixels; one number means a square.
        method: the method of the model's positions, one of `METHODS`. Patches are resized with
            `"bicubic-antialias"` as in timm's `resample_patch_embed`, else bilinearly without antialias as in FlexiViT.

    Returns:
        A new array of the same dtype. For an equal patch size it is an exact copy of `kernel`.

    Raises:
        TypeError: the kernel contains integers, booleans, complex numbers or text.
        ValueError: a shape, the patch size or the method does not fit.

    Example:
        >>> keras_vit.position.resize_patches(np.zeros((32, 32, 3, 768), np.float32), 12).shape
        (12, 12, 3, 768)
    """
    weights = _floats(kernel, "A patch kernel", method)
    new = _sides(patch_size, "patch_size")
    if weights.ndim != 4:
        raise ValueError(f"A patch kernel has shape (height, width, channels, hidden). Received: {weights.shape}")
    if new == weights.shape[:2]:
        return weights.copy()
    matrix = _MATRICES[method if method == "bicubic-antialias" else "bilinear"]
    # The matrix of both axes is the Kronecker product of these two, and so is its pseudo-inverse.
    rows, columns = (np.linalg.pinv(matrix(*sizes)) for sizes in zip(new, weights.shape[:2], strict=True))
    source = np.ascontiguousarray(weights, np.float64)  # the bits of the result do not depend on the order in memory
    resized = np.einsum("ih,jw,ijcd->hwcd", rows, columns, source, optimize=True)
    return resized.astype(weights.dtype)


def bias_rows(grid: Grid, prefix_tokens: int) -> int:
    """Count the rows of a table of relative biases: the offsets of patches, and three of tokens in front."""
    height, width = _sides(grid, "grid")
    return (2 * height - 1) * (2 * width - 1) + (3 if prefix_tokens else 0)


def resize_bias(table: np.ndarray, grid: Grid, source_grid: Grid, *, method: str) -> np.ndarray:
    """Interpolate a table of relative biases, float (rows, heads), to another grid; its last rows may be of tokens.

    With "bicubic-antialias", timm's method, offsets lie further apart the larger they are, so that those of neighbours
    keep their meaning, and values between them are linear: `resize_rel_pos_bias_table` in timm/layers/pos_embed_rel.py,
    after BEiT. Otherwise bilinear with half-pixel centres, as transformers' `BeitRelativePositionBias`.
    """
    values = _floats(table, "A table of relative biases", method)
    new, old = _sides(grid, "grid"), _sides(source_grid, "source_grid")
    if new == old:
        return values.copy()
    sides, old_sides = ([2 * side - 1 for side in both] for both in (new, old))
    offsets, others = np.split(values, [math.prod(old_sides)])
    matrix = _geometric if method == "bicubic-antialias" else _bilinear
    rows, columns = (matrix(*pair) for pair in zip(sides, old_sides, strict=True))
    source = offsets.astype(np.float64).reshape(*old_sides, -1)
    resized = np.einsum("hi,wj,ijd->hwd", rows, columns, source, optimize=True).reshape(-1, values.shape[-1])
    return np.concatenate([resized.astype(values.dtype), others])


def _geometric(new: int, old: int) -> Matrix:
    """Matrix of `resize_bias`: the old offsets lie at 0, 1, 1 + q, 1 + q + q**2 and so on, the largest at the new one.

    q is between 1.01 and 1.5, also for equal sides, and values beyond the largest offset are its own.
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        low, high = (low, ratio) if (1 - ratio ** (old // 2)) / (1 - ratio) > new // 2 else (ratio, high)
    side = np.cumsum(ratio ** np.arange(old // 2))
    known = np.concatenate([-side[::-1], [0], side])
    wanted = (np.arange(new) - new // 2).clip(known[0], known[-1])
    first = np.clip(np.searchsorted(known, wanted, side="right") - 1, 0, old - 2)
    share = (wanted - known[first]) / (known[first + 1] - known[first])
    matrix = np.zeros((new, old))
    matrix[np.arange(new), first], matrix[np.arange(new), first + 1] = 1 - share, share
    return matrix


def sincos2d(
    grid: Grid, hidden_size: int, *, temperature: float = 10_000.0, dtype: npt.DTypeLike = np.float32
) -> npt.NDArray[np.floating]:
    """Compute the fixed position embedding of big_vision, `posemb_sincos_2d` in its `models/vit.py`.

    Args:
        grid: (height, width) in patches; one number means a square.
        hidden_size: width of a token, a multiple of 4 and at least 8.
        temperature: ratio of the highest to the lowest angular frequency; the highest is one radian for each patch.
        dtype: dtype of the result; the angles are computed in float64.

    Returns:
        Array (1, height * width, hidden_size) with values in [-1, 1], patches in row-major order. The quarters of the
        last axis are sin x, cos x, sin y and cos y, where x counts columns and y rows from 0.

    Raises:
        ValueError: a side of the grid is not an integer >= 1, or `hidden_size` does not fit.

    Example:
        >>> keras_vit.position.sincos2d((2, 3), 8).shape
        (1, 6, 8)
    """
    height, width = _sides(grid, "grid")
    if hidden_size % 4 or hidden_size < 8:
        raise ValueError(f"sincos2d needs a hidden_size that is a multiple of 4, 8 or more. Received: {hidden_size}")
    omega = temperature ** -np.linspace(0.0, 1.0, hidden_size // 4)
    y, x = (axis.reshape(-1, 1) * omega for axis in np.mgrid[:height, :width])
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(dtype)[None]


def _floats(values: npt.ArrayLike, name: str, method: str) -> np.ndarray:
    """Convert values to an array; check their dtype and the method that will resize them."""
    array = np.asarray(values)
    if not isinstance(method, str) or method not in _MATRICES:
        raise ValueError(
            f"Unknown interpolation method. Expected one of {', '.join(METHODS)}. Received: {method!r:.200}"
        )
    if array.dtype.kind in "iubcOSU":
        raise TypeError(f"{name} must contain floating-point numbers. Received dtype: {array.dtype}")
    return array


def _sides(grid: Grid, name: str) -> tuple[int, int]:
    try:
        height, width = (int(side) for side in np.broadcast_to(np.asarray(grid), 2) if operator.index(side) > 0)
    except (TypeError, ValueError):
        height = width = 0
    if min(height, width) < 1:
        raise ValueError(f"{name} must be an integer or (height, width) in patches, 1 or more. Received: {grid!r:.200}")
    return height, width


def _source_grid(shape: tuple[int, ...], source_grid: Grid | None, prefix_tokens: int) -> tuple[int, int]:
    if not hasattr(prefix_tokens, "__index__") or prefix_tokens < 0:
        raise ValueError(f"prefix_tokens must be an integer >= 0. Received: {prefix_tokens}")
    if not (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)):
        raise ValueError(f"A position embedding has shape (1, tokens, hidden) or (tokens, hidden). Received: {shape}")
    tokens = shape[-2]
    patches = tokens - prefix_tokens
    side = math.isqrt(max(patches, 0))
    expected = (side, side) if source_grid is None else _sides(source_grid, "source_grid")
    if patches < 1 or math.prod(expected) != patches:
        wanted = "a square; pass source_grid=(height, width)" if source_grid is None else f"{source_grid=}"
        raise ValueError(f"{tokens} tokens less {prefix_tokens=} do not fill {wanted}. Received: shape {shape}")
    return expected


def _official(new: int, old: int) -> Matrix:
    positions = np.arange(new, dtype=np.float64) * ((old - 1) / max(new - 1, 1))
    matrix = _linear(positions, old)
    matrix[positions > old - 1] = 0.0  # as in SciPy, where rounding moved the last point past the end
    return matrix


def _bilinear(new: int, old: int) -> Matrix:
    return _linear(_half_pixel(new, old), old)


def _bicubic(new: int, old: int, *, offset: float = 0.0) -> Matrix:
    positions = _half_pixel(new, old, offset=offset)[:, None]
    neighbours = np.floor(positions).astype(int) + np.arange(-1, 3)
    matrix = np.zeros((new, old))
    # Neighbours beyond the border are clipped to it, so a column may occur several times: add.at adds the weights.
    columns = neighbours.clip(0, old - 1)
    np.add.at(matrix, (np.arange(new)[:, None], columns), cubic(positions - neighbours, a=-0.75))
    return matrix


def _antialiased(new: int, old: int, kernel: Callable[[Matrix], Matrix]) -> Matrix:
    """Matrix of a kernel that widens when the grid shrinks."""
    return kernel_matrix(_half_pixel(new, old), old, kernel, widening=max(old / new, 1.0))


def axis_matrix(new: int, old: int, *, method: str) -> Matrix:
    """Matrix, float64 (new, old), by which `resize` multiplies one axis of a grid."""
    return _MATRICES[method](new, old)


def kernel_matrix(positions: Matrix, old: int, kernel: Callable[[Matrix], Matrix], *, widening: float) -> Matrix:
    """Matrix that interpolates `old` values at positions with a kernel of the distance, made wider."""
    matrix = kernel((positions[:, None] - np.arange(old)) / widening)
    # Values beyond the border do not exist: the remaining weights are scaled to sum to one.
    return matrix / matrix.sum(axis=1, keepdims=True)


def _half_pixel(new: int, old: int, *, offset: float = 0.0) -> Matrix:
    """Positions of the centres of `new` patches among `old` ones, whose centres are 0 .. old - 1.

    `offset` is added to the number of new patches where it gives the scale (dinov2/models/vision_transformer.py).
    """
    return (np.arange(new, dtype=np.float64) + 0.5) * old / (new + offset) - 0.5


def _linear(positions: Matrix, old: int) -> Matrix:
    return triangle(positions.clip(0, old - 1)[:, None] - np.arange(old))


# Kernels: `xp` is the module that computes, NumPy or TensorFlow's.


def triangle(distance: Any, *, xp: Any = np) -> Any:
    """Linear interpolation kernel."""
    return xp.maximum(1.0 - xp.abs(distance), 0.0)


def cubic(distance: Any, *, a: float, xp: Any = np) -> Any:
    """Cubic convolution kernel (Keys, 1981, equation 4) with its free parameter `a`."""
    x = xp.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return xp.select([x <= 1, x < 2], [near, far])


# Method -> function (new side, old side) -> matrix that interpolates one axis. All methods are separable.
_MATRICES: dict[str, Callable[[int, int], Matrix]] = {
    "official": _official,
    "bilinear": _bilinear,
    "bilinear-antialias": functools.partial(_antialiased, kernel=triangle),
    "bicubic": _bicubic,
    "bicubic-offset": functools.partial(_bicubic, offset=0.1),
    "bicubic-antialias": functools.partial(_antialiased, kernel=functools.partial(cubic, a=-0.5)),
}
METHODS = tuple(_MATRICES)


def __dir__() -> list[str]:
    return __all__
