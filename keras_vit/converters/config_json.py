"""The config.json beside a checkpoint, both ways, by the [json] part of a format's table."""

from __future__ import annotations

import fnmatch
import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit._util.atomic import replacing
from keras_vit.converters.table import JsonFields, lookup
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig

LARGEST = 10 * 2**20  # an id2label of 21,843 classes takes 1.5 MB

# What is noted in the files that are written: by whom, and which file of weights they describe.
_OURS, _OF = "written_by", "weights"
_MISSING = object()


def read(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: where it is too large, damaged or no object.
    """
    size = path.stat().st_size
    if size > LARGEST:
        raise CheckpointError(f"{path} has {size:,} bytes; a config.json has at most {LARGEST:,}")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {str(error)[:200]}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not an object")
    return values


def facts(values: Mapping[str, Any], fields: JsonFields) -> dict[str, Any]:
    """What a config.json says, as fields of ViTConfig (nested ones as dicts).

    Raises:
        CheckpointError: for a spelling that is not known, or a model that is not read.
    """
    _refuse_unknown(values, fields)
    told = _told_by_name(str(_get(values, fields.name)), fields)
    for path, rule in fields.fields.items():
        name, _, step = (piece.strip() for piece in rule.partition("|"))
        value = _get(values, path)
        if value is _MISSING or value is None or step not in _READ_STEPS:
            continue
        try:
            value = _READ_STEPS[step](value)
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise CheckpointError(f"config.json: {path} cannot be {value!r:.200} ({error})") from error
        spellings = fields.values.get(name, {})
        if spellings:
            spelling = str(value).lower() if isinstance(value, bool) else str(value)
            if spelling not in spellings:
                raise CheckpointError(f"config.json: {path} is one of {list(spellings)}. Received: {value!r:.200}")
            meant = spellings[spelling]
            value = meant[0] if isinstance(meant, list) else meant
        _put(told, name, tuple(value) if isinstance(value, list) else value)
    return told


def write(config: ViTConfig, fields: JsonFields) -> dict[str, Any]:
    """The config.json of a model in the spelling of a format.

    Raises:
        CheckpointError: naming the fields whose values the format has no word for.
    """
    values: dict[str, Any] = {}
    ours = config.to_dict()
    for path, value in [*fields.constants.items(), *_kind(ours, fields).items()]:
        _put(values, path, value)
    homeless = []
    for path, rule in fields.fields.items():
        name, _, step = (piece.strip() for piece in rule.partition("|"))
        value = _WRITE_STEPS[step](_get(ours, name), config)
        spellings = fields.values.get(name, {})
        if spellings and value is not None:
            known = [spelling for spelling, meant in spellings.items() if value == meant or _is_one_of(value, meant)]
            if not known:
                homeless.append(f"{name}={value!r}")
                continue
            value = _unspelled(known[0])
        if value is not None and value is not _MISSING:
            _put(values, path, value)
    if homeless:
        raise CheckpointError(f"config.json has no word for {', '.join(homeless)}")
    return values


def _told_by_name(name: str, fields: JsonFields) -> dict[str, Any]:
    told: dict[str, Any] = {}
    architecture, _, _ = name.partition(".")  # the rest tells how it was trained
    for pattern, facts in fields.names.items():
        if fnmatch.fnmatchcase(architecture, pattern):
            if isinstance(facts, str):
                raise CheckpointError(f"config.json: {fields.name} {name!r:.200} is not read: {facts}")
            told |= facts
    return told


def _refuse_unknown(values: Mapping[str, Any], fields: JsonFields) -> None:
    """Raise where a config.json says what ViTConfig has no word for: the model would compute something else."""
    for path, accepted in fields.accepts.items():
        value = _get(values, path)
        if accepted and value is not _MISSING and value not in accepted:
            raise CheckpointError(f"config.json: {path} is read only as one of {accepted}. Received: {value!r:.200}")
    for parent in {path.rpartition(".")[0] for path in fields.accepts}:
        if f"{parent}.*" in fields.accepts:
            continue
        present = _get(values, parent)
        keys = present if isinstance(present, Mapping) else {}
        unknown = [key for key in keys if f"{parent}.{key}" not in {*fields.fields, *fields.accepts}]
        if unknown:
            raise CheckpointError(
                f"config.json: {parent} has {str(unknown)[:200]}, and nothing is known of such a model"
            )


def _kind(config: Mapping[str, Any], fields: JsonFields) -> Mapping[str, Any]:
    for kind in fields.kinds:
        fits = all(lookup(config, path) == value for path, value in kind.get("when", {}).items())
        if fits and not any(lookup(config, path) for path in kind.get("unless", ())):
            written: Mapping[str, Any] = kind["write"]
            return written
    return {}


def save(weights: Path, values: Mapping[str, Any], fields: JsonFields) -> None:
    """Writes the config.json of a file of weights, and what belongs into files beside it; each appears complete.

    Raises:
        CheckpointError: where this package did not write what is there: it belongs to another checkpoint.
    """
    signed = {_OURS: "keras_vit", _OF: weights.name}
    for path, part in _parts(weights.parent, values, fields):
        with replacing(path) as file:
            file.write(json.dumps({**part, **signed}, indent=2).encode())


def refuse_anothers(weights: Path, values: Mapping[str, Any], fields: JsonFields) -> None:
    """Raise where `save` would write over a file that this package did not write; warn where over one of its own."""
    for path, _ in _parts(weights.parent, values, fields):
        there = read(path) if path.is_file() else {_OURS: "keras_vit"}
        if there.get(_OURS) != "keras_vit":
            raise CheckpointError(f"{path} belongs to another checkpoint: write into a folder of its own")
        if _describes_another(there, weights):
            warnings.warn(
                f"keras_vit: {path} described {there[_OF]} and now describes {weights.name}: other readers will take "
                "one for the other. A folder of its own keeps them apart.",
                stacklevel=5,
            )


def beside(weights: Path, fields: JsonFields) -> dict[str, Any]:
    """What the config.json of a file of weights says; empty where there is none, or it is known to be another file's.

    Raises:
        CheckpointError: where it is damaged.
    """
    path = weights.parent / "config.json"
    values = read(path) if path.is_file() else {}
    if not values or _describes_another(values, weights):
        return {}
    others = {key: weights.parent / name for key, name in fields.beside.items()}
    return facts(values | {key: read(other) for key, other in others.items() if other.is_file()}, fields)


def _describes_another(values: Mapping[str, Any], weights: Path) -> bool:
    """Whether a config.json is of another file, which is there: one that is gone was renamed or rewritten."""
    described = Path(str(values.get(_OF, weights.name))).name
    return described != weights.name and (weights.parent / described).is_file()


def _parts(folder: Path, values: Mapping[str, Any], fields: JsonFields) -> list[tuple[Path, Mapping[str, Any]]]:
    """Each file that a config.json's values are written to, and its share."""
    own = {key: value for key, value in values.items() if key not in fields.beside}
    others = [(folder / name, values[key]) for key, name in fields.beside.items() if key in values]
    return [(folder / "config.json", own), *others]


def _unspelled(spelling: str) -> Any:
    """TOML's keys are texts; config.json has truths and numbers."""
    if spelling.isdecimal():
        return int(spelling)
    return {"true": True, "false": False}.get(spelling, spelling)


def _is_one_of(value: Any, meant: Any) -> bool:
    return isinstance(meant, list) and value in meant


def _as_is(value: Any, _: Any = None) -> Any:
    return value


def _over_hidden_size(value: Any, config: ViTConfig) -> float:
    return value / config.hidden_size


def _labels_of_numbers(value: Any) -> tuple[str, ...] | None:
    """The labels of {"0": "cat", "1": "dog"}; None where they are only numbered."""
    labels = tuple(str(value[str(number)]) for number in range(len(value)))
    return None if all(label == f"LABEL_{number}" for number, label in enumerate(labels)) else labels


def _numbers_of_labels(value: Any, config: ViTConfig) -> dict[str, str] | None:
    from keras_vit.model import labels

    if not config.num_classes:
        return None
    names = [label for _, label in labels.names(value, config.num_classes)] if value else None
    return {str(i): names[i] if names else f"LABEL_{i}" for i in range(config.num_classes)}


def _labels_to_numbers(value: Any, config: ViTConfig) -> dict[str, int] | None:
    numbers = _numbers_of_labels(value, config)
    return None if numbers is None else {label: int(number) for number, label in numbers.items()}


def _square_or_list(value: Any, _: Any) -> Any:
    return value[0] if value[0] == value[1] else list(value)


def _after_channels(value: Any) -> list[int]:
    _, height, width = value
    return [height, width]


def _before_channels(value: Any) -> list[int]:
    height, width, _ = value
    return [height, width]


def _pooling(value: Any) -> str:
    """The pooling of Keras Hub's ViTImageClassifier."""
    if value["pooling"] == "gap" and value["backbone"]["config"]["use_class_token"]:
        raise ValueError("its mean takes in the class token, which keras_vit's does not")
    return str(value["pooling"])


def _image_converter(value: Any) -> dict[str, Any]:
    """Keras Hub's ImageConverter, pixel * scale + offset for pixels of 0 to 255, as fields of Preprocessing."""
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


def _channels_first(value: Any, config: ViTConfig) -> list[int]:
    return [config.num_channels, *value]


def _one_for_all(value: Any) -> list[float]:
    """The mean or standard deviation of each channel; one where all agree."""
    return value[:1] if len(set(value)) == 1 else list(value)


def _one_a_channel(value: Any, config: ViTConfig) -> list[float]:
    return list(value) * (config.num_channels if len(value) == 1 else 1)


def _share(value: Any) -> float:
    if not 0 < float(value) <= 1 or not math.isfinite(value):
        raise ValueError("a share lies in (0, 1]")
    return float(value)


_READ_STEPS: dict[str, Callable[[Any], Any]] = {  # a path with another step is only written
    "": _as_is,
    "square or list": _as_is,
    "numbered": _labels_of_numbers,
    "channels first": _after_channels,
    "channels last": _before_channels,
    "pooling": _pooling,
    "image converter": _image_converter,
    "each channel": _one_for_all,
    "share": _share,
}
_WRITE_STEPS: dict[str, Callable[[Any, ViTConfig], Any]] = {
    "": _as_is,
    "square or list": _square_or_list,
    "numbered": _numbers_of_labels,
    "to numbers": _labels_to_numbers,
    "channels first": _channels_first,
    "written": _as_is,
    "over hidden_size": _over_hidden_size,
    "each channel": _one_a_channel,
    "share": _as_is,
}


def _get(values: Mapping[str, Any], path: str | None) -> Any:
    value: Any = values
    for key in (path or "").split("."):
        if not isinstance(value, Mapping) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values[last] = value
