"""Checkpoint formats as tables: how a format names and lays out its tensors, to read and to write.

The tables are the .toml files in converters/checkpoints; converters/README.md describes them.
"""

import dataclasses
import fnmatch
import functools
import json
import os
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from keras_vit._util import data_files
from keras_vit._util.checks import as_path, table_problems
from keras_vit.converters.config_json import JsonConfig
from keras_vit.converters.containers import Header
from keras_vit.converters.json_configs import JSON_CONFIGS
from keras_vit.converters.tensor_names import PLACEHOLDER, TensorNames, fill, pattern, wildcard
from keras_vit.model.config import Preprocessing, ResNetConfig, ViTConfig, check_fields
from keras_vit.model.config.text import TextConfig

# Prefix of tensors that only keras_vit reads: variables as they were before the format's rules changed them.
OWN_PREFIX = "keras_vit/"


class _File(TypedDict):
    """The keys of a checkpoint format, converters/checkpoints/*.toml."""

    format: str
    container: Literal["npz", "safetensors", "h5"]
    layout: Literal["keras", "torch"]
    write_prefix: NotRequired[str]
    head_prefix: NotRequired[str]
    ignore_outside: NotRequired[bool]
    writable: NotRequired[bool]
    detect: list[str]
    prefixes: NotRequired[list[str]]
    ignore: NotRequired[list[str]]
    other_parts: NotRequired[list[str]]
    detect_absent: NotRequired[list[str]]
    beside: NotRequired[list[str]]
    renumber: NotRequired[list[str]]
    required: NotRequired[list[str]]
    zeros: NotRequired[list[str]]
    spelled: NotRequired[dict[str, str]]
    stacked: NotRequired[dict[str, str]]
    config: NotRequired[dict[str, Any]]
    defaults: NotRequired[dict[str, Any]]
    tensors: dict[str, list[str]]
    without: NotRequired[dict[str, dict[str, Any]]]
    refused: NotRequired[list[dict[str, Any]]]
    json: NotRequired[str]


@dataclass(frozen=True)
class Row:
    """One variable of the model and its tensor in a file."""

    variable: str  # Keras path with placeholders, such as "block_{i}/norm1/gamma"
    tensor: str  # name in the file with the same placeholders; {s-1} is the number less one
    part: tuple[int, int] = (0, 1)  # (index, count) of the part of the tensor's first axis; (0, 1) is all of it
    rank: int | None = None  # number of axes in the file, if it has leading axes of length 1
    only_if: tuple[tuple[str, Any], ...] = ()  # (field of ViTConfig, value): the tensor exists only with these values
    unless: str | None = None  # a tensor; the row is ignored in a file that has it
    beside: str | None = None  # a tensor; the row is ignored in a file that lacks it
    # A torch tensor; the row is ignored where its own tensor has not twice as many outputs as that one has inputs.
    twice: str | None = None
    is_untransposed: bool = False  # whether the tensor is a matrix (in, out) also in a torch file
    # Whether the position embedding begins with a row for the class token alone, which is added to that token.
    folds_class_row: bool = False

    @property
    def is_kernel(self) -> bool:
        """Return whether the variable is a matrix or a convolution that a torch file has in another order of axes."""
        return self.variable.endswith("/kernel") and not self.is_untransposed


class Source(NamedTuple):
    """The place of one variable in a file: the tensor's full name, its row, and its index in a stack of blocks."""

    tensor: str
    row: Row
    layer: int | None = None


@dataclass(frozen=True)
class Match:
    """The tensors of a file, matched with a table: the source of every variable, and the names that no row has."""

    sources: dict[str, Source]
    unknown: list[str]
    other_parts: list[str] = field(default_factory=list)  # of a text tower, a decoder or an optimizer: not read


class Marks(NamedTuple):
    """Tensors by which a format is recognised: all of `present` (of "a | b" one is enough), none of `absent`."""

    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Meaning:
    """Fields of ViTConfig that a format implies."""

    config: Mapping[str, Any] = field(default_factory=dict)  # values of all its files, unless the tensors say otherwise
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values that its users choose, such as preprocessing
    without: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # variable -> fields its absence implies
    zeros: tuple[str, ...] = ()  # variables that are zero where a file has no tensor for them
    required: tuple[str, ...] = ()  # fields that config.json or the caller must state
    refused: tuple[Mapping[str, Any], ...] = ()  # combinations of values that the format cannot hold

    def implied(self, variables: Container[str]) -> dict[str, Any]:
        """Return the fields that a file with these variables implies, `defaults` apart."""
        fields = dict(self.config)
        for variable, implied in self.without.items():
            if variable not in variables:
                fields |= implied
        return fields

    def is_zero_without_tensor(self, variable: str) -> bool:
        """Return whether a variable is zero in files that have no tensor for it."""
        return any(pattern(template).fullmatch(variable) for template in self.zeros)


@dataclass(frozen=True)
class Table:
    """A checkpoint format."""

    format: str
    container: str  # of its files: "npz", "safetensors" or "h5"
    layout: str  # "keras" or "torch", see layout.py
    rows: tuple[Row, ...]
    marks: Marks = Marks()
    names: TensorNames = TensorNames()
    meaning: Meaning = Meaning()
    json: JsonConfig | None = None  # None for a format without a config.json
    writable: bool = True

    def find_prefix(self, names: Iterable[str]) -> str | None:
        """Return the prefix with which these names have all marks of the format, or None if they are another format."""
        present = {self.names.spell(name) for name in names}
        for prefix in self.names.prefixes:
            marked = all(any(prefix + one in present for one in mark.split(" | ")) for mark in self.marks.present)
            if marked and not any(prefix + mark in present for mark in self.marks.absent):
                return prefix
        return None

    def match(self, headers: Mapping[str, Header]) -> Match:
        """Find the tensor of every variable among those of a file."""
        prefix = self.find_prefix(headers) or ""
        names = {
            name: self.names.spell(name.removeprefix(prefix))
            for name in headers
            if not name.startswith(OWN_PREFIX) and (name.startswith(prefix) or not self.names.ignore_outside)
        }
        present = {spelled: headers[name].shape for name, spelled in names.items()}
        ignored = [*self.names.ignore, *(wildcard(row.tensor) for row in self.rows if row.unless in present)]
        sources: dict[str, Source] = {}
        unknown = []
        other_parts = []
        for name, found in self._find_sources(names, headers, present).items():
            if found and not found.keys() & sources.keys():
                sources |= found
            elif _matches(names[name], self.names.other_parts):
                other_parts.append(name)
            elif not _matches(names[name], ignored):
                unknown.append(name)
        own = {name: name.removeprefix(OWN_PREFIX) for name in headers if name.startswith(OWN_PREFIX)}
        sources |= {variable: Source(name, Row(variable, name)) for name, variable in own.items()}
        parent = prefix[: prefix.rstrip("/").rfind("/") + 1]
        other_parts += [name.removeprefix(parent) for name in headers if name not in names and name not in own]
        return Match(sources, unknown, other_parts)

    def _find_sources(
        self, names: Mapping[str, str], headers: Mapping[str, Header], present: Mapping[str, tuple[int, ...]]
    ) -> dict[str, dict[str, Source]]:
        """Return the variables that each tensor of a file holds; `names` are the tensors' names in the table."""
        blocks = {name: self.names.unstack(spelled, headers[name]) for name, spelled in names.items()}
        canonical = self.names.renumbered([single for pairs in blocks.values() for single, _ in pairs])
        sources: dict[str, dict[str, Source]] = {name: {} for name in names}
        for name, pairs in blocks.items():
            for single, layer in pairs:
                for variable, row in self._variables(canonical[single], present):
                    sources[name].setdefault(variable, Source(name, row, layer))
        return sources

    def tensor_of(self, variable: str, config: Mapping[str, Any]) -> Source | None:
        """Return where a variable of a model with this config is written, or None if the format has no place for it."""
        for row in self.rows:
            found = pattern(row.variable).fullmatch(variable)
            if found and all(lookup(config, name) == value for name, value in row.only_if):
                prefix = self.names.write_prefix + (self.names.head_prefix if config.get("num_classes") else "")
                prefix = "" if row.tensor.startswith("/") else prefix
                return Source(prefix + fill(row.tensor.removeprefix("/"), found.groupdict(), -1), row)
        return None

    def has_row(self, variable: str) -> bool:
        """Return whether the format has a name for a variable."""
        return any(pattern(row.variable).fullmatch(variable) for row in self.rows)

    def _variables(self, canonical: str, present: Mapping[str, tuple[int, ...]]) -> list[tuple[str, Row]]:
        """Return every variable that a tensor holds, with its row; `present` are the shapes of all tensors."""
        found = []
        for row_pattern, row in self._patterns:
            match = row_pattern.fullmatch(canonical)
            if not match or row.unless in present or not (row.beside is None or row.beside in present):
                continue
            other = present.get(fill(row.twice, match.groupdict()), ()) if row.twice else ()
            if row.twice is None or [2 * size for size in other[-1:]] == [*present.get(canonical, ())[:1]]:
                found.append((fill(row.variable, match.groupdict(), +1, row.tensor), row))
        return found

    @functools.cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Row]]:
        # The rows' own names are renumbered like the file's, so that any numbering matches any other.
        names = {row.tensor: row.tensor.removeprefix("/") for row in self.rows}
        canonical = self.names.renumbered(list(names.values()))
        return [(pattern(canonical[names[row.tensor]]), row) for row in self.rows]


def formats(tower: str = "") -> list[str]:
    """Return the names of the checkpoint formats, in alphabetical order.

    Args:
        tower: "" for images, or "text" for the text towers of pairs.

    Example:

    >>> [name for name in keras_vit.converters.formats() if "bit" in name]
    ['big_vision_bit', 'bit', 'timm_bit']
    """
    return sorted(path.stem for path in _folder(tower).glob("*.toml"))


def load_table(format: str | os.PathLike[str], tower: str = "") -> Table:
    """Return the table of a format: one of `formats(tower)`, or a path to your own .toml file."""
    if as_path(format, "format").endswith(".toml"):
        return _read_table(Path(format).resolve(), tower)
    if format not in formats(tower):
        raise ValueError(
            f"format must be one of {formats(tower)}, or a path to a .toml table of your own. Received: {format!r:.200}"
        )
    return _read_table(_folder(tower) / f"{format}.toml", tower)


def _folder(tower: str) -> Path:
    """Return the folder of the tables for images, or for the other `tower` of an image and text pair."""
    return data_files.data_folder("converters") / "checkpoints" / tower


def fields_of_rows(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the fields of ViTConfig that the presence of these rows' tensors implies."""
    return {name: value for row in rows for name, value in row.only_if if "." not in name}


def lookup(values: Mapping[str, Any], path: str | None, default: Any = None) -> Any:
    """Return the value at a dotted path, or else a default; tuples are returned as lists, as in TOML and JSON."""
    value: Any = values
    for key in (path or "").split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return list(value) if isinstance(value, tuple) else value


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob.replace("**", "*")) for glob in globs)


def _read_raw(path: Path, tower: str) -> dict[str, Any]:
    """Return the keys of a table, over those of its `base`: tables are merged, other values replaced."""
    raw = data_files.read_toml(path)
    base = raw.pop("base", None)
    if base is None:
        return raw
    if base not in formats(tower):
        raise ValueError(f"{path}: base must be one of {formats(tower)}. Received: {base!r:.200}")
    return _merge(_read_raw(_folder(tower) / f"{base}.toml", tower), raw)


def _merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merge(first[key], value) for key, value in second.items() if isinstance(value, dict) and key in first}
    return {key: value for key, value in {**first, **second, **both}.items() if value != ""}


@functools.cache
def _read_table(path: Path, tower: str = "") -> Table:
    raw = _read_raw(path, tower)
    if isinstance(tensors := raw.get("tensors"), dict):
        # A variable may have several names: each is read, and the first whose conditions hold is written.
        raw["tensors"] = {name: [texts] if isinstance(texts, str) else texts for name, texts in tensors.items()}
    wrong = list(table_problems(raw, _File, str(path)))
    if not wrong and raw.get("json", "timm") not in JSON_CONFIGS:
        wrong = [f"{path}.json must be one of {list(JSON_CONFIGS)}. Received: {raw['json']!r:.200}"]
    if wrong:
        raise ValueError("; ".join(wrong))
    try:
        kind = TextConfig if tower == "text" else ViTConfig
        raw["without"] = {variable: _parse_fields(fields, kind) for variable, fields in raw.get("without", {}).items()}
        raw |= {key: _parse_fields(raw[key], kind) for key in ("config", "defaults") if key in raw}
        return Table(
            rows=tuple(_row(variable, text) for variable, texts in raw["tensors"].items() for text in texts),
            marks=Marks(tuple(raw["detect"]), tuple(raw.get("detect_absent", ()))),
            names=TensorNames(**_arguments(TensorNames, raw)),
            meaning=Meaning(**_arguments(Meaning, raw)),
            json=JSON_CONFIGS[raw["json"]] if "json" in raw else None,
            **{key: raw[key] for key in ("format", "container", "layout", "writable") if key in raw},
        )
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _arguments(kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a table that are fields of a dataclass, lists as tuples."""
    names = {one.name for one in dataclasses.fields(kind)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items() if key in names}


def _parse_fields(fields: dict[str, Any], kind: type) -> dict[str, Any]:
    check_fields(fields, kind)
    types = {"resnet": ResNetConfig, "preprocessing": Preprocessing}
    return {name: types[name](**value) if name in types else value for name, value in fields.items()}


def _row(variable: str, text: str) -> Row:
    tensor, *steps = (piece.strip() for piece in text.split("|"))
    options: dict[str, Any] = {}
    for step in steps:
        match step.split():
            case ["part", index, "of", count] if index.isdecimal() and count.isdecimal():
                options["part"] = int(index), int(count)
            case ["rank", axes] if axes.isdecimal():
                options["rank"] = int(axes)
            case ["if", name, "=", value]:
                options["only_if"] = (*options.get("only_if", ()), (name, json.loads(value)))
            case ["unless" | "beside" | "twice" as condition, other]:
                options[condition] = other
            case ["untransposed"]:
                options["is_untransposed"] = True
            case ["fold", "class", "row"]:
                options["folds_class_row"] = True
            case _:
                raise ValueError(
                    f"{variable}: the steps are 'part K of N', 'rank N', 'if FIELD = VALUE', 'unless TENSOR', "
                    f"'beside TENSOR', 'twice TENSOR', 'untransposed', 'fold class row'. Received: {step!r:.200}"
                )
    if {name for name, _ in PLACEHOLDER.findall(variable)} != {name for name, _ in PLACEHOLDER.findall(tensor)}:
        raise ValueError(f"{variable}: both names need the same placeholders. Received: {tensor!r:.200}")
    return Row(variable, tensor, **options)
