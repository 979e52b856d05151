"""The architecture of a checkpoint: from the shapes of its tensors, and from whatever tells what they cannot."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keras_vit._util.checks import pair
from keras_vit.converters.table import Table
from keras_vit.errors import CheckpointError
from keras_vit.model.config import Preprocessing, ResNetConfig, ViTConfig, check_fields

Shapes = Mapping[str, tuple[int, ...]]

_NEEDED = {"embedding/kernel": (4,), "block_0/mlp/dense1/kernel": (2,), "block_0/attention/query/kernel": (2, 3)}
_LAYER_SCALE = 1e-5  # no file states where its scales started; the usual value
# A config.json may say otherwise than the tensors: pooling, and what becomes of the head.
_NOT_CHECKED = {"classifier", "layer_scale", "representation_size"}


@dataclass(frozen=True)
class Told:
    """What is said of a file beside its tensors, the later before the earlier.

    Attributes:
        presence: by the presence of tensors.
        json: by a config.json.
        record: by this package, when it wrote the file.
        caller: by the caller.
        num_heads: of the architecture that the caller takes it for, where nothing else says.
        wanted_size: the image size the caller wants, for files that no grid can be told of.
    """

    presence: Mapping[str, Any] = field(default_factory=dict)
    json: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    caller: Mapping[str, Any] = field(default_factory=dict)
    num_heads: int | None = None
    wanted_size: Any = None


def infer(shapes: Shapes, table: Table, told: Told) -> ViTConfig:
    """The config a file was trained with.

    Args:
        shapes: of the file's tensors as variables, the heads apart where the file keeps them so.
        table: of the format: what the format means where nothing else says.
        told: what else is known.

    Raises:
        CheckpointError: where the tensors are no Vision Transformer's, contradict what is told, or something must
            be told.
        ValueError: where the caller names a field that there is not.
    """
    check_fields(told.caller)
    for name, ranks in _NEEDED.items():
        if len(shapes.get(name, ())) not in ranks or 0 in shapes[name]:
            raise CheckpointError(
                f"is no Vision Transformer in {table.format} format: {name} would have {ranks} axes. "
                f"Received: {shapes.get(name, 'no tensor for it')}"
            )
    try:
        return _inferred(shapes, table, told)
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"describes no model that can be built: {str(error)[:500]}") from error


def _inferred(shapes: Shapes, table: Table, told: Told) -> ViTConfig:
    seen = from_tensors(shapes)
    # What a format never leaves out is missing where it is not there: it does not tell of another architecture.
    seen |= {name: value for name, value in table.config.items() if name in seen}
    _refuse_contradiction(seen, told.json)
    if seen["layer_scale"] is not None:
        seen["layer_scale"] = told.json.get("layer_scale", seen["layer_scale"])
    json = {name: value for name, value in told.json.items() if name not in seen or name == "classifier"}
    absent = [facts for variable, facts in table.without.items() if variable not in shapes]
    said = {**json, **told.record, **told.caller}
    fields = _merged(table.config, table.defaults, *absent, seen, told.presence, said)
    fields["num_heads"] = _num_heads(shapes, table, said.get("num_heads"), told.num_heads)
    fields["resnet"] = _resnet(shapes, fields.get("resnet"))
    if said.get("resnet") and not fields["resnet"]:
        raise CheckpointError("is said to be a hybrid, and has no tensors of a ResNet")
    if fields["classifier"] == "token" and fields.get("final_norm") == "pooled" and "classifier" not in said:
        raise CheckpointError(
            "does not say whether its last norm is of the class token or of the mean: "
            "pass config={'classifier': 'token' or 'gap'}"
        )
    if fields["classifier"] == "unpooled" and fields["class_token"]:
        fields["classifier"] = "token_unpooled"
    fields["labels"] = _labels(fields.get("labels"), fields["num_classes"])
    fields["position_prefix"] = _position_prefix(shapes, fields)
    fields["image_size"] = _image_size(shapes, fields, told)
    return ViTConfig(**fields)


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The layers one over the other; of preprocessing and resnet the parts that are told."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            below = merged.get(name)
            if isinstance(below, Preprocessing | ResNetConfig) and isinstance(value, Mapping):
                value = dataclasses.replace(below, **value)
            merged[name] = value
    return merged


def from_tensors(shapes: Shapes) -> dict[str, Any]:
    """The fields of ViTConfig that the shapes of a file's tensors tell."""
    height, width, channels, hidden_size = shapes["embedding/kernel"]
    class_token = "prefix/cls" in shapes
    return {
        "patch_size": (height, width),
        "hidden_size": hidden_size,
        "mlp_dim": shapes["block_0/mlp/dense1/kernel"][-1],
        "num_layers": len({name.split("/")[0] for name in shapes if name.startswith("block_")}),
        "num_classes": _side(shapes, "head/kernel", -1, 0),
        "representation_size": _side(shapes, "pre_logits/kernel", -1, None),
        "num_channels": _side(shapes, "root/conv/kernel", -2, channels),
        "classifier": "map" if "pool/probe" in shapes else "token" if class_token else "gap",
        "class_token": class_token,
        "distilled": "prefix/distillation" in shapes,
        "num_registers": _side(shapes, "prefix/registers", -2, 0),
        "patch_bias": "embedding/bias" in shapes,
        "qkv_bias": "block_0/attention/query/bias" in shapes,
        "pre_norm": "pre_norm/gamma" in shapes,
        "layer_scale": _LAYER_SCALE if "block_0/scale1/gamma" in shapes else None,
    }


def _side(shapes: Shapes, name: str, axis: int, otherwise: int | None) -> int | None:
    shape = shapes.get(name, ())
    return shape[axis] if len(shape) >= -axis else otherwise


def _refuse_contradiction(seen: Mapping[str, Any], json: Mapping[str, Any]) -> None:
    """Raise where a config.json says something else than the tensors: neither can be trusted then."""
    wrong = []
    for name in set(seen) & set(json) - _NOT_CHECKED:
        try:
            said = pair(json[name], name) if name == "patch_size" else json[name]
        except ValueError as error:
            raise CheckpointError(f"has a config.json in which {error}") from error
        if said != seen[name]:
            wrong.append(f"{name} {said!r:.80} where the tensors have {seen[name]!r}")
    if wrong:
        raise CheckpointError(f"has a config.json that says {'; '.join(sorted(wrong))}")


def _num_heads(shapes: Shapes, table: Table, said: int | None, guess: int | None) -> int:
    kernel = shapes["block_0/attention/query/kernel"]
    found = kernel[1] if len(kernel) == 3 else said if said is not None else guess
    if found is None:
        raise CheckpointError(
            f"is in {table.format} format, which does not say how many attention heads there are "
            f"(the width is {kernel[0]}): pass config={{'num_heads': ...}}"
        )
    if said not in (None, found):
        raise CheckpointError(f"has {found} attention heads. Received: num_heads={said}")
    return found


def _labels(labels: Any, num_classes: int) -> str | tuple[str, ...] | None:
    """The name of a list of labels, or labels of which there are as many as classes."""
    if labels is None or isinstance(labels, str):
        return labels
    if not isinstance(labels, list | tuple) or not all(isinstance(label, str) for label in labels):
        raise ValueError(f"labels are texts. Received: {labels!r:.200}")
    return tuple(labels) if len(labels) == num_classes else None


def _resnet(shapes: Shapes, numerics: ResNetConfig | None) -> ResNetConfig | None:
    if len(shapes.get("root/conv/kernel", ())) != 4:
        return None
    stages: dict[int, set[int]] = {}
    for name in shapes:
        unit = re.match(r"stage_(\d+)_unit_(\d+)/", name)
        if unit:
            stages.setdefault(int(unit[1]), set()).add(int(unit[2]))
    num_layers = tuple(len(stages[stage]) for stage in sorted(stages))
    width_factor = shapes["root/conv/kernel"][-1] / 64
    try:
        return dataclasses.replace(numerics or ResNetConfig(), num_layers=num_layers, width_factor=width_factor)
    except ValueError as error:
        raise CheckpointError(f"describes no ResNet that can be built: {error}") from error


def _position_prefix(shapes: Shapes, fields: Mapping[str, Any]) -> bool:
    """Whether the position embedding has rows for class token and registers, where the format leaves it open."""
    if "position_prefix" in fields or "position/embedding" not in shapes:
        return bool(fields.get("position_prefix", True))
    rows = math.prod(shapes["position/embedding"][:-1])
    prefix = _stand_in(fields, position_prefix=True).num_prefix_tokens
    if fields.get("image_size") is not None:
        height, width = _stand_in(fields, image_size=fields["image_size"]).grid
        return rows != height * width
    if prefix and _is_square(rows) == _is_square(rows - prefix):
        raise CheckpointError(
            f"does not say whether its {rows} position embeddings count {prefix} tokens in front: "
            "pass config={'position_prefix': True or False}"
        )
    return not _is_square(rows)


def _image_size(shapes: Shapes, fields: Mapping[str, Any], told: Told) -> Any:
    """The size the file was trained at: as told, or that of a square image that fills the position embedding."""
    if fields.get("image_size") is not None:
        return fields["image_size"]
    if "position/embedding" not in shapes:
        if told.wanted_size is None:
            raise CheckpointError("has no position embedding to tell its resolution: pass image_size=")
        return told.wanted_size
    probe = _stand_in(fields)
    tokens = math.prod(shapes["position/embedding"][:-1]) - probe.position_prefix_tokens
    if tokens < 1 or not _is_square(tokens):
        raise CheckpointError(
            f"its position embedding {shapes['position/embedding']} fills no square grid: "
            "pass config={'image_size': (height, width)} as it was trained"
        )
    side = math.isqrt(tokens)
    return side * probe.stride[0], side * probe.stride[1]


def _stand_in(fields: Mapping[str, Any], **changes: Any) -> ViTConfig:
    """A config for its derived properties, at a size that any patch fits in."""
    return ViTConfig(**{**fields, "image_size": 2**20, **changes})


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number
