"""Infer the architecture of a checkpoint from the shapes of its tensors and from hints about the rest."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keras_vit._util import data_files
from keras_vit._util.checks import pair
from keras_vit.converters.table import Table
from keras_vit.errors import CheckpointError
from keras_vit.model.config import Preprocessing, ResNetConfig, ViTConfig, check_fields

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
# A config.json may differ from the tensors in these: how the head pools, and which head it is.
_NOT_COMPARED = {"classifier", "layer_scale", "representation_size"}


@dataclass(frozen=True)
class Hints:
    """Fields of ViTConfig that are known about a file besides its tensors' shapes; later ones override earlier ones."""

    row_fields: Mapping[str, Any] = field(default_factory=dict)  # implied by the presence of tensors
    json_fields: Mapping[str, Any] = field(default_factory=dict)  # stated in its config.json
    recorded_fields: Mapping[str, Any] = field(default_factory=dict)  # noted by keras_vit, if it wrote the file
    caller_fields: Mapping[str, Any] = field(default_factory=dict)  # stated by the caller
    num_heads: int | None = None  # of the architecture that the caller expects; used if nothing else states it
    image_size: Any = None  # that the caller wants; used for files that do not state their own


def infer(shapes: Shapes, table: Table, hints: Hints) -> ViTConfig:
    """Return the config that a file was trained with, from the shapes that its tensors have as variables.

    Heads are a separate axis only if the file has one. Raise a CheckpointError if the tensors are not those of a Vision
    Transformer, if they contradict the hints, or if the caller must state a fact.
    """
    check_fields(hints.caller_fields)
    for name, ranks in _REQUIRED.items():
        if table.has_row(name) and (len(shapes.get(name, ())) not in ranks or 0 in shapes[name]):
            raise CheckpointError(
                f"is not a Vision Transformer in {table.format} format: {name} must have {ranks} axes. "
                f"Received: {shapes.get(name, 'no tensor for it')}"
            )
    try:
        return _config(shapes, table, hints)
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"does not describe a valid model: {str(error)[:500]}") from error


def _config(shapes: Shapes, table: Table, hints: Hints) -> ViTConfig:
    # A tensor that the format never has is missing in every file: its absence does not mean another architecture.
    is_resnet = not table.has_row("embedding/kernel")  # without blocks; its width is that of the feature map
    known = {name: value for name, value in tensor_fields(shapes).items() if not (is_resnet and name == "hidden_size")}
    known |= {name: value for name, value in table.meaning.config.items() if name in known}
    check_json(hints.json_fields, known)
    if known["layer_scale"] is not None:
        known["layer_scale"] = hints.json_fields.get("layer_scale", known["layer_scale"])
    json = {name: value for name, value in hints.json_fields.items() if name not in known or name == "classifier"}
    stated = {**json, **hints.row_fields, **hints.recorded_fields, **hints.caller_fields}
    check_required(table, stated)
    fields = _merge_fields(table.meaning.defaults, table.meaning.implied(shapes), known, stated)
    fields["num_heads"] = find_num_heads(shapes, table, stated.get("num_heads"), hints.num_heads)
    fields["resnet"] = _resnet(shapes, fields.get("resnet"), is_required=is_resnet or bool(stated.get("resnet")))
    if is_resnet and "hidden_size" not in stated:
        fields["hidden_size"] = fields["resnet"].channels
    fields["classifier"] = _classifier(fields, is_stated="classifier" in stated)
    fields["labels"] = _labels(fields.get("labels"), fields["num_classes"])
    fields["position_prefix"] = _position_prefix(shapes, fields)
    fields["image_size"] = _image_size(shapes, fields, hints.image_size)
    return ViTConfig(**fields)


def tensor_fields(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of ViTConfig that follow from the shapes of a file's tensors."""
    features = read_features()
    fields: dict[str, Any] = {name: variable in shapes for name, variable in features["present"].items()}
    for name, row in features["sizes"].items():
        variable, axis, default = (*row, None)[:3]
        fields[name] = _axis(shapes, variable, axis, default)
    width = fields["hidden_size"]
    reads_two = fields["class_token"] and width and _axis(shapes, "head/kernel", -2, 0) == 2 * width
    pooling = "token_gap" if reads_two else "token" if fields["class_token"] else "gap"
    return {
        **fields,
        # The embedding of a hybrid reads the channels of its ResNet.
        "num_channels": _axis(shapes, "root/conv/kernel", -2, fields["num_channels"]),
        "patch_size": shapes.get("embedding/kernel", (1, 1))[:2],
        "num_layers": len({name.split("/")[0] for name in shapes if name.startswith("block_")}),
        "classifier": "map" if "pool/probe" in shapes else pooling,
        "key_bias": "block_0/attention/key/bias" in shapes or not fields["qkv_bias"],
        "layer_scale": _LAYER_SCALE if "block_0/scale1/gamma" in shapes else None,
    }


def _axis(shapes: Shapes, name: str, axis: int, default: int | None) -> int | None:
    shape = shapes.get(name, ())
    return shape[axis] if len(shape) >= -axis else default


@functools.cache
def read_features() -> dict[str, Any]:
    """Return converters/features.toml: what the variables of a model say about its config."""
    return data_files.read_toml(data_files.data_folder("converters") / "features.toml")


def check_required(table: Table, stated: Mapping[str, Any]) -> None:
    """Raise if neither a config.json nor the caller states a field that the tensors of a format do not tell."""
    if unknown := [name for name in table.meaning.required if name not in stated]:
        raise CheckpointError(
            f"is in {table.format} format, whose tensors do not say {', '.join(unknown)}, and has no config.json that "
            f"does: pass config={{'{unknown[0]}': ...}} (--config {unknown[0]}=...)"
        )


def check_json(json_fields: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise if a config.json contradicts the tensors: then neither can be trusted."""
    wrong = []
    for name in set(known) & set(json_fields) - _NOT_COMPARED:
        try:
            stated = pair(json_fields[name], name) if name == "patch_size" else json_fields[name]
        except ValueError as error:
            raise CheckpointError(f"has a config.json in which {error}") from error
        if stated != known[name]:
            wrong.append(f"{name} {stated!r:.80} where the tensors have {known[name]!r}")
    if wrong:
        raise CheckpointError(f"has a config.json that says {'; '.join(sorted(wrong))}")


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
    """Return the number of heads that the tensors have, or else that is stated, or else expected."""
    kernel = shapes.get("block_0/attention/query/kernel", shapes.get("pool/attention/query/kernel"))
    if kernel is None:  # no attention
        return 1 if stated is None else stated
    found = kernel[1] if len(kernel) == 3 else stated if stated is not None else expected
    if found is None:
        raise CheckpointError(
            f"is in {table.format} format, which does not say how many attention heads there are "
            f"(the width is {kernel[0]}): pass config={{'num_heads': ...}} (--config num_heads=...)"
        )
    if stated not in (None, found):
        raise CheckpointError(f"has {found} attention heads. Received: num_heads={stated}")
    return found


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


def _labels(labels: Any, num_classes: int) -> str | tuple[str, ...] | None:
    """Return the name of a list of labels, or the labels themselves if there is one for each class."""
    if labels is None or isinstance(labels, str):
        return labels
    if not isinstance(labels, list | tuple) or not all(isinstance(label, str) for label in labels):
        raise ValueError(f"labels are texts. Received: {labels!r:.200}")
    return tuple(labels) if len(labels) == num_classes else None


def _position_prefix(shapes: Shapes, fields: Mapping[str, Any]) -> bool:
    """Return whether the position embedding has rows for the prefix tokens; by its size if the format allows both."""
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
    """Return the image size of the file: as stated, or that of a square image with as many patches."""
    if fields.get("image_size") is not None:
        return fields["image_size"]
    mixed, rows = shapes.get(_TOKEN_KERNEL, ())[:1], shapes.get("position/embedding", ())[:-1]
    if not (mixed or rows):
        if wanted is None:
            raise CheckpointError("has no position embedding to tell its resolution: pass image_size=")
        return wanted
    probe = _probe(fields)
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
    """Return a config that is used for its derived properties only; its image is large enough for every patch."""
    return ViTConfig(**{**fields, "image_size": 2**20, **changes})


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number
