"""Write a VisionTransformer as a checkpoint of any format that can hold it."""

import collections
import itertools
import json
import os
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_vit._util.checks import as_path
from keras_vit._util.files import check_results, record_results, replacing
from keras_vit._util.text import warn
from keras_vit.converters import config_json
from keras_vit.converters.containers import ITEM_BYTES, TYPE_CODES, Header, quoted
from keras_vit.converters.facts import NOTE_KEY, KnownFields, asked_for
from keras_vit.converters.loading import as_array, load, variables_by_path
from keras_vit.converters.source import (
    ZERO_ROWS_KEY,
    Shapes,
    infer,
    read_features,
    tensor_fields,
)
from keras_vit.converters.table import (
    OWN_PREFIX,
    POSITION,
    PREFIX,
    Row,
    Source,
    Table,
    fields_of_rows,
    fold_heads,
    formats,
    load_table,
    lookup,
    without_leading_ones,
)
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer

_ALIGNMENT = 8  # of the tensors in a .safetensors file
_METADATA = "__metadata__"
_MAX_LENGTH = 60_000  # a zip comment holds 65,535 bytes; longer lists of labels are left out
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
        FileExistsError: there is a file of this name that keras_vit has not written, or that was changed since.
        TypeError: `model` is not a VisionTransformer.

    Example:

    >>> keras_vit.converters.save(keras_vit.zoo.load("digits"), "digits.npz", format="google").name
    'digits.npz'
    """
    if not isinstance(model, VisionTransformer):
        raise TypeError(f"save writes a keras_vit.VisionTransformer. Received: {type(model).__name__}")
    target, table = Path(as_path(path, "path")), _writable_table(format)
    variables = merge_lora(model, variables_by_path(model))
    config = written_config(model.config, table, variables)
    moved = {}
    if config != model.config:
        arrays = {name: as_array(variables[name]) for name in (POSITION, *PREFIX) if name in variables}
        moved = move_prefix_rows(arrays, config.position_prefix)
    values = variables | moved
    plan = plan_file(config, {name: tuple(value.shape) for name, value in values.items()}, table)
    if plan.inexact:
        warn(
            f"keras_vit: {table.format} files do not say {', '.join(plan.inexact)}. keras_vit notes it in the file and "
            "reads it back; other readers' logits will differ in the fourth digit or so."
        )
    nonzero = [name for name in values if name not in plan.sources and np.any(as_array(values[name]))]
    if nonzero:
        raise CheckpointError(f"The {table.format} format has no place for {nonzero}, unless they are zero")
    unused = ((name, np.zeros((1, config.hidden_size), "f4")) for name in table.unused_tensors(config.to_dict()))
    tensors: Iterable[tuple[str, Any]] = itertools.chain(collect(values, plan.sources, table), unused)
    if table.layout == "keras":  # the torch formats' own readers refuse unknown tensors
        config = model.config
        own = ((OWN_PREFIX + name, as_array(variables[name])) for name in moved)
        tensors = itertools.chain(tensors, own)
    metadata = to_metadata(config, plan.inferred_config, plan.missing_fields)
    if config.position_prefix and not model.config.position_prefix:
        metadata[ZERO_ROWS_KEY] = "true"
    return _write_files(target, table, tensors, metadata, plan.json_values)


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: str,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    patch_size: int | tuple[int, int] | None = None,
    config: ViTConfig | Mapping[str, Any] | None = None,
    source_format: str | None = None,
) -> Path:
    """Convert a checkpoint to another format, image size, patch size or number of classes: `load` and `save` in one.

    Args:
        source: the checkpoint to read, a file or a folder.
        path: the file to write, or a folder, as for `save`.
        format: the format to write, one of `formats()` or a path to a .toml table of your own.
        image_size: wanted, int or (height, width) in pixels; None is the file's.
        num_classes: wanted; if it differs from the file's, the head is new and zero; 0 means no head.
        patch_size: wanted, int or (height, width) in pixels; None is the file's.
        config: facts about the source that it cannot state itself, as for `load`.
        source_format: format of the source; None recognises it.

    Returns:
        The path of the file that was written.

    Raises:
        CheckpointError: the source is damaged, malicious or not a Vision Transformer, or the format cannot express it.
        FileNotFoundError: there is no such file.
        ValueError: an argument is wrong.

    Example:

    >>> path = keras_vit.converters.save(keras_vit.zoo.load("digits"), "digits.npz", format="google")
    >>> keras_vit.converters.convert(path, "digits", format="huggingface").name
    'model.safetensors'
    """
    check_target(Path(as_path(path, "path")), format, source)
    wanted: dict[str, Any] = {"image_size": image_size, "num_classes": num_classes, "patch_size": patch_size}
    model = load(source, config=config, format=source_format, **wanted)
    return save(model, path, format=format)


def merge_lora(model: Any, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Add the updates of LoRA (`layer.enable_lora`) to the kernels of `variables_by_path`."""
    merged = {id(layer._kernel): layer.kernel for layer in model._flatten_layers() if getattr(layer, "lora_enabled", 0)}
    updates = ("/lora_kernel_a", "/lora_kernel_b")
    return {path: merged.get(id(value), value) for path, value in variables.items() if not path.endswith(updates)}


def written_config(config: ViTConfig, table: Table, variables: Collection[str]) -> ViTConfig:
    """Adapt a model's config to a format, which writes position rows for the prefix tokens
    or does not.

    Google's and Hugging Face's files have a position row for the class token; big_vision's add it to the token instead.
    Both compute the same, so that every model can be written either way.
    """
    has_rows = table.implied(variables).get("position_prefix", config.position_prefix)
    # If every block adds positions, adding a row to the token once does not give the same model.
    is_movable = config.num_prefix_tokens and (config.position, config.position_place) == ("learned", "stem")
    return config.replace(position_prefix=has_rows) if is_movable else config


def move_prefix_rows(arrays: Mapping[str, np.ndarray], has_rows: bool) -> dict[str, np.ndarray]:
    """Add zero position rows for the prefix tokens, or remove their rows; only the changed arrays are returned."""
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


class WritePlan(NamedTuple):
    """The decisions about writing a model in a format."""

    sources: dict[str, Source]  # path of a variable -> its tensor
    json_values: dict[str, Any] | None  # the object in its config.json; None for a format without one
    inferred_config: ViTConfig  # what a reader infers from the tensors alone
    missing_fields: tuple[str, ...]  # fields that a reader cannot infer from the tensors
    inexact: tuple[str, ...]  # fields that the format cannot state and that change the last digits, as texts


def plan_file(config: ViTConfig, shapes: Shapes, table: Table) -> WritePlan:
    """Decide how a model of a `written_config` is written; raise a CheckpointError if it cannot be.

    The names, shapes and config.json that the file would have are read back, and the configs are compared.
    """
    sources = _check_places(config, shapes, table)
    rows = fields_of_rows(source.row for source in sources.values())
    write = table.json.write if table.json else None
    json_values = write(config) if write else None
    json_fields = table.json.read(json_values) if table.json and json_values else {}
    # A reader is told what only a config.json or the note in the file states.
    asked = {"num_heads", "preprocessing", *asked_for(table, {}, is_described=True)}
    asked |= {"position_prefix", "classifier"} & json_fields.keys()
    told = {name: getattr(config, name) for name in sorted(asked - set(table.config))}
    told_size = {**told, "image_size": config.image_size}
    missing = (json_fields.keys() - tensor_fields(shapes).keys()) | told.keys() if table.layout == "torch" else set()
    try:
        inferred = infer(shapes, table, KnownFields(row_fields=rows, recorded_fields=told))
    except CheckpointError:  # no position embedding, or a grid that is not square
        inferred = infer(shapes, table, KnownFields(row_fields=rows, recorded_fields=told_size))
    missing = {*missing, "image_size", "preprocessing"}  # files of other programs do not say them
    unstated = {name: value for name, value in told_size.items() if name not in json_fields}
    read_back = infer(shapes, table, KnownFields(row_fields=rows, json_fields=json_fields, caller_fields=unstated))
    inexact = _compare(config, read_back, table)
    _check_read_back(config, shapes, sources, table)
    return WritePlan(sources, json_values, inferred, tuple(missing), inexact)


def _check_places(config: ViTConfig, shapes: Shapes, table: Table) -> dict[str, Source]:
    """Find the tensor of every variable; raise a CheckpointError that names those the format has no place for."""
    fields = config.to_dict()
    found = {path: table.tensor_of(path, fields) for path in shapes}
    written = {source.tensor for source in found.values() if source}
    sources = {path: source for path, source in found.items() if source and source.row.unless not in written}
    unsupported = [path for path in shapes if path not in sources and not table.is_zero_without_tensor(path)]
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


def _check_read_back(config: ViTConfig, shapes: Shapes, sources: Mapping[str, Source], table: Table) -> None:
    """Raise a CheckpointError unless the table finds every variable again in the names and shapes of the file."""
    # Views of one zero: only the shapes are used.
    zeros = {path: np.broadcast_to(np.float32(0), shapes[path]) for path in sources}
    written = {name: tensor.shape for name, tensor in collect(zeros, sources, table)}
    written |= dict.fromkeys(table.unused_tensors(config.to_dict()), (1, config.hidden_size))
    headers = {name: Header(name, shape, "float32") for name, shape in written.items()}
    places = table.find_places(written)
    if not places:
        absent = f" and none of {list(table.detect_absent)}" if table.detect_absent else ""
        raise CheckpointError(
            f"Files of {table.format} have {list(table.detect)}{absent}: one of this model would not be recognised"
        )
    read = table.match(headers, places[0])
    wrong = [
        f"{source.tensor!r} for {path}"
        for path, source in sources.items()
        if path not in read.sources or read.sources[path].tensor != source.tensor
    ]
    if wrong := wrong or [repr(name) for name in (*read.unknown, *read.other_parts)]:
        raise CheckpointError(
            f"The table {table.format} would not read what it writes: {', '.join(wrong[:3])} ({len(wrong)} in all). "
            "Its [tensors] need the names as they are after `prefixes` and [spelled], and `write_prefix` is one of "
            "`prefixes`"
        )


def _compare(config: ViTConfig, read_back: ViTConfig, table: Table) -> tuple[str, ...]:
    """List fields that change only other readers' last digits; raise if they would read another model."""
    # A field that only the class of `config` has is not in the file: it is read with its default.
    ours, theirs = config.to_dict(), type(config)(**read_back.to_dict()).to_dict()
    wrong = [
        " with ".join(f"{name}={value!r}" for name, value in fields.items())
        for fields in table.refused
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
    """Check that the model stays the same if the value `read` replaces the value of a field."""
    if name == "classifier":
        return value == read or _READ_AS.get(value) == read
    if name == "layer_scale":  # only the initial value, which trained weights replace
        return (value is None) == (read is None)
    is_unused = {
        "position_prefix": not config.num_prefix_tokens or config.position != "learned",
        "key_bias": not config.qkv_bias,
        **dict.fromkeys(
            ("rotary_grid", "rotary_interleaved", "rotary_offset", "rotary_axes"), config.rotary_theta is None
        ),
        "pool_heads": not config.has_map_head or (value or config.num_heads) == (read or config.num_heads),
        "pool_mlp_dim": not config.has_map_head,
        "pool_prefix": not config.has_map_head or not config.num_prefix_tokens,
        "representation_activation": config.representation_size is None,
    }
    return bool(value == read) or is_unused.get(name, False)


def _writable_table(format: str) -> Table:
    """Load the table of a format; raise a CheckpointError if it is only read."""
    table = load_table(format)
    if not table.writable:
        written = [name for name in formats() if load_table(name).writable]
        raise CheckpointError(f"The {table.format} format is only read. Formats that are written: {written}")
    return table


def target_file(path: Path, table: Table, *, has_json: bool) -> Path:
    """Find the file of tensors: the path, or in a folder of a format with a config.json the usual name."""
    return path / f"model.{table.container}" if has_json and (path.is_dir() or not path.suffix) else path


def check_target(path: Path, format: str, source: str | os.PathLike[str] | None) -> None:
    """Raise a FileExistsError if a file that `save` writes would replace one of the source's, or a foreign one."""
    table = load_table(format)
    file = target_file(path, table, has_json=table.json is not None)
    names = [] if table.json is None else [table.json.file, *table.json.beside.values()]
    beside = [file.parent / name for name in names if (file.parent / name).exists()]
    if file.parent.is_dir():
        check_results([file, *beside], inputs=[] if source is None else [source])


def _write_files(
    path: Path,
    table: Table,
    tensors: Iterable[tuple[str, Any]],
    metadata: dict[str, str],
    json_values: Mapping[str, Any] | None,
) -> Path:
    """Write the file of tensors, and the config.json beside it if the format has one."""
    path = target_file(path, table, has_json=json_values is not None)
    if json_values is not None and not path.parent.exists():
        path.parent.mkdir(parents=True)
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
    check_results([path])
    if table.container == "npz":
        write_npz(path, tensors, metadata=metadata)
    else:
        write_safetensors(path, tensors, metadata={"format": "pt", **metadata})
    record_results(path)
    if json_values is not None and table.json is not None:
        config_json.save(path, json_values, table.json)
    return path


def to_metadata(config: ViTConfig, inferred_config: ViTConfig, missing_fields: Collection[str] = ()) -> dict[str, str]:
    """Write the note: fields that differ from the config that a reader infers, and those it cannot infer."""
    ours, theirs = config.to_dict(), inferred_config.to_dict()
    fields = {name: value for name, value in ours.items() if value != theirs[name] or name in missing_fields}
    text = json.dumps(fields)
    if len(text) > _MAX_LENGTH:
        text = json.dumps({name: value for name, value in fields.items() if name != "labels"})
    return {NOTE_KEY: text} if fields else {}


# ---- tensors and files


def collect(
    variables: Mapping[str, Any], sources: Mapping[str, Source], table: Table
) -> Iterator[tuple[str, np.ndarray]]:
    """Iterate over the tensors of a file as (name, float32 value), one in memory at a time."""
    parts: dict[str, list[tuple[Source, Any]]] = {}
    for path, source in sources.items():
        parts.setdefault(source.tensor, []).append((source, variables[path]))
    for name, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0].row.part[0])
        values = [to_tensor(as_array(variable), source.row, table.layout) for source, variable in pieces]
        yield name, values[0] if len(values) == 1 else np.concatenate(values)
        del values


def to_tensor(variable: np.ndarray, row: Row, layout: str) -> np.ndarray:
    """Convert a variable to a file's tensor or part of one, the inverse of `to_variable`; a view if possible."""
    if row.folds_class_row:
        variable = np.concatenate([np.zeros_like(variable[..., :1, :]), variable], axis=-2)
    shape = fold_heads(variable.shape, row) if layout == "torch" else variable.shape
    if row.rank is not None:
        core = without_leading_ones(shape)
        shape = (1,) * (row.rank - len(core)) + core
    variable = variable.reshape(shape)
    if layout == "torch" and row.is_kernel:
        variable = variable.transpose(np.argsort(row.torch_axes(variable.ndim)))
    return variable


def write_npz(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write an uncompressed .npz as `numpy.savez` does; the same tensors always give the same bytes.

    Args:
        path: the file to write; it appears complete or not at all.
        tensors: arrays by name, or pairs of both; from an iterator, only one is in memory at a time.
            bfloat16 arrays (ml_dtypes) are written as NumPy does, as two opaque bytes per element.
        metadata: texts for the archive's comment, which NumPy ignores; less than 64 KiB.
    """
    with replacing(Path(path)) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in _checked_pairs(tensors):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:  # dated 1980-01-01, as numpy.savez does
                raw = array.view("V2") if array.dtype.name == "bfloat16" else array
                np.lib.format.write_array(stream, raw, allow_pickle=False)
            del array, raw  # before the next one is made
        if metadata:
            archive.comment = json.dumps(dict(metadata)).encode()
    return Path(path)


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, metadata: Mapping[str, str]
) -> Path:
    """Write a .safetensors file, which appears complete or not at all; the same tensors always give the same bytes.

    The library's own writer orders several texts of metadata by chance, and replaces a file while it is read.

    Args:
        path: the file to write.
        tensors: arrays by name, or pairs of both.
        metadata: texts beside the tensors, such as {"format": "pt"}; may be empty.
    """
    codes = {name: code for code, name in TYPE_CODES.items()}
    arrays = sorted(_checked_pairs(tensors), key=lambda pair: (-pair[1].itemsize, pair[0]))  # so that all are aligned
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, array in arrays:
        if name == _METADATA:
            raise ValueError(f"A .safetensors file has texts, and no tensor, under the name {_METADATA!r}.")
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": codes[array.dtype.name], "shape": array.shape, "data_offsets": (begin, end)}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(Path(path)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in arrays:
            is_swapped = array.dtype.byteorder == ">"
            little = array.astype(array.dtype.newbyteorder("<")) if is_swapped else np.ascontiguousarray(array)
            file.write(little.reshape(-1).view(np.uint8).data)
    return Path(path)


def _checked_pairs(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Iterator[tuple[str, np.ndarray]]:
    """Check the tensors of a file to write, one in memory at a time; raise a ValueError for a wrong name or type."""
    names: set[str] = set()
    for name, value in tensors.items() if isinstance(tensors, Mapping) else tensors:
        array = np.asarray(value)
        if name in names:
            raise ValueError(f"Two tensors are named {quoted(name)}.")
        if array.dtype.name not in ITEM_BYTES:
            raise ValueError(f"Tensor {quoted(name)} is {array.dtype}. Types written: {', '.join(ITEM_BYTES)}.")
        names.add(name)
        yield name, array
        del array, value
