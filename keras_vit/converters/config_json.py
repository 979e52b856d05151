"""Read and write the config.json beside a checkpoint, by the [json] part of a format's table, and the note in a file.

The note has the fields that a format has no place for, so that keras_vit reads back the same model. It is in the
metadata of a .safetensors file or in the archive comment of an .npz file, where other readers ignore it.
"""

import fnmatch
import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from keras_vit._util.atomic import replacing
from keras_vit._util.checks import is_count
from keras_vit._util.untrusted import MAX_JSON_BYTES, parse_object
from keras_vit.converters.json_steps import STEPS, JsonFields
from keras_vit.converters.table import lookup
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig, check_fields

# Keys that keras_vit adds to the files it writes: who wrote it, and which file of weights it describes.
_WRITTEN_BY, _WEIGHTS = "written_by", "weights"
KEY = "keras_vit"
ZERO_ROWS_KEY = "keras_vit_empty_rows"  # position rows of zeros were added, because the format has them
_MAX_LENGTH = 60_000  # a zip comment holds 65,535 bytes; longer lists of labels are left out
_MISSING = object()


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise a CheckpointError if it is too large, damaged, or not an object."""
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes; a config.json has at most {MAX_JSON_BYTES:,}")
    try:
        return parse_object(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} {error}") from error


def read_beside(weights: Path, spelling: JsonFields) -> dict[str, Any]:
    """Return the fields that the config.json beside a file states; {} if there is none, or that of another file."""
    path = weights.parent / spelling.file
    values = read_object(path) if path.is_file() else {}
    if not values or _describes_other_file(values, weights):
        return {}
    others = {key: weights.parent / name for key, name in spelling.beside.items()}
    return to_fields(values | {key: read_object(other) for key, other in others.items() if other.is_file()}, spelling)


def read_crop(weights: Path) -> tuple[int, int] | None:
    """Return the (height, width) to which the image processor beside a file of weights crops images, if it does."""
    path = weights.parent / "preprocessor_config.json"
    values = read_object(path) if path.is_file() else {}
    crop = values.get("crop_size") if values.get("do_center_crop", True) else None
    sides = [crop.get("height"), crop.get("width")] if isinstance(crop, Mapping) else [crop, crop]
    height, width = (side if is_count(side, least=1) else 0 for side in sides)
    return (height, width) if height and width else None


def to_fields(values: Mapping[str, Any], spelling: JsonFields) -> dict[str, Any]:
    """Convert the object in a config.json to fields of ViTConfig, nested ones as dicts; raise for an unknown value."""
    if spelling.inside and spelling.inside not in values:
        values = {**values, spelling.inside: values}
    _check_known(values, spelling)
    fields = _fields_of_name(str(lookup(values, spelling.name, _MISSING)), spelling)
    for path, (name, step) in spelling.rules.items():
        value, read = lookup(values, path, _MISSING), STEPS[step].read
        if value is _MISSING or value is None or read is None:
            continue
        try:
            value = read(value)
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise CheckpointError(f"config.json: {path} cannot be {value!r:.200} ({error!s:.200})") from error
        spellings = spelling.values.get(name, {})
        if spellings:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if text not in spellings:
                raise CheckpointError(f"config.json: {path} must be one of {list(spellings)}. Received: {value!r:.200}")
            value = spellings[text]
            value = value[0] if isinstance(value, list) else value
        _put(fields, name, tuple(value) if isinstance(value, list) else value)
    return fields


def to_json(config: Any, spelling: JsonFields) -> dict[str, Any]:
    """Convert a config to the object in a config.json; raise for values that the format cannot express."""
    values: dict[str, Any] = {}
    fields = config.to_dict()
    kind = _kind(fields, spelling)
    for path, value in [*spelling.constants.items(), *kind.get("write", {}).items()]:
        _put(values, path, value)
    unsupported = []
    for path, (name, step) in spelling.rules.items():
        write = STEPS[step].write
        if write is None:
            continue
        value = write(lookup(fields, name, _MISSING), config)
        spellings = spelling.values.get(name, {})
        if spellings and value is not None:
            known = [
                text for text, meant in spellings.items() if value in (meant if isinstance(meant, list) else [meant])
            ]
            if not known:
                unsupported.append(f"{name}={value!r:.200}")
                continue
            # A TOML key is always text; in a config.json it may be a boolean or a number.
            is_text = not known[0].isdecimal() and known[0] not in ("true", "false")
            value = known[0] if is_text else json.loads(known[0])
        if value is not None and value is not _MISSING:
            _put(values, path, value)
    if unsupported:
        raise CheckpointError(f"config.json cannot express {', '.join(unsupported)}")
    if kind.get("flat") and spelling.inside:
        values = {**values.pop(spelling.inside), **values}
    return values


def save(weights: Path, values: Mapping[str, Any], spelling: JsonFields) -> None:
    """Write the config.json of a file of weights, and the other JSON files of its format; each appears complete."""
    for path, part in _parts(weights.parent, values, spelling):
        with replacing(path) as file:
            file.write(json.dumps({**part, _WRITTEN_BY: "keras_vit", _WEIGHTS: weights.name}, indent=2).encode())


def check_overwrite(weights: Path, values: Mapping[str, Any], spelling: JsonFields) -> None:
    """Raise if `save` would overwrite a file of another program; warn if keras_vit wrote the file for other weights."""
    for path, _ in _parts(weights.parent, values, spelling):
        present = read_object(path) if path.is_file() else {_WRITTEN_BY: "keras_vit"}
        if present.get(_WRITTEN_BY) != "keras_vit":
            raise CheckpointError(f"{path} belongs to another checkpoint: write into a folder of its own")
        if _describes_other_file(present, weights):
            warnings.warn(
                f"keras_vit: {path} described {present[_WEIGHTS]} and now describes {weights.name}: other readers "
                "would load the wrong config. Write each checkpoint into its own folder.",
                stacklevel=4,
            )


def _describes_other_file(values: Mapping[str, Any], weights: Path) -> bool:
    """Return whether a config.json describes another file that exists (a missing one was renamed to this one)."""
    described = Path(str(values.get(_WEIGHTS, weights.name))).name
    # Compared with the names in the folder: the described one may be no possible name.
    return described != weights.name and any(file.name == described for file in weights.parent.iterdir())


def _parts(folder: Path, values: Mapping[str, Any], spelling: JsonFields) -> list[tuple[Path, Mapping[str, Any]]]:
    """Split a config.json's values into the files that they are written to."""
    own = {key: value for key, value in values.items() if key not in spelling.beside}
    others = [(folder / name, values[key]) for key, name in spelling.beside.items() if key in values]
    return [(folder / "config.json", own), *others]


def _fields_of_name(name: str, spelling: JsonFields) -> dict[str, Any]:
    """Return the fields that the model's name implies."""
    found: dict[str, Any] = {}
    architecture, _, _ = name.partition(".")  # the rest says how it was trained
    for pattern, fields in spelling.names.items():
        if fnmatch.fnmatchcase(architecture, pattern):
            if isinstance(fields, str):
                raise CheckpointError(f"config.json: {spelling.name} {name!r:.200} is not read: {fields}")
            found |= fields
    return found


def _check_known(values: Mapping[str, Any], spelling: JsonFields) -> None:
    """Raise if a config.json has an unknown key, which might change the model."""
    for path, accepted in spelling.accepts.items():
        value = lookup(values, path, _MISSING)
        if accepted and value is not _MISSING and value not in accepted:
            raise CheckpointError(f"config.json: {path} is read only as one of {accepted}. Received: {value!r:.200}")
    for parent in {path.rpartition(".")[0] for path in spelling.accepts}:
        present = lookup(values, parent, _MISSING)
        if f"{parent}.*" in spelling.accepts or not isinstance(present, Mapping):
            continue
        unknown = [key for key in present if f"{parent}.{key}" not in {*spelling.rules, *spelling.accepts}]
        if unknown:
            raise CheckpointError(
                f"config.json: {parent} has unknown keys {str(unknown)[:200]}; such a model is not read"
            )


def _kind(fields: Mapping[str, Any], spelling: JsonFields) -> Mapping[str, Any]:
    """Return the first matching row of [[json.kinds]]."""
    for kind in spelling.kinds:
        matches = all(lookup(fields, path) == value for path, value in kind.get("when", {}).items())
        if matches and not any(lookup(fields, path) for path in kind.get("unless", ())):
            return kind
    return {}


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    old = values.get(last, {})
    values[last] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value


def to_metadata(config: ViTConfig, inferred_config: ViTConfig, missing_fields: Collection[str] = ()) -> dict[str, str]:
    """Return the note: fields that differ from the config that a reader infers, and those it cannot infer."""
    ours, theirs = config.to_dict(), inferred_config.to_dict()
    fields = {name: value for name, value in ours.items() if value != theirs[name] or name in missing_fields}
    text = json.dumps(fields)
    if len(text) > _MAX_LENGTH:
        text = json.dumps({name: value for name, value in fields.items() if name != "labels"})
    return {KEY: text} if fields else {}


def from_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of ViTConfig that a file's metadata note; raise a CheckpointError if the note is damaged."""
    if KEY not in metadata:
        return {}
    try:
        fields = parse_object(metadata[KEY])
        check_fields(fields)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"has a damaged note of its config: {str(error)[:200]}") from error
    return fields
