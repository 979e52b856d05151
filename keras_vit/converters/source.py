"""Open a checkpoint: recognise its format, infer its architecture from the shapes of its tensors, and check it."""

import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from keras_vit import position
from keras_vit._util import files
from keras_vit.converters.config_json import (
    check_json,
    check_keras_facts,
    fitting_labels,
    keras_errors,
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
from keras_vit.converters.table import MAX_LAYERS, MatchedTensors, Table, fields_of_rows, formats, load_table
from keras_vit.errors import CheckpointError as CheckpointError
from keras_vit.model.config import Preprocessing, ResNetConfig, ViTConfig, check_fields

# Metadata of a file: the note, fields that its format has no place for. Other readers ignore it.
NOTE_KEY = "keras_vit"
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
_LAYER_SCALE = 1e-5  # the usual initial value; no file states it


@dataclass(frozen=True)
class KnownFields:
    """Fields of ViTConfig that are known about a file besides its tensors' shapes; later ones override earlier ones."""

    row_fields: Mapping[str, Any] = field(default_factory=dict)  # implied by the presence of tensors
    json_fields: Mapping[str, Any] = field(default_factory=dict)  # stated in its config.json
    recorded_fields: Mapping[str, Any] = field(default_factory=dict)  # noted by keras_vit, if it wrote the file
    caller_fields: Mapping[str, Any] = field(default_factory=dict)  # stated by the caller
    expected: Mapping[str, Any] = field(default_factory=dict)  # of the caller's architecture; if nothing else states it
    image_size: Any = None  # that the caller wants; used for files that do not state their own

    @property
    def is_described(self) -> bool:
        """Whether a config.json or a note says what the tensors do not."""
        return bool(self.json_fields or self.recorded_fields)


class Checkpoint(NamedTuple):
    """An open file that holds a Vision Transformer."""

    container: Container
    table: Table
    tensors: MatchedTensors
    config: ViTConfig  # at the image size it was trained at
    has_zero_rows: bool = False  # whether zero position rows for the prefix tokens were added when it was written
    assumed: str = ""  # a warning for those who use the weights
    is_described: bool = True  # whether a config.json or a note says what the tensors do not

    @property
    def written(self) -> ViTConfig:
        """The config of the model that was written: `config` without position rows that were added."""
        return self.config.replace(position_prefix=False) if self.has_zero_rows else self.config


@contextlib.contextmanager
def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    facts: Mapping[str, Any] | None = None,
    format: str | os.PathLike[str] | None = None,
    expected: Mapping[str, Any] | None = None,
    wanted_size: Any = None,
) -> Iterator[Checkpoint]:
    """Open a checkpoint, a file or a folder with the weights and a config.json, for a `with` statement.

    `facts` are fields of ViTConfig that the file cannot state. `expected` (fields of the architecture that the caller
    expects) and `wanted_size` (the image size the caller wants) are used only where nothing else states them.
    """
    file = find_weights(path)
    with open_files(file) as container:
        table = load_table(format) if format else recognise(container)
        for name in table.names.beside:
            if (file.parent / name).is_file():
                container.join(open_container(file.parent / name))
        tensors = table.match(container.headers)
        try:
            known_fields = KnownFields(
                row_fields=fields_of_rows(source.row for source in tensors.sources.values()),
                json_fields={} if table.json is None else read_beside(file, table.json),
                recorded_fields=read_note(container.metadata),
                caller_fields=facts or {},
                expected=expected or {},
                image_size=wanted_size,
            )
            config = infer(tensors.shapes, table, known_fields)
            is_size_given = wanted_size is not None or "image_size" in known_fields.caller_fields
            check_size(container, config, is_size_given=is_size_given)
        except CheckpointError as error:
            raise CheckpointError(f"{file} {error}") from error
        has_zero_rows = config.position_prefix and ZERO_ROWS_KEY in container.metadata
        assumed = _assumed(file, table, config, known_fields)
        yield Checkpoint(container, table, tensors, config, has_zero_rows, assumed, known_fields.is_described)


def recognise(container: Container, tower: str = "") -> Table:
    """Recognise the format of an open file by the names of its tensors."""
    tables = [load_table(name, tower) for name in formats(tower)]
    found = [table for table in tables if table.find_prefix(container.headers) is not None]
    if len(found) == 1:
        return found[0]
    names = sorted(container.headers)
    which = f"more than one format ({[table.format for table in found]}) is known by its tensors"
    if not found:
        which = "no format is known by its tensors"
        for family, patterns in files.read_toml(files.data_folder("converters") / "other_families.toml").items():
            if all(any(re.search(pattern, name) for name in names) for pattern in patterns):
                which = f"its tensors are those of {family}. This package does not have it"
                break
    raise CheckpointError(
        f"{container.path}: {which}. Received {len(names)} tensors: {str(names[:3])[:200]}. format= takes a name of "
        "keras_vit.converters.formats() or a .toml table of your own; model.load_weights reads what model.save_weights "
        "wrote"
    )


def read_note(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Read the fields of ViTConfig in a file's note; raise a CheckpointError if the note is damaged."""
    try:
        fields = files.parse_object(metadata.get(NOTE_KEY, "{}"))
        check_fields(fields)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"has a damaged note of its config: {str(error)[:200]}") from error
    return fields


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
        fields = _all_fields(shapes, table, known_fields)
        return ViTConfig(**fields)
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"does not describe a valid model: {str(error)[:500]}") from error


def _all_fields(shapes: Shapes, table: Table, known_fields: KnownFields) -> dict[str, Any]:
    # A tensor that the format never has is missing in every file: its absence does not mean another architecture.
    is_resnet = not table.has_row("embedding/kernel")  # without blocks; its width is that of the feature map
    own = {name: value for name, value in tensor_fields(shapes).items() if not (is_resnet and name == "hidden_size")}
    own |= {name: value for name, value in table.config.items() if name in own}
    json_fields = known_fields.json_fields
    check_json(json_fields, own)
    if own["layer_scale"] is not None:
        own["layer_scale"] = json_fields.get("layer_scale", own["layer_scale"])
    stated = {name: value for name, value in json_fields.items() if name not in own or name == "classifier"}
    stated |= {**known_fields.row_fields, **known_fields.recorded_fields, **known_fields.caller_fields}
    fields = _merge_fields(table.defaults, table.implied(shapes), own, stated)
    asked = [*table.required, *(() if known_fields.is_described else table.asked_for(fields))]
    expected = {name: value for name, value in known_fields.expected.items() if name not in stated}
    check_required(table, {**expected, **stated}, asked)
    fields |= {name: expected[name] for name in asked if name in expected}
    fields["num_heads"] = find_num_heads(shapes, table, stated.get("num_heads"), expected.get("num_heads"))
    fields["resnet"] = _resnet(shapes, fields.get("resnet"), is_required=is_resnet or bool(stated.get("resnet")))
    if is_resnet and "hidden_size" not in stated:
        fields["hidden_size"] = fields["resnet"].channels
    fields["classifier"] = _classifier(fields, is_stated="classifier" in stated)
    fields["labels"] = fitting_labels(fields.get("labels"), fields["num_classes"])
    fields["position_prefix"] = _position_prefix(shapes, fields)
    fields["image_size"] = _image_size(shapes, fields, known_fields.image_size)
    return fields


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


def check_required(table: Table, stated: Mapping[str, Any], asked: Sequence[str]) -> None:
    """Raise if neither a config.json nor the caller states a field that the tensors of a format do not tell."""
    if unknown := list(dict.fromkeys(name for name in asked if name not in stated)):
        pairs = ", ".join(f"'{name}': ..." for name in unknown)
        raise CheckpointError(
            f"is in {table.format} format, whose tensors do not say {', '.join(unknown)}, and has no config.json that "
            f"does: pass config={{{pairs}}} ({' '.join(f'--config {name}=...' for name in unknown)})"
        )


def _assumed(file: Path, table: Table, config: ViTConfig, known_fields: KnownFields) -> str:
    """Name the fields that no tensor and nobody states, and that most files of a format have in common; "" for none."""
    names = [name for name in table.assumed if name not in {**known_fields.caller_fields, **known_fields.expected}]
    if not names or known_fields.is_described:
        return ""
    values = ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
    return f"keras_vit: {file.name} has no config.json: {values} is assumed, as most {table.format} files have it"


def _merge_fields(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Merge fields; later sources override earlier ones. preprocessing and resnet are merged field by field."""
    merged: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            earlier = merged.get(name)
            if isinstance(earlier, Preprocessing | ResNetConfig) and isinstance(value, Mapping):
                value = dataclasses.replace(earlier, **value)
            merged[name] = value
    return merged


def find_num_heads(shapes: Shapes, table: Table, stated: int | None, expected: int | None) -> int:
    """Number of heads that the tensors have, or else that is stated, or else expected."""
    kernel = shapes.get("block_0/attention/query/kernel", shapes.get("pool/attention/query/kernel"))
    if kernel is None:  # no attention
        return 1 if stated is None else stated
    columns = _bias_shape(shapes)[-1:]  # a number for each head
    known = kernel[1] if len(kernel) == 3 else columns[0] if columns else stated
    found = expected if known is None else known
    if found is None:
        raise CheckpointError(
            f"is in {table.format} format, which does not say how many attention heads there are "
            f"(the width is {kernel[0]}): pass config={{'num_heads': ...}} (--config num_heads=...)"
        )
    if stated not in (None, found):
        raise CheckpointError(f"has {found} attention heads. Received: num_heads={stated}")
    return found


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
    prefix = _probe(fields, position_prefix=True).num_prefix_tokens
    if fields.get("image_size") is not None:
        height, width = _probe(fields, image_size=fields["image_size"]).grid
        return rows != height * width
    if prefix and _is_square(rows) == _is_square(rows - prefix):
        raise CheckpointError(
            f"does not say whether its {rows} position embeddings include {prefix} prefix tokens: "
            "pass config={'position_prefix': True or False} (--config position_prefix=true)"
        )
    return not _is_square(rows)


def _image_size(shapes: Shapes, fields: Mapping[str, Any], wanted: Any) -> Any:
    if fields.get("image_size") is not None:
        return fields["image_size"]
    mixed, rows = shapes.get(_TOKEN_KERNEL, ())[:1], shapes.get("position/embedding", ())[:-1]
    probe = _probe(fields)
    if not (mixed or rows) and fields["relative_bias"] != "none" and fields["relative_bias_mlp_dim"] is None:
        offsets = _bias_shape(shapes)[0] - position.bias_rows((1, 1), probe.num_prefix_tokens) + 1
        if not _is_square(offsets) or offsets % 2 == 0:
            raise CheckpointError(
                f"its {offsets} relative biases are not those of a square grid: pass config={{'image_size': (height, "
                "width)} as it was trained (--config image_size=[HEIGHT,WIDTH])"
            )
        rows = (((math.isqrt(offsets) + 1) // 2) ** 2 + probe.position_prefix_tokens,)
    if not (mixed or rows):
        if wanted is None:
            raise CheckpointError("has no position embedding to tell its resolution: pass image_size=")
        return wanted
    # A token MLP has an input for every token.
    tokens = mixed[0] - probe.num_prefix_tokens if mixed else math.prod(rows) - probe.position_prefix_tokens
    if not _is_square(tokens):
        name = f"token MLP for {mixed[0]} tokens" if mixed else f"position embedding {shapes['position/embedding']}"
        raise CheckpointError(
            f"its {name} does not fill a square grid: pass config={{'image_size': (height, width)}} as it was trained "
            "(--config image_size=[HEIGHT,WIDTH])"
        )
    side = math.isqrt(tokens)
    return side * probe.stride[0], side * probe.stride[1]


def _probe(fields: Mapping[str, Any], **changes: Any) -> ViTConfig:
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
    num_heads: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> ViTConfig:
    """Read the architecture of a checkpoint from its headers, without the weights.

    Args:
        path: the file or folder.
        config: facts about the file that it cannot state itself, as for `load`.
        format: one of `formats()` or a path to a .toml table of your own; None recognises it.
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
        with open_checkpoint(file, facts=to_facts(config), format=format, **wanted) as checkpoint:
            return checkpoint.written
    check_keras_facts(config=config, format=format)
    with keras_errors(file):
        return ViTConfig(**saved_arguments(read_keras_config(file))["config"])


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
        return recognise(container).format


def to_facts(config: ViTConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert facts about a file to a dict."""
    if not isinstance(config, ViTConfig | Mapping | None):
        raise ValueError(f"config must be a ViTConfig or a dict of its fields. Received: {config!r:.200}")
    return config.to_dict() if isinstance(config, ViTConfig) else dict(config or {})
