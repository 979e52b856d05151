"""Decide which formats can hold a model, and where other readers of the file compute slightly different logits."""

import collections
import contextlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from keras_vit._util import data_files
from keras_vit.converters import config_json
from keras_vit.converters.infer import Hints, Shapes, infer, tensor_fields
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
_PROJECTIONS = ("query", "key", "value")


class WritePlan(NamedTuple):
    """The decisions about writing a model in a format."""

    sources: dict[str, Source]  # path of a variable -> its tensor
    json_values: dict[str, Any] | None  # the object in its config.json; None for a format without one
    inferred_config: ViTConfig  # what a reader infers from the tensors alone
    missing_fields: tuple[str, ...]  # fields that a reader cannot infer from the tensors
    inexact: tuple[str, ...]  # fields that the format cannot state and that change the last digits, as texts


def formats_of(config: ViTConfig) -> dict[str, bool]:
    """Return the formats that can hold a model, and whether their other readers compute the same logits.

    If not (another GELU or epsilon), `converters.save` warns: the logits differ from about the fourth digit on.
    """
    result = {}
    for table in map(load_table, formats()):
        if table.writable:
            written = written_config(config, table, _typical_shapes(config))
            with contextlib.suppress(CheckpointError):
                result[table.format] = not plan(written, _typical_shapes(written), table).inexact
    return result


def plan(config: ViTConfig, shapes: Shapes, table: Table) -> WritePlan:
    """Decide how a model is written in a format; raise a CheckpointError that names all that the format cannot express.

    `config` is the result of `layout.written_config`; `shapes` are those of the variables by path.
    """
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
        known = data_files.read_toml(data_files.folder("converters") / "features.toml")
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
    """Return the fields that change only other readers' last digits; raise if they would read another model.

    `read_fields` follow from the presence of tensors or from the config.json.
    """
    stated = set() if table.json is None else table.json.stated_fields
    from_tensors = {"resnet", *(name for fields in table.meaning.without.values() for name in fields)}
    ours, theirs = config.to_dict(), inferred.to_dict()
    refused = [
        fields for fields in table.meaning.refused if all(lookup(ours, name) == value for name, value in fields.items())
    ]
    wrong = [" with ".join(f"{name}={value!r}" for name, value in fields.items()) for fields in refused]
    inexact: list[str] = []
    for name, value in ours.items():
        implied = theirs[name] if name in from_tensors else table.meaning.config.get(name, theirs[name])
        read = read_fields.get(name, implied)
        if name in _NOT_IN_FILES | stated or _reads_the_same(name, value, read, config):
            continue
        values = _NUMERIC_FIELDS.get(name, ())
        is_inexact = name in _NUMERIC_FIELDS and (values is None or {value, read} <= set(values))
        (inexact if is_inexact else wrong).append(f"{name}={value!r} (it means {read!r})")
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


def _has_bias(projection: str, config: ViTConfig) -> bool:
    return config.qkv_bias and (projection != "key" or config.key_bias)


def _typical_shapes(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one variable for each option of a config, without building the model."""
    width, heads, features = config.hidden_size, config.num_heads, config.feature_size
    resnet = config.resnet
    stages = enumerate(zip(resnet.num_layers, resnet.widths, strict=True), start=1) if resnet else ()
    projections = _PROJECTIONS if config.has_attention else ()
    channels = resnet.channels if resnet else config.num_channels
    place = {"stem": "position", "blocks": "position_0", "shared": "position"}[config.position_place]
    position = {"learned": "embedding", "learned2d": "x_embedding", "relative": "relative_embedding"}
    rows = config.position_prefix_tokens + math.prod(config.grid)
    shapes = {
        "root/conv/kernel": (7, 7, config.num_channels, resnet.width) if resnet else None,
        **{f"stage_{s}_unit_{u + 1}/conv1/kernel": (1, 1, 1, w) for s, (n, w) in stages for u in range(n)},
        "stage_1_unit_1/gn1/gamma": (1,) if resnet and resnet.num_layers else None,
        "resnet_norm/gamma": (width,) if resnet and resnet.version == 2 else None,
        "embedding/kernel": (*config.patch, channels, width),
        "embedding/bias": (width,) if config.patch_bias else None,
        "prefix/cls": (1, 1, width) if config.class_token else None,
        "prefix/distillation": (1, 1, width) if config.distilled else None,
        "prefix/registers": (1, config.num_registers, width) if config.num_registers else None,
        f"{place}/{position.get(config.position)}": (1, rows, width) if config.position in position else None,
        "pre_norm/gamma": (width,) if config.pre_norm else None,
        **{f"block_0/attention/{name}/kernel": (width, heads, width // heads) for name in projections},
        **{
            f"block_0/attention/{name}/bias": (heads, width // heads) for name in projections if _has_bias(name, config)
        },
        "block_0/token_mlp/dense1/kernel": (config.num_tokens, mixer) if (mixer := config.tokens_mlp_dim) else None,
        "block_0/scale1/gamma": (width,) if config.layer_scale is not None else None,
        "block_0/mlp/norm/gamma": (config.mlp_dim,) if config.mlp_norm else None,
        **{
            f"block_{i}/mlp/{name}/kernel": (width, config.mlp_dim)
            for i in range(config.num_layers)
            for name in ("dense1", *["gate"] * config.gated_mlp)
        },
        "encoder_norm/gamma": (width,),
        "pool/probe": (1, 1, width) if config.has_map_head else None,
        **{f"pool/attention/{name}/bias": (width,) for name in _PROJECTIONS if config.has_map_head},
        "pre_logits/kernel": (features, config.representation_size) if config.representation_size else None,
        "head/kernel": (config.representation_size or features, config.num_classes) if config.num_classes else None,
        "head_distillation/kernel": (width, config.num_classes) if config.distilled and config.num_classes else None,
    }
    absent = () if config.num_layers else ("embedding/", "block_", "encoder_norm/")  # of a ResNet without blocks
    return {path: shape for path, shape in shapes.items() if shape is not None and not path.startswith(absent)}
