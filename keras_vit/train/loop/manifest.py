"""What a checkpoint says of itself, by which damage and another run's checkpoint are told from the right one."""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from keras_vit.train.loop import storage

FILE = "manifest.json"
CHUNK = 1 << 20
ABSENT = "(not there)"


class DamagedError(Exception):
    """A checkpoint is not what was saved; the message says why."""


def write(folder: str, content: Mapping[str, Any], files: list[str]) -> None:
    """Writes the manifest of a checkpoint, durably, after its other files.

    Args:
        folder: That of the checkpoint.
        content: What is to be known of it, as JSON: `"step"`, and whatever else.
        files: Paths of its other files.
    """
    entries = {path.rpartition("/")[2]: _fingerprint(path) for path in files}
    whole = {**content, "files": entries}
    text = json.dumps({"content": whole, "sha256": _digest(whole)})
    storage.replace(f"{folder}/{FILE}", text.encode() + b"\n")


def verified(folder: str, step: int) -> dict[str, Any]:
    """Reads the manifest of a checkpoint and holds all files against it, byte for byte.

    Args:
        folder: That of the checkpoint.
        step: What it is the checkpoint of, by its name.

    Returns:
        What was given to `write` as `content`.

    Raises:
        DamagedError: Something is missing, another step's, or not what was saved.
    """
    content = _read(f"{folder}/{FILE}")
    if content["step"] != step:
        raise DamagedError(f"its files are those of step {content['step']}")
    for name, expected in content["files"].items():
        try:
            actual = _fingerprint(f"{folder}/{name}")
        except tf.errors.OpError as error:
            raise DamagedError(f"{name} cannot be read ({_kind(error)})") from error
        if actual["bytes"] != expected["bytes"]:
            raise DamagedError(f"{name} has {actual['bytes']:,} bytes, {expected['bytes']:,} were saved")
        if actual != expected:
            raise DamagedError(f"{name} is not what was saved (its SHA-256 differs)")
    return content


def differences(then: Mapping[str, Any], now: Mapping[str, Any], ignored: Collection[str] = ()) -> list[str]:
    """Compares nested mappings.

    Args:
        then: What was saved.
        now: What is.
        ignored: Dotted names that may differ, with all that is below them.

    Returns:
        A line for each dotted name whose value is another.
    """
    before, after = _flat(then), _flat(now)
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = (json.dumps(flat[name]) if name in flat else ABSENT for flat in (before, after))
        if old != new and not any(f"{name}.".startswith(f"{other}.") for other in ignored):
            lines.append(f"{name}: {old} then, {new} now")
    return lines


def _read(path: str) -> dict[str, Any]:
    try:
        manifest = json.loads(storage.read(path))
        content: dict[str, Any] = manifest["content"]
        stated = manifest["sha256"]
    except tf.errors.OpError as error:
        raise DamagedError(f"{FILE} cannot be read ({_kind(error)})") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedError(f"{FILE} is not what was saved ({type(error).__name__})") from error
    if stated != _digest(content):
        raise DamagedError(f"{FILE} is not what was saved (its SHA-256 differs)")
    return content


def _kind(error: tf.errors.OpError) -> str:
    return type(error).__name__.removesuffix("Error")  # TensorFlow's messages name the path, which is known


def _fingerprint(path: str) -> dict[str, Any]:
    sha256, size = hashlib.sha256(), 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while chunk := file.read(CHUNK):
            sha256.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": sha256.hexdigest()}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        inner = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return flat
