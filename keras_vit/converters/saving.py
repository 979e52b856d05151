"""Write a VisionTransformer as a checkpoint of any format that can hold it."""

import itertools
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit._util.checks import as_path
from keras_vit.converters import assign, config_json, expressible, layout
from keras_vit.converters.containers import write_npz, write_safetensors
from keras_vit.converters.table import OWN_PREFIX, Table, formats, load_table
from keras_vit.errors import CheckpointError
from keras_vit.model.vision_transformer import VisionTransformer

_CONTAINERS = {".npz": "npz", ".safetensors": "safetensors"}  # by suffix
# Of other kinds of files.
_OTHER_SUFFIXES = (
    ".bin",
    ".ckpt",
    ".gguf",
    ".h5",
    ".hdf5",
    ".json",
    ".keras",
    ".msgpack",
    ".npy",
    ".onnx",
    ".pb",
    ".pickle",
    ".pkl",
    ".pt",
    ".pth",
    ".tflite",
    ".zip",
)


def save(model: VisionTransformer, path: str | os.PathLike[str], *, format: str) -> Path:
    """Write a model as a checkpoint of a format. The file appears complete or not at all.

    Args:
        model: a VisionTransformer; its weights are written as float32, with LoRA's updates added.
        path: the file; for a format with a config.json, it may be a folder (a name without suffix) for both files.
        format: one of `formats()` or a path to a .toml table of your own.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: the format cannot express the model, or its files have another suffix than `path`; the message
            says why, and nothing is written.
        TypeError: `model` is not a VisionTransformer.

    Example:

    >>> keras_vit.converters.save(keras_vit.zoo.load("digits"), "digits.npz", format="google").name
    'digits.npz'
    """
    if not isinstance(model, VisionTransformer):
        raise TypeError(f"save writes a keras_vit.VisionTransformer. Received: {type(model).__name__}")
    target, table = Path(as_path(path, "path")), writable_table(format)
    variables = assign.merge_lora(model, assign.variables_by_path(model))
    config = layout.written_config(model.config, table, variables)
    moved = {}
    if config != model.config:
        arrays = {
            name: assign.as_array(variables[name]) for name in (layout.POSITION, *layout.PREFIX) if name in variables
        }
        moved = layout.move_prefix_rows(arrays, config.position_prefix)
    values = variables | moved
    plan = expressible.plan(config, {name: tuple(value.shape) for name, value in values.items()}, table)
    if plan.inexact:
        warnings.warn(
            f"keras_vit: {table.format} files do not say {', '.join(plan.inexact)}. keras_vit notes it in the file and "
            "reads it back; other readers' logits will differ in the fourth digit or so.",
            stacklevel=2,
        )
    nonzero = [name for name in values if name not in plan.sources and np.any(assign.as_array(values[name]))]
    if nonzero:
        raise CheckpointError(f"The {table.format} format has no place for {nonzero}, unless they are zero")
    tensors: Iterable[tuple[str, Any]] = assign.collect(values, plan.sources, table)
    if table.layout == "keras":  # the torch formats' own readers refuse unknown tensors
        config = model.config
        own = ((OWN_PREFIX + name, assign.as_array(variables[name])) for name in moved)
        tensors = itertools.chain(tensors, own)
    metadata = config_json.to_metadata(config, plan.inferred_config, plan.missing_fields)
    if config.position_prefix and not model.config.position_prefix:
        metadata[config_json.ZERO_ROWS_KEY] = "true"
    return write(target, table, tensors, metadata, plan.json_values)


def writable_table(format: str, tower: str = "") -> Table:
    """Return the table of a format; raise a CheckpointError if it is only read."""
    table = load_table(format, tower)
    if not table.writable:
        written = [name for name in formats(tower) if load_table(name, tower).writable]
        raise CheckpointError(f"The {table.format} format is only read. Formats that are written: {written}")
    return table


def write(
    path: Path,
    table: Table,
    tensors: Iterable[tuple[str, Any]],
    metadata: dict[str, str],
    json_values: Mapping[str, Any] | None,
) -> Path:
    """Write the file of tensors, and the config.json beside it if the format has one."""
    if json_values is not None and (path.is_dir() or not path.suffix):
        path.mkdir(parents=True, exist_ok=True)
        path = path / f"model.{table.container}"
    if path.is_dir() or not path.parent.is_dir():
        raise CheckpointError(f"A {table.format} file is written into a folder that exists. Received: {str(path)!r}")
    suffix = path.suffix.casefold()
    if suffix in _OTHER_SUFFIXES or _CONTAINERS.get(suffix, table.container) != table.container:
        raise CheckpointError(
            f"{table.format} files are .{table.container} files, and other readers go by the name: save as "
            f"{path.with_suffix('.' + table.container).name!r}. Received: {path.name!r}"
        )
    if json_values is not None and table.json is not None:
        config_json.check_overwrite(path, json_values, table.json)
    if table.container == "npz":
        write_npz(path, tensors, metadata=metadata)
    else:
        write_safetensors(path, tensors, metadata={"format": "pt", **metadata})
    if json_values is not None and table.json is not None:
        config_json.save(path, json_values, table.json)
    return path
