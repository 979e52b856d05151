"""Reads the tables of formats, ours in converters/checkpoints and users' own."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from keras_vit._util import data_files
from keras_vit._util.schema import misfits
from keras_vit.converters.table import PLACEHOLDER, JsonFields, Row, Table
from keras_vit.model.config import Preprocessing, ResNetConfig, check_fields

_FACTS: dict[str, Any] = {"*": object}
_SCHEMA = {
    "format": str,
    "container": str,
    "layout": str,
    "prefixes?": [str],
    "write_prefix?": str,
    "ignore_outside?": bool,
    "head_prefix?": str,
    "ignore?": [str],
    "detect": [str],
    "detect_absent?": [str],
    "beside?": [str],
    "renumber?": [str],
    "spelled?": {"*": str},
    "stacked?": {"*": str},
    "writable?": bool,
    "config?": dict,
    "defaults?": dict,
    "without?": {"*": dict},
    "zeros?": [str],
    "refused?": [dict],
    "json?": dict,
    "tensors": dict,
}
_CONTAINERS = ("npz", "safetensors", "h5")
_LAYOUTS = ("keras", "torch")


def formats() -> list[str]:
    """The names of the formats, in alphabetical order."""
    return sorted(path.stem for path in (data_files.folder("converters") / "checkpoints").glob("*.toml"))


def load_table(format: str | os.PathLike[str]) -> Table:
    """The table of a format's name, or of a user's own .toml file.

    Raises:
        ValueError: where there is no such format, or the file is no such table, saying where and what.
    """
    if os.fspath(format).endswith(".toml"):
        return _read(Path(format).resolve())
    if format not in formats():
        raise ValueError(f"The formats are {formats()}, or a path to a .toml of your own. Received: {format!r}")
    return _read(data_files.folder("converters") / "checkpoints" / f"{format}.toml")


@functools.cache
def _read(path: Path) -> Table:
    raw = data_files.read_toml(path)
    wrong = list(misfits(raw, _SCHEMA, str(path)))
    wrong += [f"{path}: layout is one of {_LAYOUTS}"] if raw.get("layout") not in _LAYOUTS else []
    wrong += [f"{path}: container is one of {_CONTAINERS}"] if raw.get("container") not in _CONTAINERS else []
    if wrong:
        raise ValueError("; ".join(wrong))
    try:
        rows = [row for variable, names in raw.pop("tensors").items() for row in _rows(variable, names)]
        facts: dict[str, Any] = {key: _facts(raw.pop(key, {})) for key in ("config", "defaults")}
        without = {variable: _facts(told) for variable, told in raw.pop("without", {}).items()}
        fields = JsonFields(**raw.pop("json")) if "json" in raw else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    rest: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
    return Table(rows=tuple(rows), json=fields, without=without, **facts, **rest)


def _facts(told: dict[str, Any]) -> dict[str, Any]:
    check_fields(told)
    makers = {"resnet": ResNetConfig, "preprocessing": Preprocessing}
    return {name: makers[name](**value) if name in makers else value for name, value in told.items()}


def _rows(variable: str, names: str | list[str]) -> list[Row]:
    """The rows of one line; of several names each is read, and the first whose conditions hold is written."""
    return [_row(variable, name) for name in ([names] if isinstance(names, str) else names)]


def _row(variable: str, text: str) -> Row:
    tensor, *steps = (piece.strip() for piece in text.split("|"))
    options: dict[str, Any] = {}
    for step in steps:
        match step.split():
            case ["part", which, "of", count] if which.isdecimal() and count.isdecimal():
                options["part"] = int(which), int(count)
            case ["rank", axes] if axes.isdecimal():
                options["rank"] = int(axes)
            case ["if", field, "=", value]:
                options["only_if"] = field, json.loads(value)
            case ["unless" | "beside" as condition, other]:
                options[condition] = other
            case _:
                raise ValueError(
                    f"{variable}: the steps are 'part K of N', 'rank N', 'if FIELD = VALUE', 'unless TENSOR', "
                    "'beside TENSOR'. "
                    f"Received: {step!r}"
                )
    if {name for name, _ in PLACEHOLDER.findall(variable)} != {name for name, _ in PLACEHOLDER.findall(tensor)}:
        raise ValueError(f"{variable}: both names need the same placeholders. Received: {tensor!r}")
    return Row(variable, tensor, **options)
