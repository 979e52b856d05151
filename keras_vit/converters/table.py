"""What a checkpoint format is: how it names and lays out its tensors, both directions from one table.

The tables are the .toml files in converters/checkpoints (converters/README.md describes them); `tables` reads them.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keras_vit.converters.containers.base import Header

# A stack of more blocks than this is no model; a header can claim any number of empty ones.
MOST_LAYERS = 1000

# What keras_vit writes beside a format's own tensors: a variable as it was before the format's conventions moved it.
OWN = "keras_vit/"

PLACEHOLDER = re.compile(r"\{(\w+)(-1)?\}")


@dataclass(frozen=True)
class Row:
    """One variable of the model and where a file keeps it.

    Attributes:
        variable: Keras path with placeholders, such as "block_{i}/norm1/gamma".
        tensor: name in the file with the same placeholders; {s-1} counts from one less.
        part: (which, of how many) of the tensor's first axis; (0, 1) is all of it.
        rank: axes in the file where ones stand in front of the variable's own; None for as they are.
        only_if: (field of ViTConfig, value) that the presence of the tensor tells, and without which it is not written.
        unless: a tensor beside which this one is not part of the model.
        beside: a tensor without which this one is not this variable.
    """

    variable: str
    tensor: str
    part: tuple[int, int] = (0, 1)
    rank: int | None = None
    only_if: tuple[str, Any] | None = None
    unless: str | None = None
    beside: str | None = None

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
    """Where a file keeps one variable: the tensor's full name, which of a stack it is, and the row that says how."""

    tensor: str
    row: Row
    layer: int | None = None


@dataclass(frozen=True)
class Match:
    """What a file holds in the eyes of a table: every variable's source, and the tensors that no row knows."""

    sources: dict[str, Source]
    unknown: list[str]

    @property
    def told(self) -> dict[str, Any]:
        """The fields of ViTConfig that the presence of tensors tells."""
        rows = [source.row for source in self.sources.values()]
        return dict(row.only_if for row in rows if row.only_if and "." not in row.only_if[0])


@dataclass(frozen=True)
class JsonFields:
    """How a config.json spells the fields of ViTConfig.

    Attributes:
        fields: dotted path in the file -> field of ViTConfig, dotted where it is nested; a step may follow.
        values: for a field, spelling -> value, or a list of values of which the first is read; the first spelling of
            a value is written.
        name: dotted path of the model's name.
        names: pattern of such a name -> facts, the later before the earlier; or why such a model is not read.
        accepts: dotted path -> values that are read though ViTConfig has no word for them; [] are any. Other keys
            beside them are refused: they may change what the model computes.
        constants: what is written beside.
        kinds: the first whose `when` holds, and none of whose `unless` is set, is written beside: its `write`.
        beside: key -> name of another .json file in the same folder, which is read as if it stood under that key.
    """

    fields: Mapping[str, str]
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str | None = None
    names: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)
    accepts: Mapping[str, list[Any]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[Mapping[str, Any], ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A checkpoint format; the attributes are those of the .toml file (converters/README.md)."""

    format: str
    container: str
    layout: str
    rows: tuple[Row, ...]
    prefixes: tuple[str, ...] = ("",)
    write_prefix: str = ""
    ignore_outside: bool = False
    head_prefix: str = ""
    ignore: tuple[str, ...] = ()
    detect: tuple[str, ...] = ()
    detect_absent: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    renumber: tuple[str, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    zeros: tuple[str, ...] = ()
    refused: tuple[Mapping[str, Any], ...] = ()
    json: JsonFields | None = None
    writable: bool = True

    def prefix_of(self, names: Iterable[str]) -> str | None:
        """The prefix under which all of the format's marks stand, or None where this is another format."""
        present = set(names)
        for prefix in self.prefixes:
            marked = all(prefix + mark in present for mark in self.detect)
            if marked and not any(prefix + mark in present for mark in self.detect_absent):
                return prefix
        return None

    def match(self, headers: Mapping[str, Header]) -> Match:
        """Finds every variable's tensor among those of a file.

        With `ignore_outside`, what stands outside the prefix is not ours: the optimizer's state, another tower.
        """
        prefix = self.prefix_of(headers) or ""
        names = {
            name: self._spelled(name.removeprefix(prefix))
            for name in headers
            if not self.ignore_outside or name.startswith(prefix)
        }
        names = {name: short for name, short in names.items() if not name.startswith(OWN)}
        present = set(names.values())
        ignored = self._ignored(present)
        single = {name: self._unstacked(short, headers[name]) for name, short in names.items()}
        canonical = self._renumbered([short for layers in single.values() for short, _ in layers])
        sources: dict[str, Source] = {}
        unknown = []
        for name, layers in single.items():
            found = {
                variable: Source(name, row, layer)
                for short, layer in layers
                for variable, row in self._variables(canonical[short], present)
            }
            if found and not found.keys() & sources.keys():
                sources |= found
            elif not any(_matches(names[name], pattern) for pattern in ignored):
                unknown.append(name)
        own = {name.removeprefix(OWN): name for name in headers if name.startswith(OWN)}
        return Match(sources | {path: Source(name, Row(path, name)) for path, name in own.items()}, unknown)

    def _ignored(self, present: set[str]) -> list[str]:
        """The patterns of tensors that are no part of the model, in a file of these tensors."""
        return [*self.ignore, *(_wild(row.tensor) for row in self.rows if row.unless in present)]

    def is_zero_without_tensor(self, variable: str) -> bool:
        """Whether a variable is zero in files that have no tensor for it."""
        return any(_pattern(template).fullmatch(variable) for template in self.zeros)

    def tensor_of(self, variable: str, config: Mapping[str, Any]) -> Source | None:
        """Where the format keeps a variable of a model when it is written; None where it cannot."""
        for row in self.rows:
            found = _pattern(row.variable).fullmatch(variable)
            if found and (row.only_if is None or lookup(config, row.only_if[0]) == row.only_if[1]):
                head = self.head_prefix if config["num_classes"] and not row.tensor.startswith("/") else ""
                return Source(
                    self.write_prefix + head + _filled(row.tensor.removeprefix("/"), found.groupdict(), -1), row
                )
        return None

    def _spelled(self, name: str) -> str:
        for piece, other in self.spelled.items():
            name = name.replace(piece, other)
        return name

    def _unstacked(self, name: str, header: Header) -> list[tuple[str, int | None]]:
        """The names that a tensor with a leading axis of blocks has, one a block; or its own."""
        for stack, single in self.stacked.items():
            if name.startswith(stack) and header.shape and header.shape[0] <= MOST_LAYERS:
                rest = name.removeprefix(stack)
                return [(_filled(single, {"i": str(i)}) + rest, i) for i in range(header.shape[0])]
        return [(name, None)]

    def _variables(self, canonical: str, present: set[str]) -> list[tuple[str, Row]]:
        found = []
        for pattern, row in self._patterns:
            match = pattern.fullmatch(canonical)
            if match and row.unless not in present and (row.beside is None or row.beside in present):
                found.append((_filled(row.variable, match.groupdict(), +1, row.tensor), row))
        return found

    @functools.cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Row]]:
        # The rows' own names are renumbered like the file's, so that any numbering meets any other.
        names = {row.tensor: row.tensor.removeprefix("/") for row in self.rows}
        canonical = self._renumbered(list(names.values()))
        return [(_pattern(canonical[names[row.tensor]]), row) for row in self.rows]

    def _renumbered(self, names: list[str]) -> dict[str, str]:
        """Each name with the children of the `renumber` modules counted class by class, as flax's Linen does."""
        parents = [_pattern(parent) for parent in self.renumber]
        split = {name: _child(name, parents) for name in names}
        children: dict[tuple[str, str], set[int]] = defaultdict(set)
        for parent, kind, number, _ in filter(None, split.values()):
            children[parent, kind].add(number)
        result = {}
        for name, child in split.items():
            if child is None:
                result[name] = name
            else:
                parent, kind, number, rest = child
                result[name] = f"{parent}/{kind}_{sorted(children[parent, kind]).index(number)}{rest}"
        return result


def _child(name: str, parents: list[re.Pattern[str]]) -> tuple[str, str, int, str] | None:
    """A name inside a parent as (parent, class, number, rest): ("encoderblock_3", "LayerNorm", 2, "/scale")."""
    for parent in parents:
        match = re.fullmatch(rf"({parent.pattern})/([A-Za-z]+)_(\d{{1,9}})(/.*)?", name)
        if match:
            *_, kind, number, rest = match.groups()
            return match[1], kind, int(number), rest or ""
    return None


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    pieces, end = [], 0
    for found in PLACEHOLDER.finditer(template):
        # A placeholder stands for a number; in the table's own names it stands for itself.
        pieces += [re.escape(template[end : found.start()]), rf"(?P<{found[1]}>\d{{1,9}}|\{{{found[1]}\}})"]
        end = found.end()
    return re.compile("".join(pieces) + re.escape(template[end:]))


def _filled(template: str, values: Mapping[str, str], shift: int = 0, shifted_in: str | None = None) -> str:
    """The template with its placeholders replaced; those written {s-1} (here or in `shifted_in`) moved by `shift`."""
    shifted = {name for name, offset in PLACEHOLDER.findall(shifted_in or template) if offset}
    moved = {name: str(int(value) + shift) if name in shifted else value for name, value in values.items()}
    return PLACEHOLDER.sub(lambda found: moved[found[1]], template)


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """The value of a dotted field of a config's dict; None where there is none. Tuples come as lists, as in TOML."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return list(value) if isinstance(value, tuple) else value


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern.replace("**", "*"))


def _wild(template: str) -> str:
    return PLACEHOLDER.sub("*", template.removeprefix("/"))
