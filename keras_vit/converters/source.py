"""Open a checkpoint: recognise its format, infer its architecture from the shapes of its tensors, and check it."""

import collections
import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keras_vit import position
from keras_vit._util import files
from keras_vit.converters.adapters import FACTS as LORA_FACTS
from keras_vit.converters.adapters import adapted, find_adapter
from keras_vit.converters.config_json import (
    check_folder,
    check_json,
    check_keras_facts,
    fitting_labels,
    keras_errors,
    plain_arguments,
    read_beside,
    saved_arguments,
)
from keras_vit.converters.containers import (
    Container,
    find_weights,
    is_keras_file,
    open_container,
    open_files,
    read_keras_config,
)
from keras_vit.converters.facts import (
    KnownFields,
    asked_for,
    check_asked,
    describe_assumed,
    describe_labels,
    merge_fields,
    read_note,
    to_facts,
)
from keras_vit.converters.table import (
    MAX_LAYERS,
    PATCHES,
    POSITION,
    MatchedTensors,
    Table,
    fields_of_rows,
    formats,
    load_table,
)
from keras_vit.converters.wrappers import find_formats, find_model
from keras_vit.errors import CheckpointError as CheckpointError
from keras_vit.model.config import ResNetConfig, ViTConfig, check_fields

ZERO_ROWS_KEY = "keras_vit_empty_rows"  # position rows of zeros were added, because the format has them
# A model may have this many times the weights of its file, because formats leave out biases that are zero, and this
# many values in a fixed position embedding besides.
_WEIGHTS_RATIO = 2
_SPARE_POSITIONS = 1 << 22
# No model has more patches, unless the caller asks for them: attention to so many takes 16 GiB for each head.
_MAX_PATCHES = 1 << 16

Shapes = Mapping[str, tuple[int, ...]]

# Variables that every model of a format has, if the format has a name for them -> the numbers of axes they may have.
_REQUIRED = {
    "embedding/kernel": (4,),
    "block_0/mlp/dense1/kernel": (2,),
    "block_0/attention/query/kernel": (2, 3),
    "block_0/token_mlp/dense1/kernel": (2,),
}
_TOKEN_KERNEL = "block_0/token_mlp/dense1/kernel"  # (tokens, tokens_mlp_dim)
_AS_TRAINED = "config={'image_size': (height, width)} as it was trained (--config image_size=[HEIGHT,WIDTH])"
_LAYER_SCALE = 1e-5  # the usual initial value; no file states it


class Checkpoint(NamedTuple):
    """An open file that holds a Vision Transformer."""

    container: Container
    table: Table
    tensors: MatchedTensors
    config: ViTConfig  # at the image size it was trained at
    has_zero_rows: bool = False  # whether zero position rows for the prefix tokens were added when it was written
    told: tuple[str, ...] = ()  # warnings for those who use the weights
    known: KnownFields = KnownFields()  # what else than its tensors says

    @property
    def image_size(self) -> Any:
        """Size of the images, if another file states it apart from the size of the positions; else None."""
        is_apart = self.table.json is not None and self.table.json.is_resized
        return self.known.json_fields.get("image_size") if is_apart else None

    @property
    def written(self) -> ViTConfig:
        """The config of the model that was written: `config` without position rows that were added."""
        return self.config.replace(position_prefix=False) if self.has_zero_rows else self.config


@contextlib.contextmanager
def open_checkpoint(
    file: Path,
    *,
    facts: Mapping[str, Any] | None = None,
    format: str | os.PathLike[str] | None = None,
    which: str | None = None,
    expected: Mapping[str, Any] | None = None,
    wanted_size: Any = None,
) -> Iterator[Checkpoint]:
    """Open the checkpoint whose weights are in a file (see `find_weights`), for a `with` statement.

    `facts` are fields of ViTConfig, and `adapters.FACTS`, that the file cannot state; `which` chooses one of several
    models. `expected` (fields of the architecture that the caller expects) and `wanted_size` (the image size the caller
    wants) are used only where nothing else states them.
    """
    check_folder(file)
    with open_files(file) as container:
        found = find_model(container, tables_of(format), which, is_format_known=format is not None)
        table = found.table
        for name in table.names.beside:
            if (file.parent / name).is_file():
                container.join(open_container(file.parent / name))
        try:
            facts = dict(facts or {})
            lora_facts = {name: facts[name] for name in LORA_FACTS if name in facts}
            if adapter := find_adapter(container, lora_facts):
                facts = {name: value for name, value in facts.items() if name not in lora_facts}
            tensors = table.match(container.headers, found.prefix)
            tensors = dataclasses.replace(tensors, other_parts=[*found.other_parts, *tensors.other_parts])
            rows = fields_of_rows(source.row for source in tensors.sources.values())
            read_container = adapted(container, table, tensors, adapter) if adapter else container
            known_fields = KnownFields(
                row_fields={**rows, **_grid_fields(container, tensors)},
                json_fields={} if table.json is None else read_beside(file, table.json),
                recorded_fields=read_note(container.metadata),
                caller_fields=facts,
                expected=expected or {},
                image_size=wanted_size,
            )
            config = infer(tensors.shapes, table, known_fields)
            is_size_given = wanted_size is not None or "image_size" in known_fields.caller_fields
            check_size(container, config, is_size_given=is_size_given)
        except CheckpointError as error:
            raise CheckpointError(f"{file} {error}") from error
        has_zero_rows = config.position_prefix and ZERO_ROWS_KEY in container.metadata
        taken = "; ".join(filter(None, (found.told, adapter.told if adapter else "")))
        told = (
            f"keras_vit: {file.name}: {taken}" if taken else "",
            describe_other_parts(file, tensors.other_parts),
            describe_labels(file, config, known_fields),
            describe_assumed(file, table, config, known_fields),
        )
        yield Checkpoint(read_container, table, tensors, config, has_zero_rows, tuple(filter(None, told)), known_fields)


def tables_of(format: str | os.PathLike[str] | None, tower: str = "") -> list[Table]:
    """Load the table of a format, or all tables of a tower."""
    return [load_table(name, tower) for name in ([format] if format else formats(tower))]


def describe_other_parts(file: Path, names: Sequence[str]) -> str:
    """Name the parts of a file beside the model, with their numbers of tensors; "" for none."""
    groups = collections.Counter(re.split("[./]", name)[0] for name in names)
    listed = ", ".join(f"{name} ({count})" for name, count in sorted(groups.items()))
    start = f"keras_vit: {file.name} has other parts than the model, which are not read: "
    return start + listed if listed else ""


def _grid_fields(container: Container, tensors: MatchedTensors) -> dict[str, Any]:
    """Find the image size of positions that lie on two axes in the file, which tells their grid."""
    positions, patches = tensors.sources.get(POSITION), tensors.shapes.get(PATCHES, ())[:2]
    if positions is None or not positions.row.is_flat or len(patches) < 2:
        return {}
    rows, columns = container.headers[positions.tensor].shape[1:3]
    return {"image_size": (rows * patches[0], columns * patches[1])}


# ---- from shapes to the config


def infer(shapes: Shapes, table: Table, known_fields: KnownFields) -> ViTConfig:
    """Infer the config that a file was trained with, from the shapes that its tensors have as variables.

    Heads are a separate axis only if the file has one. Raise a CheckpointError if the tensors are not those of a Vision
    Transformer, if they contradict the known fields, or if the caller must state a fact.
    """
    check_fields(known_fields.caller_fields)
    for name, ranks in _REQUIRED.items():
        if table.has_row(name) and (len(shapes.get(name, ())) not in ranks or 0 in shapes[name]):
            raise CheckpointError(
                f"is not a Vision Transformer in {table.format} format: {name} must have {ranks} axes. "
                f"Received: {shapes.get(name, 'no tensor for it')}"
            )
    if math.prod(shapes.get("prefix/cls", ())[:-1]) > 1:
        told = "Pixio is read as transformers publishes it (huggingface_pixio)"
        raise CheckpointError(f"has several class tokens, and {table.format} files have one: {told}")
    try:
        return ViTConfig(**_all_fields(shapes, table, known_fields))
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"does not describe a valid model: {str(error)[:500]}") from error


def _all_fields(shapes: Shapes, table: Table, known: KnownFields) -> dict[str, Any]:
    # A tensor that the format never has is missing in every file: its absence does not mean another architecture.
    is_resnet = not table.has_row("embedding/kernel")  # without blocks; its width is that of the feature map
    fields = _merge_sources(shapes, table, known, is_resnet=is_resnet)
    fields |= _expected_fields(shapes, table, fields, known)
    stated = known.stated
    fields["num_heads"] = find_num_heads(shapes, table, stated.get("num_heads"), known.expected.get("num_heads"))
    fields["resnet"] = _resnet(shapes, fields.get("resnet"), is_required=is_resnet or bool(stated.get("resnet")))
    if is_resnet and "hidden_size" not in stated:
        fields["hidden_size"] = fields["resnet"].channels
    fields["classifier"] = _classifier(fields, is_stated="classifier" in stated)
    fields["labels"] = fitting_labels(fields.get("labels"), fields["num_classes"])
    _check_grid(shapes, fields, known)
    if (stated_size := known.json_fields.get("image_size")) is not None:
        _check_stated_size(shapes, fields, table, stated_size)
    fields["position_prefix"] = _position_prefix(shapes, fields)
    fields["image_size"] = _image_size(shapes, fields, known.image_size)
    return fields


def _merge_sources(shapes: Shapes, table: Table, known: KnownFields, *, is_resnet: bool) -> dict[str, Any]:
    """Merge what is told, later over earlier: by the table, tensors, files beside, optional tensors, note, caller."""
    tensors = tensor_fields(shapes)
    if is_resnet:
        del tensors["hidden_size"]
    tensors |= {name: value for name, value in table.config.items() if name in tensors}
    check_json(known.json_fields, tensors)
    # Tensors tell these by halves: which tokens a head reads, and that there is a layer scale.
    by_halves = {"classifier"} if tensors["layer_scale"] is None else {"classifier", "layer_scale"}
    return merge_fields(
        table.defaults,
        table.implied(shapes),
        tensors,
        {name: value for name, value in known.json_fields.items() if name not in tensors or name in by_halves},
        known.row_fields,
        known.recorded_fields,
        known.caller_fields,
    )


def _expected_fields(shapes: Shapes, table: Table, fields: Mapping[str, Any], known: KnownFields) -> dict[str, Any]:
    """Take from the caller's architecture what nothing states; raise if a fact that is asked for stays open."""
    expected = {name: value for name, value in known.expected.items() if name not in known.stated}
    asked = [] if known.recorded_fields else asked_for(table, fields, is_described=known.is_described)
    check_asked(table, {**expected, **known.stated, **_heads_of_tensors(shapes)}, asked)
    return {name: expected[name] for name in asked if name in expected}


def tensor_fields(shapes: Shapes) -> dict[str, Any]:
    """Infer the fields of ViTConfig that follow from the shapes of a file's tensors."""

    def axis_of(name: str, axis: int, default: int | None) -> int | None:
        shape = shapes.get(name, ())
        return shape[axis] if len(shape) >= -axis else default

    features = read_features()
    fields: dict[str, Any] = {name: variable in shapes for name, variable in features["present"].items()}
    for name, row in features["sizes"].items():
        fields[name] = axis_of(*(*row, None)[:3])
    biases = {"shared": "relative_bias/", "blocks": "relative_bias_0/"}
    place = next((place for place, start in biases.items() if any(name.startswith(start) for name in shapes)), "none")
    width = fields["hidden_size"]
    parts = width and (axis_of("head/kernel", -2, 0) or 0) // width  # 5: the class tokens of 4 blocks, and the mean
    with_token = "token_gap" if parts in (2, 5) else "token"
    return {
        **fields,
        # The embedding of a hybrid reads the channels of its ResNet.
        "num_channels": axis_of("root/conv/kernel", -2, fields["num_channels"]),
        "patch_size": shapes.get("embedding/kernel", (1, 1))[:2],
        "num_layers": len({name.split("/")[0] for name in shapes if name.startswith("block_")}),
        "classifier": "map" if "pool/probe" in shapes else with_token if fields["class_token"] else "gap",
        "token_blocks": 4 if parts == 5 else 1,
        "key_bias": "block_0/attention/key/bias" in shapes or not fields["qkv_bias"],
        "layer_scale": _LAYER_SCALE if "block_0/scale1/gamma" in shapes else None,
        "relative_bias": place,
        "relative_bias_mlp_dim": axis_of(f"{biases.get(place)}dense1/kernel", -1, None),
    }


@functools.cache
def read_features() -> dict[str, Any]:
    """Read converters/features.toml: how the variables of a model show its config."""
    return files.read_toml(files.data_folder("converters") / "features.toml")


def find_num_heads(shapes: Shapes, table: Table, stated: int | None, expected: int | None) -> int:
    """Number of heads that the tensors have, or else that is stated, or else expected."""
    kernel = _query_kernel(shapes)
    if not kernel:  # no attention
        return 1 if stated is None else stated
    known = _heads_of_tensors(shapes).get("num_heads", stated)
    found = expected if known is None else known
    if found is None:
        raise CheckpointError(
            f"is in {table.format} format, which does not say how many attention heads there are "
            f"(the width is {kernel[0]}): pass config={{'num_heads': ...}} (--config num_heads=...)"
        )
    if stated not in (None, found):
        raise CheckpointError(f"has {found} attention heads. Received: num_heads={stated}")
    return found


def _query_kernel(shapes: Shapes) -> tuple[int, ...]:
    return shapes.get("block_0/attention/query/kernel", shapes.get("pool/attention/query/kernel", ()))


def _heads_of_tensors(shapes: Shapes) -> dict[str, int]:
    """Find num_heads in an axis of the kernels or in the relative biases; {} if there are none."""
    kernel, columns = _query_kernel(shapes), _bias_shape(shapes)[-1:]  # a number for each head
    return {"num_heads": kernel[1]} if len(kernel) == 3 else {"num_heads": columns[0]} if columns else {}


def _bias_shape(shapes: Shapes) -> tuple[int, ...]:
    """Shape (offsets, heads) of the table of relative biases, or of the last matrix of its MLP; () without one."""
    ends = ("table", "dense2/kernel")
    names = [f"{layer}/{end}" for layer in ("relative_bias", "relative_bias_0") for end in ends]
    return next((shapes[name] for name in names if len(shapes.get(name, ())) == 2), ())


def _resnet(shapes: Shapes, numerics: ResNetConfig | None, *, is_required: bool) -> ResNetConfig | None:
    if len(shapes.get("root/conv/kernel", ())) != 4:
        if is_required:
            raise CheckpointError("is described as a hybrid, but has no tensors of a ResNet")
        return None
    stages: dict[int, set[int]] = {}
    for name in shapes:
        unit = re.match(r"stage_(\d+)_unit_(\d+)/", name)
        if unit:
            stages.setdefault(int(unit[1]), set()).add(int(unit[2]))
    num_layers = tuple(len(stages[stage]) for stage in sorted(stages))
    widths = [shapes.get(f"stage_{stage}_unit_1/conv1/kernel", (0,))[-1] for stage in sorted(stages)]
    width = shapes["root/conv/kernel"][-1]
    fields: dict[str, Any] = {"num_layers": num_layers, "width_factor": width / 64}
    if widths != [width * 2**stage for stage in range(len(widths))]:
        fields["stage_widths"] = widths
    outputs = [shapes.get(f"stage_{stage}_unit_1/conv3/kernel", (0,))[-1] for stage in sorted(stages)]
    if outputs != [4 * width for width in widths]:
        fields["stage_channels"] = outputs
    try:
        return dataclasses.replace(numerics or ResNetConfig(), **fields)
    except ValueError as error:
        raise CheckpointError(f"does not describe a valid ResNet: {error}") from error


def _classifier(fields: Mapping[str, Any], *, is_stated: bool) -> str:
    classifier: str = fields["classifier"]
    if classifier == "token" and fields.get("final_norm") == "pooled" and not is_stated:
        raise CheckpointError(
            "does not say whether its last norm is applied to the class token or to the mean: "
            "pass config={'classifier': 'token' or 'gap'} (--config classifier=gap)"
        )
    return "token_unpooled" if classifier == "unpooled" and fields["class_token"] else classifier


def _position_prefix(shapes: Shapes, fields: Mapping[str, Any]) -> bool:
    """Decide whether the position embedding has rows for the prefix tokens; by its size if the format allows both."""
    if "position_prefix" in fields or "position/embedding" not in shapes:
        return bool(fields.get("position_prefix", True))
    rows = math.prod(shapes["position/embedding"][:-1])
    prefix = _with_any_size(fields, position_prefix=True).num_prefix_tokens
    if fields.get("image_size") is not None:
        height, width = _with_any_size(fields, image_size=fields["image_size"]).grid
        return rows != height * width
    if prefix and not (_is_square(rows) or _is_square(rows - prefix)):
        raise CheckpointError(_no_square(f"position embedding {shapes[POSITION]}"))
    if prefix and _is_square(rows) and _is_square(rows - prefix):
        raise CheckpointError(
            f"does not say whether its {rows} position embeddings include {prefix} prefix tokens: "
            "pass config={'position_prefix': True or False} (--config position_prefix=true)"
        )
    return not _is_square(rows)


def _check_grid(shapes: Shapes, fields: Mapping[str, Any], known_fields: KnownFields) -> None:
    """Raise if another grid than a square is wanted of a table whose grid nobody states.

    As many rows can be those of several grids: 9 x 16 patches have as many as 12 x 12.
    """
    tables = (shapes.get(POSITION), _bias_shape(shapes), shapes.get(_TOKEN_KERNEL))
    is_known = fields.get("image_size") is not None or "image_size" in known_fields.expected or not any(tables)
    if is_known or known_fields.image_size is None:
        return
    rows, columns = _with_any_size(fields, image_size=known_fields.image_size).grid
    if rows != columns:
        raise CheckpointError(
            f"does not say the grid of its positions, and {rows} x {columns} patches are wanted, which are no square: "
            f"pass {_AS_TRAINED}"
        )


def _check_stated_size(shapes: Shapes, fields: Mapping[str, Any], table: Table, stated: Any) -> None:
    """Raise if the file beside the weights states another image size than that of their positions."""
    rows = math.prod(shapes.get(POSITION, ())[:-1])
    if table.json is None or table.json.is_resized or POSITION not in shapes or fields.get("image_size") != stated:
        return
    patches = math.prod(_with_any_size(fields, image_size=stated).grid)
    if rows - patches not in (0, 1, _with_any_size(fields).num_prefix_tokens):
        raise CheckpointError(
            f"has {rows} positions, but its {table.json.file} says image_size {stated!s:.80}, of "
            f"{min(patches, 10**18)} patches: it describes other weights. Put the right one beside them, or pass "
            f"{_AS_TRAINED}"
        )


def _no_square(name: str) -> str:
    return f"its {name} does not fill a square grid: pass {_AS_TRAINED}"


def _image_size(shapes: Shapes, fields: Mapping[str, Any], wanted: Any) -> Any:
    if fields.get("image_size") is not None:
        return fields["image_size"]
    mixed, rows = shapes.get(_TOKEN_KERNEL, ())[:1], shapes.get("position/embedding", ())[:-1]
    any_size = _with_any_size(fields)
    if not (mixed or rows) and fields["relative_bias"] != "none" and fields["relative_bias_mlp_dim"] is None:
        offsets = _bias_shape(shapes)[0] - position.bias_rows((1, 1), any_size.num_prefix_tokens) + 1
        if not _is_square(offsets) or offsets % 2 == 0:
            raise CheckpointError(_no_square(f"table of {offsets} relative biases"))
        rows = (((math.isqrt(offsets) + 1) // 2) ** 2 + any_size.position_prefix_tokens,)
    if not (mixed or rows):
        if wanted is None:
            raise CheckpointError("has no position embedding to tell its resolution: pass image_size=")
        return wanted
    # A token MLP has an input for every token.
    tokens = mixed[0] - any_size.num_prefix_tokens if mixed else math.prod(rows) - any_size.position_prefix_tokens
    if not _is_square(tokens):
        name = f"token MLP for {mixed[0]} tokens" if mixed else f"position embedding {shapes['position/embedding']}"
        raise CheckpointError(_no_square(name))
    side = math.isqrt(tokens)
    return side * any_size.stride[0], side * any_size.stride[1]


def _with_any_size(fields: Mapping[str, Any], **changes: Any) -> ViTConfig:
    """Make a config for its derived properties only; its image is large enough for every patch."""
    return ViTConfig(**{**fields, "image_size": 2**20, **changes})


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def check_size(container: Container, config: ViTConfig, *, is_size_given: bool = False) -> None:
    """Raise a CheckpointError if a model is much larger than its file: a few bytes can describe one of any size."""
    held = sum(math.prod(header.shape) for header in container.headers.values() if header.bytes)
    most = _WEIGHTS_RATIO * held
    patches = math.prod(config.grid)
    fixed = patches * config.hidden_size if config.position == "sincos2d" else 0
    if not is_size_given and (patches > _MAX_PATCHES or fixed > most + _SPARE_POSITIONS):
        raise CheckpointError(
            f"describes an image of {min(patches, 10**18)} patches, but holds {held} numbers; "
            f"at most {_MAX_PATCHES} patches are read"
        )
    num_layers = max(config.num_layers, sum(config.resnet.num_layers) if config.resnet else 0)
    needed = _least_weights(config) if num_layers <= MAX_LAYERS else most + 1
    if needed > most:
        raise CheckpointError(
            f"describes a model of at least {min(needed, 10**18)} weights in {min(num_layers, 10**18)} blocks, "
            f"but holds {held} numbers"
        )


def _least_weights(config: ViTConfig) -> int:
    """Count the weights of a model's largest matrices, without starting Keras."""
    width, resnet = config.hidden_size, config.resnet
    learned = math.prod(config.grid) if config.position == "learned" else 0
    block = 2 * width * config.mlp_dim + 2 * config.num_tokens * (config.tokens_mlp_dim or 0)
    if config.has_attention:
        block += 4 * width**2
    around = config.num_prefix_tokens + learned + config.num_classes + (config.representation_size or 0)
    if config.num_layers:
        around += math.prod(config.patch) * (resnet.channels if resnet else config.num_channels)
    units = zip(resnet.num_layers, resnet.widths, strict=True) if resnet else ()
    return config.num_layers * block + width * around + sum(9 * number * channels**2 for number, channels in units)


def read_config(
    path: str | os.PathLike[str],
    *,
    config: ViTConfig | Mapping[str, Any] | None = None,
    format: str | None = None,
    which: str | None = None,
    num_heads: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> ViTConfig:
    """Read the architecture of a checkpoint from its headers, without the weights.

    Args:
        path: the file or folder.
        config: facts about the file that it cannot state itself, as for `load`.
        format: one of `formats()` or a path to a .toml table of your own; None recognises it.
        which: the model that is meant, if the file has several, as for `load`.
        num_heads: number of attention heads that is expected, where nothing else states it.
        image_size: size in pixels that is wanted, where the file does not state its own.

    Raises:
        CheckpointError: the file is damaged, malicious or not a Vision Transformer.
        FileNotFoundError: there is no such file.

    Example:

    >>> path = keras_vit.converters.save(keras_vit.zoo.load("digits"), "digits.npz", format="google")
    >>> keras_vit.converters.read_config(path).num_layers
    4
    """
    file = find_weights(path)
    if not is_keras_file(file):
        wanted: dict[str, Any] = {
            "expected": {"num_heads": num_heads} if num_heads else None,
            "wanted_size": image_size,
        }
        with open_checkpoint(file, facts=to_facts(config), format=format, which=which, **wanted) as checkpoint:
            return checkpoint.written
    check_keras_facts(config=config, format=format, which=which)
    found, has_maps = read_keras_model(file)
    if has_maps:
        raise CheckpointError(f"{file} has a model of maps: keras_vit.dense.load opens it")
    return found


def read_keras_model(file: Path) -> tuple[ViTConfig, bool]:
    """Read the config of a model saved as .keras and False, or of a DenseModel its backbone's config and True."""
    values = read_keras_config(file)
    with keras_errors(file):
        has_maps = values.get("registered_name") == "keras_vit>DenseModel"
        stored = plain_arguments(values["config"]["backbone"], "DenseModel") if has_maps else saved_arguments(values)
        return ViTConfig(**stored["config"]), has_maps


def detect(path: str | os.PathLike[str]) -> str:
    """Recognise the format of a file or folder, and return its name.

    Args:
        path: the file, or a folder with the weights.

    Raises:
        CheckpointError: no known format has these tensor names; the message shows some of them.
        FileNotFoundError: there is no such file.

    Example:

    >>> path = keras_vit.converters.save(keras_vit.zoo.load("digits"), "digits.npz", format="big_vision")
    >>> keras_vit.converters.detect(path)
    'big_vision'
    """
    with open_files(find_weights(path)) as container:
        tables = tables_of(None)
        found = find_formats(container, tables)
        return found[0] if len(found) == 1 else find_model(container, tables).table.format
