"""Decide which formats can hold a model, and where other readers of the file compute slightly different logits."""

import collections
import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from keras_vit.converters import config_json
from keras_vit.converters.infer import Hints, Shapes, infer, read_features, tensor_fields
from keras_vit.converters.layout import written_config
from keras_vit.converters.table import Source, Table, fields_of_rows, formats, load_table, lookup
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig

# Fields that no file holds: how the model is trained, and what happens before and after it.
_TRAINING_FIELDS = {"dropout_rate", "attention_dropout_rate", "stochastic_depth", "head_bias_init"}
_USES = {"image_size", "position_method", "preprocessing", "labels", "projection_head"}
_NOT_IN_FILES = _TRAINING_FIELDS | _USES | {"num_heads"}
# Fields (and their values; None for all) that change only the last digits: such a model is written with a warning.
_NUMERIC_FIELDS = {"activation": ("gelu_tanh", "gelu_erf", "gelu_quick"), "norm_epsilon": None, "resnet": None}
# Files do not state whether their head is applied to every token: both readings are valid.
_READ_AS = {"unpooled": "gap", "token_unpooled": "token"}


class WritePlan(NamedTuple):
    """The decisions about writing a model in a format."""

    sources: dict[str, Source]  # path of a variable -> its tensor
    json_values: dict[str, Any] | None  # the object in its config.json; None for a format without one
    inferred_config: ViTConfig  # what a reader infers from the tensors alone
    missing_fields: tuple[str, ...]  # fields that a reader cannot infer from the tensors
    inexact: tuple[str, ...]  # fields that the format cannot state and that change the last digits, as texts


def formats_of(config: ViTConfig) -> dict[str, bool]:
    """Return the formats that can hold a model, and whether other readers compute the same logits in all digits."""
    sample = config.replace(num_layers=min(config.num_layers, 1))  # all blocks have the same variables
    result = {}
    for table in map(load_table, formats()):
        if table.writable:
            written = written_config(sample, table, weight_shapes(sample))
            with contextlib.suppress(CheckpointError):
                result[table.format] = not plan(written, weight_shapes(written), table).inexact
    return result


def weight_shapes(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a model by path, without building it."""
    from keras_vit.model.symbolic import variable_shapes

    return {path: shape for path, shape in variable_shapes(config).items() if "seed_generator" not in path}


def plan(config: ViTConfig, shapes: Shapes, table: Table) -> WritePlan:
    """Decide how a model of a `layout.written_config` is written; raise a CheckpointError if it cannot be."""
    sources = _check_places(config, shapes, table)
    inferred_config, missing_fields = _infer_from_tensors(config, shapes, sources, table)
    json_values = None if table.json is None else config_json.to_json(config, table.json)
    json_fields = {} if json_values is None or table.json is None else config_json.to_fields(json_values, table.json)
    from_rows = fields_of_rows(source.row for source in sources.values())
    inexact = _check_expressible(config, inferred_config, {**from_rows, **json_fields}, table)
    if table.find_prefix(source.tensor for source in sources.values()) is None:
        raise CheckpointError(
            f"Files in {table.format} format are recognised by {list(table.marks.present)} without any of "
            f"{list(table.marks.absent)}. The model's file would not be"
        )
    return WritePlan(sources, json_values, inferred_config, missing_fields, inexact)


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


def _infer_from_tensors(
    config: ViTConfig, shapes: Shapes, sources: Mapping[str, Source], table: Table
) -> tuple[ViTConfig, tuple[str, ...]]:
    """Return the config that a reader infers without a config.json, and the fields that it cannot infer."""
    from_rows = fields_of_rows(source.row for source in sources.values())
    json_fields = set() if table.json is None else table.json.stated_fields
    needed = json_fields & {"position_prefix", "classifier"} | {"num_heads", *table.meaning.required}
    stated = {name: getattr(config, name) for name in sorted(needed - set(table.meaning.config))}
    # These are noted in the file too, so that it can be read without its config.json or beside another one.
    missing_fields = (json_fields - set(tensor_fields(shapes))) | set(stated) if table.layout == "torch" else set()
    try:
        return infer(shapes, table, Hints(row_fields=from_rows, caller_fields=stated)), tuple(missing_fields)
    except CheckpointError:  # no position embedding, or a grid that is not square
        hints = Hints(row_fields=from_rows, caller_fields={**stated, "image_size": config.image_size})
        return infer(shapes, table, hints), (*missing_fields, "image_size")


def _check_expressible(
    config: ViTConfig, inferred: ViTConfig, read_fields: Mapping[str, Any], table: Table
) -> tuple[str, ...]:
    """Return the fields that change only other readers' last digits; raise if they would read another model."""
    stated = set() if table.json is None else table.json.stated_fields
    from_tensors = {"resnet", *(name for fields in table.meaning.without.values() for name in fields)}
    ours, theirs = config.to_dict(), inferred.to_dict()
    refused = [
        fields for fields in table.meaning.refused if all(lookup(ours, name) == value for name, value in fields.items())
    ]
    wrong = [" with ".join(f"{name}={value!r:.200}" for name, value in fields.items()) for fields in refused]
    inexact: list[str] = []
    for name, value in ours.items():
        implied = theirs[name] if name in from_tensors else table.meaning.config.get(name, theirs[name])
        read = read_fields.get(name, implied)
        if name in _NOT_IN_FILES | stated or _reads_the_same(name, value, read, config):
            continue
        values = _NUMERIC_FIELDS.get(name, ())
        is_inexact = name in _NUMERIC_FIELDS and (values is None or {value, read} <= set(values))
        is_inexact &= name != "resnet" or value.get("groups") == read.get("groups")
        (inexact if is_inexact else wrong).append(f"{name}={value!r:.200} (it means {read!r:.200})")
    if wrong:
        raise CheckpointError(f"The {table.format} format cannot express " + ", ".join(wrong))
    return tuple(inexact)


def _reads_the_same(name: str, value: Any, read: Any, config: ViTConfig) -> bool:
    """Return whether the model stays the same if the value `read` replaces the value of a field."""
    if name == "classifier":
        return _READ_AS.get(value, value) == read
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
