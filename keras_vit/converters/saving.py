"""Write a VisionTransformer as a checkpoint of any format that can hold it."""

import collections
import itertools
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_vit._util.checks import as_path
from keras_vit.converters import assign, config_json, layout
from keras_vit.converters.containers import write_npz, write_safetensors
from keras_vit.converters.infer import Hints, Shapes, infer, read_features, tensor_fields
from keras_vit.converters.table import OWN_PREFIX, Source, Table, fields_of_rows, formats, load_table, lookup
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig
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
# Fields that change no output of the network: how it is trained, and what happens before and after it.
_TRAINING_FIELDS = {"dropout_rate", "attention_dropout_rate", "stochastic_depth", "head_bias_init"}
_USES = {"image_size", "position_method", "preprocessing", "labels", "projection_head"}
# Fields (and their values; None for all) that change only the last digits: such a model is written with a warning.
_NUMERIC_FIELDS = {"activation": ("gelu_tanh", "gelu_erf", "gelu_quick"), "norm_epsilon": None}
_NUMERIC_RESNET_FIELDS = {"norm_epsilon", "conv_epsilon", "conv_epsilon_place"}
# Files do not state whether their head is applied to every token: both readings are valid.
_READ_AS = {"unpooled": "gap", "token_unpooled": "token"}


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
    target, table = Path(as_path(path, "path")), _writable_table(format)
    variables = assign.merge_lora(model, assign.variables_by_path(model))
    config = layout.written_config(model.config, table, variables)
    moved = {}
    if config != model.config:
        arrays = {
            name: assign.as_array(variables[name]) for name in (layout.POSITION, *layout.PREFIX) if name in variables
        }
        moved = layout.move_prefix_rows(arrays, config.position_prefix)
    values = variables | moved
    plan = plan_file(config, {name: tuple(value.shape) for name, value in values.items()}, table)
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
    return _write(target, table, tensors, metadata, plan.json_values)


class WritePlan(NamedTuple):
    """The decisions about writing a model in a format."""

    sources: dict[str, Source]  # path of a variable -> its tensor
    json_values: dict[str, Any] | None  # the object in its config.json; None for a format without one
    inferred_config: ViTConfig  # what a reader infers from the tensors alone
    missing_fields: tuple[str, ...]  # fields that a reader cannot infer from the tensors
    inexact: tuple[str, ...]  # fields that the format cannot state and that change the last digits, as texts


def plan_file(config: ViTConfig, shapes: Shapes, table: Table) -> WritePlan:
    """Decide how a model of a `layout.written_config` is written; raise a CheckpointError if it cannot be.

    The names, shapes and config.json that the file would have are read back, and the configs are compared.
    """
    sources = _check_places(config, shapes, table)
    rows = fields_of_rows(source.row for source in sources.values())
    write = table.json.write if table.json else None
    json_values = write(config) if write else None
    json_fields = table.json.read(json_values) if table.json and json_values else {}
    # A reader is told what only a config.json or the note in the file states.
    asked = {"num_heads", *table.meaning.required, *({"position_prefix", "classifier"} & json_fields.keys())}
    told = {name: getattr(config, name) for name in sorted(asked - set(table.meaning.config))}
    told_size = {**told, "image_size": config.image_size}
    missing = (json_fields.keys() - tensor_fields(shapes).keys()) | told.keys() if table.layout == "torch" else set()
    try:
        inferred = infer(shapes, table, Hints(row_fields=rows, caller_fields=told))
    except CheckpointError:  # no position embedding, or a grid that is not square
        inferred = infer(shapes, table, Hints(row_fields=rows, caller_fields=told_size))
        missing = {*missing, "image_size"}
    unstated = {name: value for name, value in told_size.items() if name not in json_fields}
    read_back = infer(shapes, table, Hints(row_fields=rows, json_fields=json_fields, caller_fields=unstated))
    inexact = _compare(config, read_back, table)
    if table.find_prefix(source.tensor for source in sources.values()) is None:
        raise CheckpointError(
            f"Files in {table.format} format are recognised by {list(table.marks.present)} without any of "
            f"{list(table.marks.absent)}. The model's file would not be"
        )
    return WritePlan(sources, json_values, inferred, tuple(missing), inexact)


def _check_places(config: ViTConfig, shapes: Shapes, table: Table) -> dict[str, Source]:
    """Return the tensor of every variable; raise a CheckpointError that names those the format has no place for."""
    fields = config.to_dict()
    found = {path: table.tensor_of(path, fields) for path in shapes}
    written = {source.tensor for source in found.values() if source}
    sources = {path: source for path, source in found.items() if source and source.row.unless not in written}
    unsupported = [path for path in shapes if path not in sources and not table.meaning.is_zero_without_tensor(path)]
    if unsupported:
        known = read_features()["names"]
        features = sorted({feature for path in unsupported for part, feature in known.items() if part in path})
        raise CheckpointError(
            f"The {table.format} format has no place for {', '.join(features) or 'some variables'}: "
            f"{unsupported[:6]} ({len(unsupported)} in all)"
        )
    parts = collections.Counter(source.tensor for source in sources.values() if source.row.part[1] > 1)
    if partial := [source.tensor for source in sources.values() if parts[source.tensor] % source.row.part[1]]:
        raise CheckpointError(
            f"The {table.format} format has one tensor for several variables, of which some are missing: {partial[0]}"
        )
    return sources


def _compare(config: ViTConfig, read_back: ViTConfig, table: Table) -> tuple[str, ...]:
    """Return the fields that change only other readers' last digits; raise if they would read another model."""
    # A field that only the class of `config` has is not in the file: it is read with its default.
    ours, theirs = config.to_dict(), type(config)(**read_back.to_dict()).to_dict()
    wrong = [
        " with ".join(f"{name}={value!r}" for name, value in fields.items())
        for fields in table.meaning.refused
        if all(lookup(ours, name) == value for name, value in fields.items())
    ]
    inexact: list[str] = []
    for name, value in ours.items():
        read = theirs[name]
        if name in _TRAINING_FIELDS | _USES or _reads_the_same(name, value, read, config):
            continue
        if name == "resnet" and value and read:
            changed = [key for key in value if value[key] != read.get(key)]
            value, read = ({key: fields.get(key) for key in changed} for fields in (value, read))
            is_inexact = _NUMERIC_RESNET_FIELDS.issuperset(changed)
        else:
            values = _NUMERIC_FIELDS.get(name, ())
            is_inexact = values is None or (value in values and read in values)
        (inexact if is_inexact else wrong).append(f"{name}={value!r:.200} (it means {read!r:.200})")
    if wrong:
        raise CheckpointError(f"The {table.format} format cannot express {', '.join(wrong)}")
    return tuple(inexact)


def _reads_the_same(name: str, value: Any, read: Any, config: ViTConfig) -> bool:
    """Return whether the model stays the same if the value `read` replaces the value of a field."""
    if name == "classifier":
        return value == read or _READ_AS.get(value) == read
    if name == "layer_scale":  # only the initial value, which trained weights replace
        return (value is None) == (read is None)
    is_unused = {
        "position_prefix": not config.num_prefix_tokens or config.position != "learned",
        "key_bias": not config.qkv_bias,
        "rotary_grid": config.rotary_theta is None,
        "rotary_interleaved": config.rotary_theta is None,
        "representation_activation": config.representation_size is None,
    }
    return bool(value == read) or is_unused.get(name, False)


def _writable_table(format: str) -> Table:
    """Return the table of a format; raise a CheckpointError if it is only read."""
    table = load_table(format)
    if not table.writable:
        written = [name for name in formats() if load_table(name).writable]
        raise CheckpointError(f"The {table.format} format is only read. Formats that are written: {written}")
    return table


def _write(
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
