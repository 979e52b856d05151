"""How a tensor lies in a file and in a Keras variable, both ways: "keras" (flax, .npz) and "torch".

In "keras" the shapes agree, but for ones in front. In "torch" a linear weight is (out, in) with the heads folded into
one axis, a convolution (out, in, height, width), and biases are flat.
"""

from __future__ import annotations

import math

import numpy as np

from keras_vit.converters.table import Row, Source

_TORCH_AXES = {4: (2, 3, 1, 0), 2: (1, 0)}  # OIHW -> HWIO, (out, in) -> (in, out)


def variable_shape(shape: tuple[int, ...], source: Source, layout: str) -> tuple[int, ...]:
    """The shape a tensor of the file has as a variable, as far as the file can tell: torch keeps the heads folded."""
    row = source.row
    if source.layer is not None:
        shape = shape[1:]
    _, count = row.part
    if count > 1 and shape:
        shape = (shape[0] // count, *shape[1:])
    if row.rank is not None:
        shape = _without_ones(shape)
    if layout == "torch" and row.is_kernel:
        shape = tuple(shape[axis] for axis in _TORCH_AXES.get(len(shape), range(len(shape))))
    return shape


def fits(shape: tuple[int, ...], source: Source, layout: str, wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of the file's shape becomes a variable of the wanted shape."""
    _, count = source.row.part
    if count > 1 and (not shape or shape[0] % count):
        return False
    if layout == "torch":
        wanted = _folded(wanted, source.row)
    return variable_shape(shape, source, layout) == (wanted if source.row.rank is None else _without_ones(wanted))


def to_variable(tensor: np.ndarray, source: Source, layout: str, wanted: tuple[int, ...]) -> np.ndarray:
    """The tensor of a file in the shape of its variable; without a copy where the memory allows."""
    row = source.row
    if source.layer is not None:
        tensor = tensor[source.layer]
    which, count = row.part
    if count > 1:
        size = tensor.shape[0] // count
        tensor = tensor[which * size : (which + 1) * size]
    if layout == "torch" and row.is_kernel:
        tensor = tensor.transpose(_TORCH_AXES[tensor.ndim])
    return tensor.reshape(wanted)


def tensor_shape(shape: tuple[int, ...], row: Row, layout: str) -> tuple[int, ...]:
    """The shape that `to_tensor` gives a variable."""
    if layout == "torch":
        shape = _folded(shape, row)
        if row.is_kernel:
            shape = tuple(shape[axis] for axis in np.argsort(_TORCH_AXES[len(shape)]))
    if row.rank is None:
        return shape
    core = _without_ones(shape)
    return (1,) * (row.rank - len(core)) + core


def to_tensor(variable: np.ndarray, row: Row, layout: str) -> np.ndarray:
    """The inverse: a variable as the file holds it (its own part of the tensor)."""
    if layout == "torch":
        variable = variable.reshape(_folded(variable.shape, row))
        if row.is_kernel:
            variable = variable.transpose(np.argsort(_TORCH_AXES[variable.ndim]))
    if row.rank is not None:
        core = _without_ones(variable.shape)
        variable = variable.reshape((1,) * (row.rank - len(core)) + core)
    return np.ascontiguousarray(variable)


def _folded(shape: tuple[int, ...], row: Row) -> tuple[int, ...]:
    """A shape with its heads folded: (D, H, d) and (H, d, D) kernels are square matrices, (H, d) biases vectors."""
    if row.is_kernel and len(shape) == 3:
        side = math.isqrt(math.prod(shape))
        return (side, side)
    return (math.prod(shape),) if row.is_bias else shape


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape
