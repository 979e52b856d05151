"""The tables in converters/checkpoints: how a format names and lays out its tensors, read in both directions."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_vit import content
from keras_vit.config import ResNetConfig, check_fields

LAYOUTS = ("keras", "torch")
_KEYS = {
    "format",
    "container",
    "layout",
    "prefixes",
    "ignore",
    "detect",
    "renumber",
    "config",
    "defaults",
    "when",
    "tensors",
}
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Row:
    """One variable of the model and where a file keeps it.

    Attributes:
        variable: Keras path with placeholders, such as "block_{i}/norm1/gamma".
        tensor: name in the file with the same placeholders.
        part: (which, of how many) of the tensor's first axis; (0, 1) is all of it.
        rank: axes in the file where ones stand in front of the variable's own; None for as they are.
    """

    variable: str
    tensor: str
    part: tuple[int, int] = (0, 1)
    rank: int | None = None

    @property
    def is_kernel(self) -> bool:
        """Whether the variable multiplies: a matrix or a convolution."""
        return self.variable.endswith("/kernel")

    @property
    def is_bias(self) -> bool:
        """Whether the variable is a bias."""
        return self.variable.endswith("/bias")


@dataclass(frozen=True)
class Source:
    """Where a file keeps one variable: the tensor's full name, and the row that says how."""

    tensor: str
    row: Row


@dataclass(frozen=True)
class Match:
    """What a file holds in the eyes of a table: every variable's source, and the tensors no row knows."""

    sources: dict[str, Source]
    unknown: list[str]
    prefix: str


@dataclass(frozen=True)
class Table:
    """A checkpoint format. See converters/README.md for the file it is read from."""

    format: str
    container: str
    layout: str
    rows: tuple[Row, ...]
    prefixes: tuple[str, ...] = ("",)
    ignore: tuple[str, ...] = ()
    detect: tuple[str, ...] = ()
    renumber: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    when: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def prefix_of(self, names: Iterable[str]) -> str | None:
        """The prefix under which all of the format's marks stand, or None where this is another format."""
        present = set(names)
        for prefix in self.prefixes:
            if all(prefix + mark in present for mark in self.detect):
                return prefix
        return None

    def match(self, names: Iterable[str]) -> Match:
        """Finds every variable's tensor among the names in a file.

        What stands outside the prefix is not ours: the optimizer's state, another tower.
        """
        names = list(names)
        prefix = self.prefix_of(names) or ""
        names = [name for name in names if name.startswith(prefix)]
        canonical = self._renumbered([name.removeprefix(prefix) for name in names])
        sources: dict[str, Source] = {}
        unknown = []
        for name in names:
            found = self._variables(canonical[name.removeprefix(prefix)])
            taken = [variable for variable, _ in found if variable in sources]
            sources |= {variable: Source(name, row) for variable, row in found if variable not in taken}
            if (taken or not found) and not any(
                _matches(name.removeprefix(prefix), pattern) for pattern in self.ignore
            ):
                unknown.append(name)
        return Match(sources, unknown, prefix)

    def tensor_of(self, variable: str) -> Source | None:
        """Where the format keeps a variable when it is written; None where it cannot."""
        for row in self.rows:
            found = _pattern(row.variable).fullmatch(variable)
            if found:
                return Source(_filled(row.tensor, found.groupdict()), row)
        return None

    def _variables(self, canonical: str) -> list[tuple[str, Row]]:
        found = []
        for pattern, row in self._patterns:
            match = pattern.fullmatch(canonical)
            if match:
                found.append((_filled(row.variable, match.groupdict()), row))
        return found

    @functools.cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Row]]:
        # The rows' own names are renumbered like the file's, so that any numbering meets any other.
        canonical = self._renumbered([row.tensor for row in self.rows])
        return [(_pattern(canonical[row.tensor]), row) for row in self.rows]

    def _renumbered(self, names: list[str]) -> dict[str, str]:
        """Each name with the children of the `renumber` modules counted class by class, as flax's Linen does."""
        parents = [_pattern(parent) for parent in self.renumber]
        children: dict[tuple[str, str], set[int]] = defaultdict(set)
        for name in names:
            split = _child(name, parents)
            if split:
                parent, kind, number, _ = split
                children[parent, kind].add(number)
        result = {}
        for name in names:
            split = _child(name, parents)
            if split:
                parent, kind, number, rest = split
                result[name] = f"{parent}/{kind}_{sorted(children[parent, kind]).index(number)}{rest}"
            else:
                result[name] = name
        return result


def _child(name: str, parents: list[re.Pattern[str]]) -> tuple[str, str, int, str] | None:
    for parent in parents:
        match = re.fullmatch(rf"({parent.pattern})/([A-Za-z]+)_(\d+)(/.*)?", name)
        if match:
            *_, kind, number, rest = match.groups()
            return match[1], kind, int(number), rest or ""
    return None


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    parts = _PLACEHOLDER.split(template)
    # A placeholder stands for a number; in the table's own names it stands for itself.
    return re.compile(
        "".join(
            rf"(?P<{part}>\d+|\{{{part}\}})" if i % 2 else re.escape(part) for i, part in enumerate(parts)
        )
    )


def _filled(template: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: values[found[1]], template)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern.replace("**", "*"))


def formats() -> list[str]:
    """The names of the formats, in alphabetical order."""
    return sorted(path.stem for path in (content.folder("converters") / "checkpoints").glob("*.toml"))


def load_table(format: str | Path) -> Table:
    """The table of a format's name, or of a user's own .toml file.

    Raises:
        ValueError: where there is no such format, or the file is no such table, saying where and what.
    """
    if str(format).endswith(".toml"):
        return _read(Path(format))
    if format not in formats():
        raise ValueError(
            f"The formats are {formats()}, or a path to a .toml of your own. Received: {format!r}"
        )
    return _read(content.folder("converters") / "checkpoints" / f"{format}.toml")


@functools.cache
def _read(path: Path) -> Table:
    raw = content.read_toml(path)
    unknown = set(raw) - _KEYS
    missing = {"format", "container", "layout", "tensors"} - set(raw)
    if unknown or missing:
        raise ValueError(
            f"{path}: unknown keys {sorted(unknown)}, missing keys {sorted(missing)}; known: {sorted(_KEYS)}"
        )
    if raw["layout"] not in LAYOUTS:
        raise ValueError(f"{path}: layout is one of {LAYOUTS}. Received: {raw['layout']!r}")
    config = dict(raw.get("config", {}))
    when = raw.get("when", {})
    for facts in (config, raw.get("defaults", {}), *when.values()):
        check_fields(facts)
    if "resnet" in config:
        config["resnet"] = ResNetConfig(**config["resnet"])
    rows = [row for variable, names in raw["tensors"].items() for row in _rows(path, variable, names)]
    lists = {key: tuple(raw[key]) for key in ("prefixes", "ignore", "detect", "renumber") if key in raw}
    return Table(
        raw["format"],
        raw["container"],
        raw["layout"],
        tuple(rows),
        config=config,
        defaults=raw.get("defaults", {}),
        when=when,
        **lists,
    )


def _rows(path: Path, variable: str, names: str | list[str]) -> list[Row]:
    """The rows of one line; of several names every one is read and the first is written."""
    return [_row(path, variable, name) for name in ([names] if isinstance(names, str) else names)]


def _row(path: Path, variable: str, text: str) -> Row:
    tensor, *steps = (piece.strip() for piece in text.split("|"))
    part, rank = (0, 1), None
    for step in steps:
        match step.split():
            case ["part", which, "of", count]:
                part = int(which), int(count)
            case ["rank", axes]:
                rank = int(axes)
            case _:
                raise ValueError(
                    f"{path}: {variable}: the steps are 'part K of N' and 'rank N'. Received: {step!r}"
                )
    if set(_PLACEHOLDER.findall(variable)) != set(_PLACEHOLDER.findall(tensor)):
        raise ValueError(f"{path}: {variable}: both names need the same placeholders. Received: {tensor!r}")
    return Row(variable, tensor, part, rank)
