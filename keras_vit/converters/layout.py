"""Convert tensors between a file's layout and that of the Keras variables.

In layout "keras" (flax, .npz) the shapes agree, except for leading ones. In layout "torch" a linear weight is (out, in)
with the heads folded into one axis, a convolution is (out, in, height, width), and biases are flat.
"""

import math
from collections.abc import Collection, Mapping

import numpy as np

from keras_vit.converters.containers import Header
from keras_vit.converters.table import Match, Row, Source, Table
from keras_vit.model.config import ViTConfig

POSITION = "position/embedding"
PATCHES = "embedding/kernel"
PREFIX = ("prefix/cls", "prefix/distillation", "prefix/registers")  # in the order of the tokens

_TORCH_AXES = {4: (2, 3, 1, 0), 2: (1, 0)}  # OIHW -> HWIO, (out, in) -> (in, out)


def variable_shape(shape: tuple[int, ...], source: Source, layout: str) -> tuple[int, ...]:
    """Return the shape of a file's tensor as a variable; in layout "torch" the heads stay folded."""
    row = source.row
    if source.layer is not None:
        shape = shape[1:]
    _, count = row.part
    if count > 1 and shape:
        shape = (shape[0] // count, *shape[1:])
    if row.folds_class_row and len(shape) > 1:
        shape = (*shape[:-2], shape[-2] - 1, shape[-1])
    if layout == "torch" and row.is_kernel:
        shape = tuple(shape[axis] for axis in _TORCH_AXES.get(len(shape), range(len(shape))))
    return shape if row.rank is None else _without_leading_ones(shape)


def variable_shapes(headers: Mapping[str, Header], match: Match, layout: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors as variables, by path."""
    return {path: variable_shape(headers[one.tensor].shape, one, layout) for path, one in match.sources.items()}


def fits(shape: tuple[int, ...], source: Source, layout: str, expected: tuple[int, ...]) -> bool:
    """Return whether a file's tensor of this shape becomes a variable of the expected shape."""
    _, count = source.row.part
    if count > 1 and (not shape or shape[0] % count):
        return False
    if layout == "torch":
        expected = _fold_heads(expected, source.row)
    if source.row.rank is not None:
        expected = _without_leading_ones(expected)
    return variable_shape(shape, source, layout) == expected


def to_variable(tensor: np.ndarray, source: Source, layout: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a file's tensor as a variable of this shape; a view if possible."""
    row = source.row
    if source.layer is not None:
        tensor = tensor[source.layer]
    index, count = row.part
    if count > 1:
        size = tensor.shape[0] // count
        tensor = tensor[index * size : (index + 1) * size]
    if row.folds_class_row:
        tensor = tensor[..., 1:, :]
    if layout == "torch" and row.is_kernel:
        tensor = tensor.transpose(_TORCH_AXES[tensor.ndim])
    return tensor.reshape(shape)


def to_tensor(variable: np.ndarray, row: Row, layout: str) -> np.ndarray:
    """Return a variable as a file's tensor or part of one: the inverse of `to_variable`; a view if possible."""
    if row.folds_class_row:
        variable = np.concatenate([np.zeros_like(variable[..., :1, :]), variable], axis=-2)
    shape = _fold_heads(variable.shape, row) if layout == "torch" else variable.shape
    if row.rank is not None:
        core = _without_leading_ones(shape)
        shape = (1,) * (row.rank - len(core)) + core
    variable = variable.reshape(shape)
    if layout == "torch" and row.is_kernel:
        variable = variable.transpose(np.argsort(_TORCH_AXES[variable.ndim]))
    return variable


def written_config(config: ViTConfig, table: Table, variables: Collection[str]) -> ViTConfig:
    """Return the config of a model with these variables as a format writes it: with position rows for the prefix tokens
    or without.

    Google's and Hugging Face's files have a position row for the class token; big_vision's add it to the token instead.
    Both compute the same, so that every model can be written either way.
    """
    has_rows = table.meaning.implied(variables).get("position_prefix", config.position_prefix)
    # If every block adds positions, adding a row to the token once does not give the same model.
    is_movable = config.num_prefix_tokens and (config.position, config.position_place) == ("learned", "stem")
    return config.replace(position_prefix=has_rows) if is_movable else config


def move_prefix_rows(arrays: Mapping[str, np.ndarray], has_rows: bool) -> dict[str, np.ndarray]:
    """Return the arrays that change if zero position rows are added for the prefix tokens, or their rows removed."""
    table = arrays[POSITION]
    tokens = {path: arrays[path] for path in PREFIX if path in arrays}
    count = sum(token.shape[1] for token in tokens.values())
    if has_rows:
        return {POSITION: np.concatenate([np.zeros_like(table[:, :1]).repeat(count, axis=1), table], axis=1)}
    changed = {POSITION: table[:, count:]}
    start = 0
    for path, token in tokens.items():
        end = start + token.shape[1]
        changed[path] = token + table[:, start:end]  # rounds once
        start = end
    return changed


def _fold_heads(shape: tuple[int, ...], row: Row) -> tuple[int, ...]:
    """Fold the heads: kernels (D, H, d) and (H, d, D) become square matrices, biases (H, d) become vectors."""
    if row.is_kernel and len(shape) == 3:
        side = math.isqrt(math.prod(shape))
        return (side, side)
    return (math.prod(shape),) if row.variable.endswith("/bias") else shape


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape
