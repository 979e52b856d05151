"""Manifest of a checkpoint: detects damage, and checkpoints of another run."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from keras_vit._util.schema import problems
from keras_vit.train.loop import storage

FILE = "manifest.json"
CHUNK = 1 << 20
_FILES = {"*": {"bytes": int, "sha256": str}}
SCHEMA = {"content": {"step": int, "facts": dict, "variables": dict, "files": _FILES}, "sha256": str}


class DamagedError(Exception):
    """A checkpoint differs from what was saved; the message says how."""


def write(folder: str, content: Mapping[str, Any], files: list[str]) -> None:
    """Write the manifest of a checkpoint durably, after its other files; `content` has "step" and other facts."""
    whole = {**content, "files": {path.rpartition("/")[2]: _fingerprint(path) for path in files}}
    text = json.dumps({"content": whole, "sha256": _digest(whole)})
    storage.replace(f"{folder}/{FILE}", text.encode() + b"\n")


def read(folder: str, step: int) -> dict[str, Any]:
    """Return the `content` of the manifest of a step, or raise a DamagedError; other files are not read."""
    try:
        manifest = json.loads(storage.read(f"{folder}/{FILE}"))
        problem = next(problems(manifest, SCHEMA, FILE), None)
        if problem is None and manifest["sha256"] != _digest(manifest["content"]):
            problem = "its SHA-256 differs"
    except tf.errors.OpError as error:
        raise _unreadable(FILE, error) from error
    except (ValueError, RecursionError) as error:
        problem = type(error).__name__
    if problem is not None:
        raise DamagedError(f"{FILE} is not what was saved ({problem[:200]})")
    content: dict[str, Any] = manifest["content"]
    if content["step"] != step:
        raise DamagedError(f"its files are those of step {content['step']}")
    return content


def verified(folder: str, step: int) -> dict[str, Any]:
    """Compare all files of a checkpoint with its manifest, byte for byte; return the `content` given to `write`."""
    content = read(folder, step)
    for name, expected in content["files"].items():
        if "/" in name:
            raise DamagedError(f"{FILE} is not what was saved (it names the file {name!r:.80})")
        try:
            actual = _fingerprint(f"{folder}/{name}")
        except tf.errors.OpError as error:
            raise _unreadable(name, error) from error
        if actual["bytes"] != expected["bytes"]:
            raise DamagedError(f"{name} has {actual['bytes']:,} bytes, {expected['bytes']:,} were saved")
        if actual != expected:
            raise DamagedError(f"{name} is not what was saved (its SHA-256 differs)")
    return content


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the JSON of both values for each dotted name that differs, "(not there)" for one that is missing."""
    before, after = _flat(then), _flat(now)
    pairs = {
        name: (before.get(name, "(not there)"), after.get(name, "(not there)"))
        for name in sorted(before.keys() | after.keys())
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _unreadable(name: str, error: tf.errors.OpError) -> DamagedError:
    # Without TensorFlow's message, which would repeat the path.
    return DamagedError(f"{name} cannot be read ({type(error).__name__.removesuffix('Error')})")


def _fingerprint(path: str) -> dict[str, Any]:
    sha256, size = hashlib.sha256(), 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while chunk := file.read(CHUNK):
            sha256.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": sha256.hexdigest()}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested mappings as one, with dotted names and values as JSON."""
    flat: dict[str, str] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value)
    return flat
