"""The [json] part of a format's table: where a config.json has the fields of ViTConfig, and steps that convert them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from keras_vit._util.checks import check_counts
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig

_SIDES = ("height", "width")
_MOST_PIXELS = 4096  # of a side to which images are resized before they are cropped


class Step(NamedTuple):
    """The conversion of a value in both directions; None where a path is only written, or only read."""

    read: Callable[[Any], Any] | None  # value in the config.json -> value of the field
    write: Callable[[Any, ViTConfig], Any] | None  # (value of the field, config) -> value in the file; None omits it


def _same(value: Any, _: Any = None) -> Any:
    return value


def _labels_of_ids(value: Any) -> tuple[str, ...] | None:
    """Return the labels in {"0": "cat", "1": "dog"}; None if they are only numbers."""
    labels = tuple(str(value[str(number)]) for number in range(len(value)))
    return None if all(label == f"LABEL_{number}" for number, label in enumerate(labels)) else labels


def _ids_to_labels(value: Any, config: ViTConfig) -> dict[str, str] | None:
    from keras_vit.model import labels

    if not config.num_classes:
        return None
    names = [label for _, label in labels.names(value, config.num_classes)] if value else None
    return {str(i): names[i] if names else f"LABEL_{i}" for i in range(config.num_classes)}


def _labels_to_ids(value: Any, config: ViTConfig) -> dict[str, int] | None:
    ids = _ids_to_labels(value, config)
    return None if ids is None else {label: int(number) for number, label in ids.items()}


def _height_width(first: int) -> Callable[[Any], list[int]]:
    """Return a reader of the two sides in a shape of three axes; the first side is at this index."""

    def read(value: Any) -> list[int]:
        if len(value) != 3:
            raise ValueError("a shape has three axes")
        return [value[first], value[first + 1]]

    return read


def _pooling(value: Any) -> str:
    """Return the pooling of Keras Hub's ViTImageClassifier."""
    if value["pooling"] == "gap" and value["backbone"]["config"]["use_class_token"]:
        raise ValueError("its mean includes the class token, unlike keras_vit's")
    return str(value["pooling"])


def _image_converter(value: Any) -> dict[str, Any]:
    """Return Keras Hub's ImageConverter, pixel * scale + offset for pixels of 0 to 255, as fields of Preprocessing."""
    if value["pad_to_aspect_ratio"]:
        raise ValueError("images are padded, which keras_vit does not do")
    scale = 255 * np.atleast_1d(np.float64(1 if value["scale"] is None else value["scale"]))
    offset = np.atleast_1d(np.float64(0 if value["offset"] is None else value["offset"]))
    with np.errstate(all="raise"):
        mean, std = np.broadcast_arrays(-offset / scale, 1 / scale)
    return {
        "resize": "crop" if value["crop_to_aspect_ratio"] else "squash",
        "interpolation": value["interpolation"],
        "antialias": value["antialias"],
        "mean": tuple(mean.tolist()),
        "std": tuple(std.tolist()),
    }


def _processor(value: Any) -> dict[str, Any]:
    """Return the sizes in Hugging Face's preprocessor_config.json as fields of Preprocessing."""
    size, crop = value.get("size"), value.get("crop_size")
    if not size:
        return {}
    stated = {"shortest_edge": size} if isinstance(size, int) else size
    keys = ("shortest_edge",) if "shortest_edge" in stated else _SIDES
    if not (sides := [stated[key] for key in keys if key in stated]):
        raise ValueError(f"a size has one of {_SIDES} or shortest_edge")
    check_counts(**dict(zip(keys, sides, strict=False)))
    if max(sides) > _MOST_PIXELS:
        raise ValueError(f"images are resized to at most {_MOST_PIXELS} pixels")
    cropped = sides
    if crop and value.get("do_center_crop", True):
        cropped = [crop, crop] if isinstance(crop, int) else [crop[key] for key in _SIDES]
        check_counts(crop_size=min(cropped))
        cropped = cropped if len(sides) == 2 else [min(cropped)]
    share = _fraction(min(part / side for part, side in zip(cropped, sides, strict=True)))
    if any(math.floor(part / share + 1e-6) != side for part, side in zip(cropped, sides, strict=True)):
        raise ValueError("size and crop_size have the same aspect ratio")
    # An old file has a single number: of the sides that the format's table names.
    resize = {} if stated is not size else {"resize": "squash" if keys is _SIDES else "crop"}
    return {**resize, "crop_fraction": share}


def _processor_sizes(value: Any, config: ViTConfig) -> dict[str, Any]:
    sides = [math.floor(side / value["crop_fraction"] + 1e-6) for side in config.size]
    size = {"shortest_edge": min(sides)} if value["resize"] == "crop" else dict(zip(_SIDES, sides, strict=True))
    if value["resize"] == "squash" and value["crop_fraction"] == 1:
        return {"size": size}
    return {"size": size, "do_center_crop": True, "crop_size": dict(zip(_SIDES, config.size, strict=True))}


def _fraction(value: Any) -> float:
    if not 0 < float(value) <= 1 or not math.isfinite(value):
        raise ValueError("a fraction must be in (0, 1]")
    return float(value)


def _ratio(width: int, hidden_size: int) -> float:
    """Return a ratio r with int(r * hidden_size) == width, as timm computes the width of an MLP."""
    ratio = width / hidden_size
    return ratio if int(hidden_size * ratio) == width else math.nextafter(ratio, math.inf)


def _whole_ratio(width: int, config: ViTConfig) -> int:
    """Return Dinov2Config.mlp_ratio, an integer; a SwiGLU is 2/3 as wide, rounded up to a multiple of 8."""
    for ratio in range(1, 2 + 3 * width // config.hidden_size):
        full = ratio * config.hidden_size
        if width == ((int(full * 2 / 3) + 7) // 8 * 8 if config.gated_mlp else full):
            return ratio
    raise CheckpointError(f"config.json cannot express mlp_dim={width}: mlp_ratio must be an integer")


def _side(value: Any) -> int:
    if len(value) != 2 or value[0] != value[1]:
        raise ValueError("both sides are equal")
    return int(value[0])


STEPS = {
    # name in a table: read, write
    "": Step(_same, _same),
    "written": Step(None, lambda value, _: value or None),
    "written as it is": Step(None, _same),
    "square or list": Step(_same, lambda value, _: value[0] if value[0] == value[1] else list(value)),
    "numbered": Step(_labels_of_ids, _ids_to_labels),
    "to numbers": Step(None, _labels_to_ids),
    "channels first": Step(_height_width(1), lambda value, config: [config.num_channels, *value]),
    "channels last": Step(_height_width(0), None),
    "pooling": Step(_pooling, None),
    "image converter": Step(_image_converter, None),
    "processor sizes": Step(_processor, _processor_sizes),
    "ratios": Step(
        None, lambda value, config: [_ratio(width, config.hidden_size) for width in (value, config.mlp_dim)]
    ),
    "over hidden_size": Step(None, lambda value, config: _ratio(value, config.hidden_size)),
    "packed over hidden_size": Step(
        None, lambda value, config: _ratio(value * (1 + config.gated_mlp), config.hidden_size)
    ),
    "whole ratio": Step(None, _whole_ratio),
    # Configs with the end token 2, a word, take the largest id in a text (transformers/models/clip/modeling_clip.py).
    "end token": Step(lambda value: None if value == 2 else value, lambda value, _: 2 if value is None else value),
    "heads of a width": Step(lambda value: value["width"] // value.get("head_width", 64), None),  # open_clip/model.py
    "side": Step(
        lambda value: value if isinstance(value, int) else _side(value), lambda value, _: value and [value] * 2
    ),
    "with the query": Step(None, lambda value, config: value and config.qkv_bias),
    # One value for all channels is a list of one in ViTConfig, and one for each channel in the file.
    "each channel": Step(
        lambda value: value[:1] if len(set(value)) == 1 else list(value),
        lambda value, config: list(value) * (config.num_channels if len(value) == 1 else 1),
    ),
    "share": Step(_fraction, _same),
}


class JsonRule(NamedTuple):
    """A field of ViTConfig, dotted where it is nested, and the step of `STEPS` that converts its value."""

    field: str
    step: str


@dataclass(frozen=True)
class JsonFields:
    """The spelling of ViTConfig's fields in a config.json."""

    rules: Mapping[str, JsonRule]  # dotted path in the file -> its field and step
    # Field -> {spelling: value, or a list of values of which the first is read}; a value's first spelling is written.
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str | None = None  # dotted path of the model's name
    # Pattern of such a name -> fields (those of later patterns win), or the reason why such a model is not read.
    names: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)
    # Dotted path that is not a field of ViTConfig -> accepted values; [] accepts any. Other keys in the same object are
    # refused, because they could change what the model computes.
    accepts: Mapping[str, list[Any]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)  # dotted path -> value that is always written
    # Of the first row whose `when` holds and whose `unless` fields are not set, `write` is written too.
    kinds: tuple[Mapping[str, Any], ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)  # key -> .json file in the same folder that holds its value
    file: str = "config.json"  # its name
    pair: Mapping[str, Any] = field(default_factory=dict)  # what the config.json of an image and text pair has besides
    inside: str | None = None  # key of the object with the fields, in files that have it; others have them at the top

    @property
    def stated_fields(self) -> set[str]:
        """The fields of ViTConfig that this config.json can state."""
        return {rule.field.partition(".")[0] for rule in self.rules.values()}

    @classmethod
    def from_table(cls, raw: Mapping[str, Any]) -> Self:
        """Read the [json] part of a format's table."""
        rules = {
            path: JsonRule(*(part.strip() for part in f"{text}|".split("|")[:2]))
            for path, text in raw.get("fields", {}).items()
        }
        unknown = [rule.step for rule in rules.values() if rule.step not in STEPS]
        if unknown:
            raise ValueError(f"json.fields: the steps are {list(STEPS)[1:]}. Received: {unknown[0]!r:.200}")
        return cls(rules=rules, **{key: value for key, value in raw.items() if key != "fields"})
