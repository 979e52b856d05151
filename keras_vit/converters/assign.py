"""Check and assign the tensors of a file to the variables of a model, and collect them for a file to write."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_vit import position
from keras_vit._util.text import nearest
from keras_vit.converters import layout
from keras_vit.converters.layout import PATCHES, POSITION
from keras_vit.converters.source import Checkpoint
from keras_vit.converters.table import Source, Table
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig


def variables_by_path(model: Any) -> dict[str, Any]:
    """Return the variables of a model that a checkpoint holds, by path in the model: "block_0/norm1/gamma"."""
    variables = {}
    for layer in model.layers:
        for variable in layer.weights:
            # The state of dropout's random numbers is a variable, but not a weight of a checkpoint.
            if not variable.path.endswith("seed_generator_state"):
                start = variable.path.rindex(f"{layer.name}/")
                variables[variable.path[start:]] = variable
    return variables


def merge_lora(model: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return `variables_by_path` with the updates of LoRA (`layer.enable_lora`) added to their kernels."""
    merged = {id(layer._kernel): layer.kernel for layer in model._flatten_layers() if getattr(layer, "lora_enabled", 0)}
    updates = ("/lora_kernel_a", "/lora_kernel_b")
    return {path: merged.get(id(value), value) for path, value in variables.items() if not path.endswith(updates)}


def as_array(variable: Any) -> np.ndarray:
    """Return a variable, or an array, as float32."""
    return keras.ops.convert_to_numpy(variable).astype(np.float32)


def is_finite(value: np.ndarray) -> bool:
    """Return whether every number is finite."""
    # A sum needs no temporary array. It may overflow although every value is finite; then each value is checked.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(value.sum()) or np.isfinite(value).all())


def check(checkpoint: Checkpoint, variables: Mapping[str, Any], *, skip: tuple[str, ...] = ()) -> None:
    """Raise a CheckpointError with every tensor that is missing, left over (unless in `skip`) or of another shape."""
    match = checkpoint.match
    problems = [text for path, variable in variables.items() if (text := _problem(checkpoint, path, variable))]
    unused = dict.fromkeys(
        source.tensor
        for path, source in match.sources.items()
        if path not in variables
        and 0 not in checkpoint.container.headers[source.tensor].shape  # no registers
        and not (skip and path.startswith(skip))
    )
    problems += [f"{name} is left over" for name in [*unused, *match.unknown]]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        listed = "\n  ".join(problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else []))
        raise CheckpointError(
            f"{checkpoint.container.path} does not fit the model ({count}, nothing was loaded):\n  {listed}"
        )


def _problem(checkpoint: Checkpoint, path: str, variable: Any) -> str | None:
    """Return why a variable cannot be read from a file; None if it can."""
    table, match = checkpoint.table, checkpoint.match
    shape = _shape_in_file(path, tuple(variable.shape), checkpoint.config)
    source = match.sources.get(path)
    if source is None:
        if table.meaning.is_zero_without_tensor(path):
            return None
        expected = table.tensor_of(path, checkpoint.config.to_dict())
        tensor = expected.tensor if expected else path
        similar = nearest(tensor, match.unknown, cutoff=0.5)
        hint = f" (the nearest is {similar[0]})" if similar else ""
        return f"no tensor for {path} {shape}, such as {tensor}{hint}"
    header = checkpoint.container.headers[source.tensor]
    if not layout.fits(header.shape, source, table.layout, shape):
        return f"{source.tensor} has shape {header.shape}, {path} expects {shape}"
    if not header.dtype.startswith(("float", "bfloat")):
        return f"{source.tensor} has type {header.dtype}, {path} expects floats"
    return None


def assign(checkpoint: Checkpoint, model: Any, variables: Mapping[str, Any], *, allow_nonfinite: bool = False) -> None:
    """Read every variable of a model from a file, at the model's sizes; after an error the model must not be used."""
    # The parts of a tensor (timm's qkv) are assigned one after the other: read it once.
    read = functools.lru_cache(maxsize=1)(checkpoint.container.read)
    positions = checkpoint.match.sources.get(POSITION)
    for path, variable in variables.items():
        source = checkpoint.match.sources.get(path)
        if source is None:  # zero without a tensor, as `check` found
            variable.assign(np.zeros(variable.shape))
            continue
        shape = _shape_in_file(path, tuple(variable.shape), checkpoint.config)
        value = layout.to_variable(read(source.tensor), source, checkpoint.table.layout, shape)
        if path == layout.PREFIX[0] and positions is not None and positions.row.folds_class_row:
            value = value + checkpoint.container.read(positions.tensor).reshape(-1, shape[-1])[:1]
        if not allow_nonfinite and not is_finite(value):
            raise CheckpointError(
                f"{checkpoint.container.path}: {source.tensor} holds values that are not finite; "
                "allow_nonfinite=True reads them"
            )
        variable.assign(_resized(path, value, checkpoint, model.config))


def _resized(path: str, value: np.ndarray, checkpoint: Checkpoint, config: ViTConfig) -> np.ndarray:
    """Return a file's value for a variable at the model's sizes; the position embedding without added zero rows."""
    if path == PATCHES:
        return position.resize_patches(value, config.patch, method=config.position_method)
    if path != POSITION:
        return value
    value = position.resize(
        value,
        config.grid,
        source_grid=checkpoint.config.grid,
        prefix_tokens=checkpoint.config.position_prefix_tokens,
        method=config.position_method,
    )
    if not checkpoint.has_zero_rows:
        return value
    count = config.num_prefix_tokens
    if np.any(value[:, :count]):
        raise CheckpointError(f"notes that the first {count} rows of its position embedding are zero, and they are not")
    return value[:, count:]


def collect(
    variables: Mapping[str, Any], sources: Mapping[str, Source], table: Table
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, float32 value) for every tensor of a file, one in memory at a time."""
    parts: dict[str, list[tuple[Source, Any]]] = {}
    for path, source in sources.items():
        parts.setdefault(source.tensor, []).append((source, variables[path]))
    for name, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0].row.part[0])
        values = [layout.to_tensor(as_array(variable), source.row, table.layout) for source, variable in pieces]
        yield name, values[0] if len(values) == 1 else np.concatenate(values)
        del values


def _shape_in_file(path: str, shape: tuple[int, ...], file_config: ViTConfig) -> tuple[int, ...]:
    """Return the shape of a variable in the file, which may have another grid and another patch size."""
    if path == PATCHES:
        return (*file_config.patch, *shape[2:])
    if path != POSITION:
        return shape
    height, width = file_config.grid
    return (1, file_config.position_prefix_tokens + height * width, shape[-1])
