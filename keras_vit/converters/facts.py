"""Facts of a checkpoint that no tensor states: told by another file, asked for, or assumed with a warning.

`unstated` in a format's table has rules for them; docs/load-and-convert.md prints them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from keras_vit._util import files
from keras_vit.converters.table import Table
from keras_vit.errors import CheckpointError
from keras_vit.model.config import Preprocessing, ResNetConfig, ViTConfig, check_fields

# Metadata of a file: the note, fields that its format has no place for. Other readers ignore it.
NOTE_KEY = "keras_vit"
# What files do not always say about the preparation of images: mean, deviation, crop and filter.
PREPARATION = ("mean", "std", "resize", "crop_fraction", "interpolation")
KINDS = ("asked", "assumed", "may_be")  # of a rule
# Fields that describe no network: a config.json that states nothing else leaves the network undescribed.
_NO_NETWORK = {"preprocessing", "labels", "image_size"}


@dataclass(frozen=True)
class KnownFields:
    """Fields of ViTConfig that are known about a file besides its tensors' shapes.

    What the caller states overrides the file's note, which overrides tensors that only some configs have, which
    override the files beside it; the caller's architecture (`expected`) counts where none of these states a field, and
    what is then still open is asked for or assumed as the format's table says.
    """

    row_fields: Mapping[str, Any] = field(default_factory=dict)  # implied by the presence of tensors
    json_fields: Mapping[str, Any] = field(default_factory=dict)  # stated in its config.json
    recorded_fields: Mapping[str, Any] = field(default_factory=dict)  # noted by keras_vit, if it wrote the file
    caller_fields: Mapping[str, Any] = field(default_factory=dict)  # stated by the caller
    expected: Mapping[str, Any] = field(default_factory=dict)  # of the caller's architecture; if nothing else states it
    image_size: Any = None  # that the caller wants; used for files that do not state their own

    @property
    def is_described(self) -> bool:
        """Whether a config.json or a note says what the tensors do not."""
        return bool(self.recorded_fields or self.json_fields.keys() - _NO_NETWORK)

    @property
    def stated(self) -> dict[str, Any]:
        """Fields that a file or the caller states; those of preprocessing also as "preprocessing.mean"."""
        sources = (self.json_fields, self.row_fields, self.recorded_fields, self.caller_fields)
        fields = {name: value for source in sources for name, value in source.items()}
        for source in sources:
            value = source.get("preprocessing")
            parts = vars(value) if isinstance(value, Preprocessing) else value
            fields |= {f"preprocessing.{name}": part for name, part in (parts or {}).items()}
        return fields


def asked_for(table: Table, fields: Mapping[str, Any], *, is_described: bool = False) -> list[str]:
    """List the fields that must be stated of a file with these fields; refuse one that may be another model."""
    if not is_described and (others := _rules(table, fields, "may_be")):
        raise CheckpointError(
            f"has no config.json and may be {others[0]}: a model of the same tensors that is not in this package. "
            "Put its config.json beside the file"
        )
    return list(dict.fromkeys(name for names in _rules(table, fields, "asked") for name in names))


def assumed_of(table: Table, fields: Mapping[str, Any]) -> list[str]:
    """List the fields that are assumed of a file with these fields; one of preprocessing is "preprocessing.mean"."""
    names = [name for names in _rules(table, fields, "assumed") for name in names]
    parts = [f"preprocessing.{part}" for part in PREPARATION if "preprocessing" in names]
    return list(dict.fromkeys([*(name for name in names if name != "preprocessing"), *parts]))


def _rules(table: Table, fields: Mapping[str, Any], kind: Literal["asked", "assumed", "may_be"]) -> list[Any]:
    """List what the rules have under a key, of those whose conditions a file with these fields meets."""
    met = [rule for rule in table.unstated if all(_meets(fields.get(key), rule[key]) for key in {*rule} - {*KINDS})]
    return [rule[kind] for rule in met if kind in rule]


def _meets(value: Any, condition: Any) -> bool:
    """Check a field against a rule's value: true is any value but false, 0 and None."""
    return bool(value) is condition if isinstance(condition, bool) else bool(value == condition)


def check_asked(table: Table, stated: Mapping[str, Any], asked: Sequence[str]) -> None:
    """Raise if neither a file nor the caller states a field that the tensors of a format do not tell."""
    if unknown := [name for name in asked if name not in stated]:
        pairs = ", ".join(f"'{name}': ..." for name in unknown)
        raise CheckpointError(
            f"is in {table.format} format, whose tensors do not say {', '.join(unknown)}, and has no config.json that "
            f"does: pass config={{{pairs}}} to converters.load "
            f"({' '.join(f'--config {name}=...' for name in unknown)})"
            + ", or name the architecture, which says it: zoo.load('ViT-S/16', weights=FILE)"
            * (unknown == ["num_heads"])
        )


def describe_labels(file: Path, config: ViTConfig, known_fields: KnownFields) -> str:
    """Say that stated names of classes are left out, because there are not as many as classes; "" if they fit."""
    labels = known_fields.stated.get("labels")
    if not config.num_classes or not labels or isinstance(labels, str) or len(labels) == config.num_classes:
        return ""
    return (
        f"keras_vit: {file.name}: {len(labels)} names of classes are stated for its {config.num_classes} classes, and "
        f"none is taken: {list(labels[:3])} ... State them in the order of the logits as labels in config"
    )


def describe_assumed(file: Path, table: Table, config: ViTConfig, known_fields: KnownFields) -> str:
    """Name the fields that nobody states, and that most files of a format have in common, with values; "" for none."""
    if known_fields.recorded_fields:  # the note has what is unlike most files
        return ""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    known = {name for name, value in known_fields.expected.items() if fields.get(name) == value}
    known |= known_fields.stated.keys()
    has_grid = config.position == "learned" or config.relative_bias != "none" or config.tokens_mlp_dim is not None
    has_default = "image_size" in table.defaults and known_fields.image_size is None
    if "image_size" in known or not (has_grid or has_default):
        known |= {"image_size", "position_prefix"}
    names = [name for name in assumed_of(table, fields) if name not in known]
    parts = {part: getattr(config.preprocessing, part) for part in PREPARATION if f"preprocessing.{part}" in names}
    values = [f"{name}={fields[name]!r}" for name in names if name in fields]
    values += [f"preprocessing={parts}"] if parts else []
    if not values:
        return ""
    missing = "does not say everything" if known_fields.is_described else "is missing"
    return (
        f"keras_vit: {file.name}: its {table.json.file if table.json else 'config.json'} {missing}: "
        f"{', '.join(values)} is assumed, as most {table.format} files have it. "
        "State what differs in config, the facts of the file"
    )


def merge_fields(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Merge fields; later sources override earlier ones. preprocessing and resnet are merged field by field."""
    merged: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            earlier = merged.get(name)
            if isinstance(earlier, Preprocessing | ResNetConfig) and isinstance(value, Mapping):
                value = dataclasses.replace(earlier, **value)
            merged[name] = value
    return merged


def read_note(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Read the fields of ViTConfig in a file's note; raise a CheckpointError if the note is damaged."""
    try:
        fields = files.parse_object(metadata.get(NOTE_KEY, "{}"))
        check_fields(fields)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"has a damaged note of its config: {str(error)[:200]}") from error
    return fields


def to_facts(config: ViTConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert facts about a file to a dict."""
    if not isinstance(config, ViTConfig | Mapping | None):
        raise ValueError(f"config must be a ViTConfig or a dict of its fields. Received: {config!r:.200}")
    return config.to_dict() if isinstance(config, ViTConfig) else dict(config or {})
