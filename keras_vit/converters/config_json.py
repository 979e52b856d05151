"""Read and write the config.json beside a checkpoint; `json_configs` has the readers and writers of each program."""

import contextlib
import fnmatch
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keras_vit._util.checks import is_count, pair
from keras_vit._util.files import MAX_JSON_BYTES, is_own, parse_object, writing_result
from keras_vit._util.text import warn
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig

# A config.json may differ from the tensors in these: how the head pools, and which head it is.
_NOT_COMPARED = {"classifier", "layer_scale", "representation_size"}
# Keys that keras_vit adds to the files it writes: who wrote it, and which file of weights it describes.
_WRITTEN_BY, _WEIGHTS = "written_by", "weights"
_KERAS_HUB = ("ViTBackbone", "ViTImageClassifier")  # the classes that are read
ADAPTER = "adapter_config.json"
PROCESSOR, _PROCESSORS = "preprocessor_config.json", "processor_config.json"

Json = Mapping[str, Any]
Fields = dict[str, Any]
# Key of an object -> its field; or (field, {spelling: value}), of which the first spelling of a value is written; or
# (field, function of what the key has), which is only read.
Keys = Mapping[str, str | tuple[str, Mapping[Any, Any] | Callable[[Any], Any]]]


class JsonConfig(NamedTuple):
    """Reader and writer of a program's config.json."""

    read: Callable[[Json], Fields]  # object in the file -> fields of the config, nested ones as dicts
    write: Callable[[ViTConfig], Fields] | None = None  # the inverse; None: such files are only read
    beside: Mapping[str, str] = {}  # key -> .json file in the same folder that holds its value
    file: str = "config.json"
    others: Mapping[str, Callable[[Json], Fields]] = {}  # .json files that are read where `file` is missing
    is_resized: bool = False  # whether the positions of its models are resized to the image size that it states


# ---- files


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; raise a CheckpointError if it is too large, damaged, or not an object."""
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes; a config.json has at most {MAX_JSON_BYTES:,}")
    try:
        return parse_object(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} {error}") from error


def read_beside(weights: Path, json_config: JsonConfig) -> dict[str, Any]:
    """Read the config.json beside a file; {} if there is none, or that of another file."""
    path = weights.parent / json_config.file
    values = read_object(path) if path.is_file() else {}
    if _describes_other_file(values, weights):
        return {}
    others = {key: _read_other(weights.parent / name) for key, name in json_config.beside.items()}
    others = {key: other for key, other in others.items() if other}
    if not (values or others):
        found = ((weights.parent / name, read) for name, read in json_config.others.items())
        return next((read(read_object(path)) for path, read in found if path.is_file()), {})
    return json_config.read(values | others)


def _read_other(path: Path) -> dict[str, Any]:
    """Read a file beside the config.json; {} if there is none."""
    if path.name == PROCESSOR:
        return read_processor(path.parent)
    return read_object(path) if path.is_file() else {}


def check_folder(weights: Path) -> None:
    """Raise if a file beside the weights says that these are no such model: quantized, of Keras Hub, an adapter."""
    path = weights.parent / "config.json"
    values = read_object(path) if path.is_file() else {}
    if (stated := part(values, "quantization_config")) and not _describes_other_file(values, weights):
        flags = [key for key, value in stated.items() if value is True and key.startswith("load_in_")]
        method = stated.get("quant_method") or ("bitsandbytes" if flags else "a method that it does not name")
        raise CheckpointError(
            f"{path} has a quantization_config: the weights were quantized by {' '.join([str(method)[:100], *flags])}, "
            "and only floats are read. In transformers: model = model.dequantize(), then model.save_pretrained(folder)"
        )
    program, _, kind = str(values.get("registered_name")).partition(">")
    if program == "keras_hub" and kind not in _KERAS_HUB and not _describes_other_file(values, weights):
        raise CheckpointError(
            f"{path} describes a {kind[:100]} of Keras Hub, of whose classes {' and '.join(_KERAS_HUB)} are read. The "
            "same weights in Hugging Face's or timm's files are read: zoo.load('facebook/dinov2-base'), "
            "zoo.load('facebook/deit-base-patch16-224') and the like"
        )
    if (weights.parent / ADAPTER).is_file() and weights.name.startswith("adapter_model."):
        base = read_object(weights.parent / ADAPTER).get("base_model_name_or_path")
        raise CheckpointError(
            f"{weights} is an adapter of peft alone: put it and its {ADAPTER} into the folder of its base, "
            f"{str(base)[:200]!r}, which is then loaded with the adapter"
        )


def read_processor(folder: Path) -> dict[str, Any]:
    """Read the object of a folder's image processor; {} if there is none.

    transformers 5 writes the processors of a pair into one file, which counts before the other.
    """
    for name, key in ((_PROCESSORS, "image_processor"), (PROCESSOR, None)):
        values = read_object(folder / name) if (folder / name).is_file() else {}
        if found := dict(part(values, key) if key else values):
            return found
    return {}


def read_crop(weights: Path) -> tuple[int, int] | None:
    """Read the (height, width) to which the image processor beside a file of weights crops images."""
    values = read_processor(weights.parent)
    crop = values.get("crop_size") if values.get("do_center_crop", True) else None
    sides = [crop.get("height"), crop.get("width")] if isinstance(crop, Mapping) else [crop, crop]
    height, width = (side if is_count(side, least=1) else 0 for side in sides)
    return (height, width) if height and width else None


def save(weights: Path, values: Mapping[str, Any], json_config: JsonConfig) -> None:
    """Write the config.json of a file of weights, and the other JSON files of its format; each appears complete."""
    for path, part in _parts(weights.parent, values, json_config):
        with writing_result(path) as file:
            file.write(json.dumps({**part, _WRITTEN_BY: "keras_vit", _WEIGHTS: weights.name}, indent=2).encode())


def check_overwrite(weights: Path, values: Mapping[str, Any], json_config: JsonConfig) -> None:
    """Raise if `save` would overwrite a file of another program; warn if keras_vit wrote the file for other weights."""
    for path, _ in _parts(weights.parent, values, json_config):
        if not path.exists():
            continue
        if not is_own(path):
            raise CheckpointError(f"{path} belongs to another checkpoint: write into a folder of its own")
        if _describes_other_file(present := read_object(path), weights):
            warn(
                f"keras_vit: {path} described {present[_WEIGHTS]} and now describes {weights.name}: other readers "
                "would load the wrong config. Write each checkpoint into its own folder."
            )


def _describes_other_file(values: Mapping[str, Any], weights: Path) -> bool:
    """Check whether a config.json describes another file that exists (a missing one was renamed to this one)."""
    described = Path(str(values.get(_WEIGHTS, weights.name))).name
    # Compared with the names in the folder: the described one may be no possible name.
    return described != weights.name and any(file.name == described for file in weights.parent.iterdir())


def _parts(folder: Path, values: Mapping[str, Any], json_config: JsonConfig) -> list[tuple[Path, Mapping[str, Any]]]:
    """Split a config.json's values into the files that they are written to."""
    own = {key: value for key, value in values.items() if key not in json_config.beside}
    others = [(folder / name, values[key]) for key, name in json_config.beside.items() if key in values]
    return [(folder / "config.json", own), *others]


# ---- the keys of an object


def part(values: Any, key: str) -> Mapping[str, Any]:
    """Get the object at a key of an object; {} if there is none."""
    value = values.get(key) if isinstance(values, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def read_keys(values: Any, keys: Keys, place: str = "") -> Fields:
    """Convert the keys of an object to fields; raise for an unknown value. A missing key or null states nothing."""
    fields: Fields = {}
    for key, rule in keys.items():
        name, meaning = (rule, None) if isinstance(rule, str) else rule
        value = values.get(key) if isinstance(values, Mapping) else None
        if value is None:
            continue
        if isinstance(meaning, Mapping):
            known = [spelled for spelled in meaning if spelled == value and type(spelled) is type(value)]
            if not known:
                received = f"Received: {value!r:.200}"
                raise CheckpointError(f"config.json: {place}{key} must be one of {list(meaning)}. {received}")
            value = meaning[known[0]]
        elif meaning is not None:
            try:
                value = meaning(value)
            except CheckpointError:
                raise
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                received = f"{value!r:.200} ({error!s:.200})"
                raise CheckpointError(f"config.json: {place}{key} cannot be {received}") from error
        fields[name] = tuple(value) if isinstance(value, list) else value
    return fields


def check_keys(values: Any, accepted: Mapping[str, Sequence[Any]], place: str, keys: Keys | None = None) -> None:
    """Raise if a key has a value that is not accepted (of () all are), or, with `keys`, if there are other keys."""
    for key, choices in accepted.items():
        if choices and key in values and values[key] not in choices:
            received = f"Received: {values[key]!r:.200}"
            raise CheckpointError(f"config.json: {place}.{key} is read only as one of {choices}. {received}")
    if keys is not None and (unknown := [key for key in values if key not in {*keys, *accepted}]):
        raise CheckpointError(f"config.json: {place} has unknown keys {str(unknown)[:200]}; such a model is not read")


def write_keys(config: Any, keys: Keys) -> Fields:
    """Convert a config to the keys of an object; None is left out, and equal sides are one number."""
    values: Fields = {}
    for key, rule in keys.items():
        name, meaning = (rule, None) if isinstance(rule, str) else rule
        value = getattr(config, name)
        if isinstance(meaning, Mapping):
            value = spell(name, value, meaning)
        if value is None or callable(meaning):
            continue
        is_list = isinstance(value, tuple)
        values[key] = list(value) if is_list and len(set(value)) > 1 else value[0] if is_list else value
    return values


def spell(name: str, value: Any, meaning: Mapping[Any, Any]) -> Any:
    """Find the first spelling of a field's value; raise a CheckpointError if there is none."""
    for spelled, meant in meaning.items():
        if meant == value:
            return spelled
    raise CheckpointError(f"config.json cannot express {name}={value!r:.200}")


def implied_fields(key: str, name: Any, names: Mapping[str, Fields | str]) -> Fields:
    """Look up the fields that a model's name implies.

    Of several patterns that match, the last wins: fields, or a text that says why such a model is not read.
    """
    fields: Fields = {}
    refusal = None
    for pattern, implied in names.items():
        if fnmatch.fnmatchcase(str(name).partition(".")[0], pattern):  # the rest says how it was trained
            refusal = implied if isinstance(implied, str) else None
            fields |= {} if isinstance(implied, str) else implied
    if fields.get("rotary_theta") == "none":  # TOML has no null
        fields["rotary_theta"] = None
    if refusal:
        raise CheckpointError(f"config.json: {key} {name!r:.200} is not read: {refusal}")
    return fields


def channel_values(value: Any) -> list[float]:
    """Shorten a mean or a deviation with equal values to one, as in ViTConfig."""
    return list(value[:1] if len(set(value)) == 1 else value)


def per_channel(value: tuple[float, ...], config: ViTConfig) -> list[float]:
    """Repeat a mean or a deviation for each channel."""
    return list(value) * (config.num_channels if len(value) == 1 else 1)


def accept_any(names: str) -> Fields:
    """Accept keys with any value: it changes nothing, or the tensors state it too."""
    return dict.fromkeys(names.split(), ())


def accept_only(value: Any, names: str) -> Fields:
    """Accept keys with one value only."""
    return dict.fromkeys(names.split(), [value])


def fraction(value: Any) -> float:
    """Check that a number is in (0, 1]."""
    if not 0 < float(value) <= 1 or not math.isfinite(value):
        raise ValueError("a fraction must be in (0, 1]")
    return float(value)


def sides_of(shape: Any, first: int) -> list[int]:
    """Take the two sides of a shape of three axes, from index `first` on."""
    if len(shape) != 3:
        raise ValueError("a shape has three axes")
    return [shape[first], shape[first + 1]]


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


def fitting_labels(labels: Any, num_classes: int) -> str | tuple[str, ...] | None:
    """Return the names of classes in a config.json if there is one for each class."""
    if labels is None or isinstance(labels, str):
        return labels
    if not isinstance(labels, list | tuple) or not all(isinstance(label, str) for label in labels):
        raise ValueError(f"labels are texts. Received: {labels!r:.200}")
    return tuple(labels) if len(labels) == num_classes else None


# ---- models saved as .keras


def check_keras_facts(**facts: Any) -> None:
    """Raise a ValueError if facts about a .keras file are given."""
    if stated := [f"{name}={value!r:.200}" for name, value in facts.items() if value is not None]:
        raise ValueError(f"A .keras file states everything itself. Received: {', '.join(stated)}")


@contextlib.contextmanager
def keras_errors(path: Path) -> Iterator[None]:
    """Replace errors of what a .keras file describes by a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: does not describe a valid model: {str(error)[:500]}") from error


def saved_arguments(values: Mapping[str, Any], kind: str = "VisionTransformer") -> dict[str, Any]:
    """Read the arguments of `from_config` in a .keras file's config.json; of a dtype policy only the name is used."""
    if values.get("registered_name") != f"keras_vit>{kind}":
        raise CheckpointError(
            f"does not contain a {kind}. Received: {values.get('class_name')!r:.100}; keras.saving.load_model opens it"
        )
    return plain_arguments(values.get("config"), kind)


def plain_arguments(stored: Any, kind: str) -> dict[str, Any]:
    """Check the saved result of a class's `get_config`, and replace the dtype policy by its name."""
    match stored:
        case {"config": dict(), "dtype": {"config": {"name": str(policy)}}, "name": str()}:
            return {**stored, "dtype": policy}
    raise CheckpointError(f"has a config.json that is not a {kind}'s")
