"""Every tensor of a file into exactly one variable of a model, or nothing at all; and the way back."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_vit import position
from keras_vit.converters import layout, prefix_rows
from keras_vit.converters.containers import Container
from keras_vit.converters.prefix_rows import POSITION
from keras_vit.converters.source import Checkpoint
from keras_vit.converters.table import Source, Table
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig

# What of a model a part of a variable's path belongs to.
_FEATURES = {
    "registers": "registers",
    "distillation": "the distillation token (distilled)",
    "/scale": "LayerScale (layer_scale)",
    "pre_norm/": "the first LayerNorm (pre_norm)",
    "pre_logits/": "pre_logits (representation_size)",
    "root/": "a hybrid's ResNet (resnet)",
    "stage_": "a hybrid's ResNet (resnet)",
    "pool/": "attention pooling (classifier='map')",
    "x_embedding": "2-D positions (position='learned2d')",
    "y_embedding": "2-D positions (position='learned2d')",
    "relative_embedding": "relative positions (position='relative')",
    "position_": "positions at every block (position_place='blocks')",
}


def weights(model: Any) -> dict[str, Any]:
    """The variables of a model that a checkpoint holds, by their path: "block_0/norm1/gamma".

    A path starts with the layer's own name, wherever the model was built.
    """
    named = {}
    for layer in model.layers:
        for variable in layer.weights:
            # Weights lie in the layer's own scope; seeds of dropout are variables but no weights of a checkpoint.
            if not variable.path.endswith("seed_generator_state"):
                start = variable.path.rindex(f"{layer.name}/")
                named[variable.path[start:]] = variable
    return named


def check(checkpoint: Checkpoint, variables: Mapping[str, Any], *, skip: tuple[str, ...] = ()) -> None:
    """Compares what a file holds with what a model wants, by headers only.

    Args:
        checkpoint: the open file.
        variables: the model's weights, by path.
        skip: what the paths of variables start with that the file may hold and that are not wanted.

    Raises:
        CheckpointError: that lists every misfit: missing, left over, wrong shape, each with the nearest name.
    """
    headers, table, match = checkpoint.container.headers, checkpoint.table, checkpoint.match
    misfits = []
    for path, variable in variables.items():
        wanted = _file_shape(path, tuple(variable.shape), checkpoint.config)
        source = match.sources.get(path)
        if source is None and table.is_zero_without_tensor(path):
            continue
        if source is None:
            expected = table.tensor_of(path, checkpoint.config.to_dict())
            name = expected.tensor if expected else path
            misfits.append(f"no tensor for {path} {wanted}, such as {name}{_nearest(name, match.unknown)}")
            continue
        header = headers[source.tensor]
        if not layout.fits(header.shape, source, table.layout, wanted):
            misfits.append(f"{source.tensor} has shape {header.shape}, {path} wants {wanted}")
        elif not header.dtype.startswith(("float", "bfloat")):
            misfits.append(f"{source.tensor} has type {header.dtype}, {path} wants floats")
    unwanted = {path for path in match.sources if path not in variables and not (skip and path.startswith(skip))}
    extra = dict.fromkeys(match.sources[path].tensor for path in match.sources if path in unwanted)
    misfits += [f"{name} is left over" for name in [*extra, *match.unknown]]
    if misfits:
        count = "1 misfit" if len(misfits) == 1 else f"{len(misfits)} misfits"
        shown = "\n  ".join(misfits[:20] + ([f"... and {len(misfits) - 20} more"] if len(misfits) > 20 else []))
        raise CheckpointError(
            f"{checkpoint.container.path} does not fit the model ({count}, nothing was loaded):\n  {shown}"
        )


def assign(checkpoint: Checkpoint, model: Any, variables: Mapping[str, Any], *, allow_nonfinite: bool = False) -> None:
    """Reads every weight and puts it in its place; position embeddings go to the model's grid on the way.

    Raises:
        CheckpointError: where a tensor is damaged or not finite. The model is then half filled: drop it.
    """
    tensors = _Reader(checkpoint.container)
    for path, variable in variables.items():
        source = checkpoint.match.sources.get(path)
        if source is None:  # as `check` has found right
            variable.assign(np.zeros(variable.shape))
            continue
        shape = _file_shape(path, tuple(variable.shape), checkpoint.config)
        value = layout.to_variable(tensors.read(source.tensor), source, checkpoint.table.layout, shape)
        if not allow_nonfinite and not _is_finite(value):
            raise CheckpointError(
                f"{checkpoint.container.path}: {source.tensor} holds values that are not finite; "
                "allow_nonfinite=True reads them"
            )
        if path == POSITION:
            value = position.resize(
                value,
                model.config.grid,
                source_grid=checkpoint.config.grid,
                prefix_tokens=checkpoint.config.position_prefix_tokens,
                method=model.config.position_method,
            )
            if checkpoint.empty_rows:
                value = prefix_rows.without_empty(value, model.config.num_prefix_tokens)
        variable.assign(value)


def collect(variables: Mapping[str, Any], config: ViTConfig, table: Table) -> Iterator[tuple[str, Any]]:
    """The tensors of a file in the table's format, each made when it is written.

    Args:
        variables: of the model, by path.
        config: of the model.
        table: of the format.

    Raises:
        CheckpointError: before the first, naming every variable that the format cannot hold.
    """
    sources = {path: table.tensor_of(path, config.to_dict()) for path in variables}
    written = {source.tensor for source in sources.values() if source}
    homeless = [path for path, source in sources.items() if source is None or source.row.unless in written]
    if homeless:
        what = sorted({feature for path in homeless for part, feature in _FEATURES.items() if part in path})
        raise CheckpointError(
            f"The {table.format} format has no place for {', '.join(what) or 'some variables'}: "
            f"{homeless[:6]} ({len(homeless)} in all)"
        )
    parts: dict[str, list[tuple[Source, str]]] = {}
    for path, source in sources.items():
        if source is not None:
            parts.setdefault(source.tensor, []).append((source, path))
    return ((name, _joined(pieces, variables, table)) for name, pieces in parts.items())


@dataclass(frozen=True)
class Unmade:
    """A float32 tensor that is made when NumPy asks for it: a file is written with one in memory at a time.

    Attributes:
        shape: of the tensor.
        make: makes it.
    """

    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]
    dtype = np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.make()


def _joined(pieces: list[tuple[Source, str]], variables: Mapping[str, Any], table: Table) -> Unmade:
    pieces = sorted(pieces, key=lambda piece: piece[0].row.part[0])
    shapes = [layout.tensor_shape(tuple(variables[path].shape), source.row, table.layout) for source, path in pieces]
    shape = shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def make() -> np.ndarray:
        values = [
            layout.to_tensor(keras.ops.convert_to_numpy(variables[path]).astype(np.float32), source.row, table.layout)
            for source, path in pieces
        ]
        return values[0] if len(values) == 1 else np.concatenate(values)

    return Unmade(shape, make)


class _Reader:
    """Reads tensors, keeping the last: the parts of one tensor (timm's qkv) come one after the other."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.last: tuple[str, np.ndarray | None] = ("", None)

    def read(self, name: str) -> np.ndarray:
        if self.last[0] != name or self.last[1] is None:
            self.last = (name, self.container.read(name))
        return self.last[1]  # type: ignore[return-value]


def _is_finite(value: np.ndarray) -> bool:
    # A sum needs no temporary array; it may overflow where every value is finite, so only its word for yes counts.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(value.sum()) or np.isfinite(value).all())


def _file_shape(path: str, shape: tuple[int, ...], file_config: ViTConfig) -> tuple[int, ...]:
    """The shape of a variable as the file has it: the position embedding belongs to the file's grid."""
    if path != POSITION:
        return shape
    height, width = file_config.grid
    return (1, file_config.position_prefix_tokens + height * width, shape[-1])


def _nearest(path: str, unknown: list[str]) -> str:
    near = difflib.get_close_matches(path, unknown, n=1, cutoff=0.5)
    return f" (the nearest is {near[0]})" if near else ""
