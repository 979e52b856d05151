"""Checkpoint formats as tables: how a format names and lays out its tensors, to read and to write.

The tables are the .toml files in converters/checkpoints; converters/README.md describes them.
"""

import fnmatch
import functools
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from keras_vit._util import files
from keras_vit._util.checks import as_path, table_problems
from keras_vit.converters.config_json import JsonConfig
from keras_vit.converters.containers import Header
from keras_vit.converters.json_configs import JSON_CONFIGS
from keras_vit.model.config import Preprocessing, ResNetConfig, TextConfig, ViTConfig, check_fields

MAX_LAYERS = 256  # no model has more blocks; a header can claim a stack of any number of empty ones

POSITION = "position/embedding"
PATCHES = "embedding/kernel"
PREFIX = ("prefix/cls", "prefix/class_tokens", "prefix/distillation", "prefix/registers")  # in the order of the tokens
TORCH_AXES = {4: (2, 3, 1, 0), 2: (1, 0)}  # OIHW -> HWIO, (out, in) -> (in, out)
PLACEHOLDER = re.compile(r"\{(\w+)(-1|:02)?\}")


@dataclass(frozen=True)
class TensorNames:
    """The rules that turn the names in a file into those of a table's rows."""

    prefixes: tuple[str, ...] = ()  # that the format's own program writes before names, besides the next two
    write_prefix: str = ""  # written before every name
    head_prefix: str = ""  # written before every name except the head's, if the model has a head
    ignore: tuple[str, ...] = ()  # patterns of tensors that are not part of the model
    unused: tuple[str, ...] = ()  # tensors (1, hidden_size) that other readers expect: written as zeros
    # Patterns of tensors of a text tower or a decoder among the model's own names, which users are told about.
    other_parts: tuple[str, ...] = ()
    renumber: tuple[str, ...] = ()  # modules whose children are numbered together or class by class
    # Part of a name, in which # is any number -> its replacement, in which # is the last of these.
    spelled: Mapping[str, str] = field(default_factory=dict)
    # Start of the name of a tensor with a leading axis of blocks -> start of the names of single blocks.
    stacked: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()  # other files of weights in the same folder, read with the first

    @property
    def own_prefixes(self) -> tuple[str, ...]:
        """Prefixes that the format's own program writes before names."""
        return tuple(dict.fromkeys((*self.prefixes, self.head_prefix, self.write_prefix, "")))

    def spell(self, name: str) -> str:
        """Replace the parts in `spelled`; # in a replacement is the part's last number.

        With {"layers.#.norm#": "blocks.ln_#"}, layers.3.norm1.bias becomes blocks.ln_1.bias.
        """
        for part, other in self.spelled.items():
            number = r"(?P<last>\d{1,9})".join(re.escape(part).replace(r"\#", r"\d{1,9}").rsplit(r"\d{1,9}", 1))
            name = re.sub(number, other.replace("\\", r"\\").replace("#", r"\g<last>"), name)
        return name

    def unstack(self, name: str, header: Header) -> list[tuple[str, int | None]]:
        """List (name, index) for each block of a stacked tensor, or a single tensor's own name and None."""
        for stack, single in self.stacked.items():
            if name.startswith(stack) and header.shape and header.shape[0] <= MAX_LAYERS:
                rest = name.removeprefix(stack)
                return [(fill(single, {"i": str(i)}) + rest, i) for i in range(header.shape[0])]
        return [(name, None)]

    def renumbered(self, names: list[str]) -> dict[str, str]:
        """Count the children of the `renumber` modules class by class, as flax's Linen does: name -> new name."""
        parents = [pattern(parent) for parent in self.renumber]
        split = {name: _split_child(name, parents) for name in names}
        numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
        for parent, kind, number, _ in filter(None, split.values()):
            numbers[parent, kind].add(number)
        result = {}
        for name, child in split.items():
            if child is None:
                result[name] = name
            else:
                parent, kind, number, rest = child
                result[name] = f"{parent}/{kind}_{sorted(numbers[parent, kind]).index(number)}{rest}"
        return result


def _split_child(name: str, parents: list[re.Pattern[str]]) -> tuple[str, str, int, str] | None:
    """Split "encoderblock_3/LayerNorm_2/scale" into parent, class, number and rest; None outside of the parents."""
    for parent in parents:
        match = re.fullmatch(rf"({parent.pattern})/([A-Za-z]+)_(\d{{1,9}})(/.*)?", name)
        if match:
            *_, kind, number, rest = match.groups()
            return match[1], kind, int(number), rest or ""
    return None


@functools.cache
def pattern(template: str) -> re.Pattern[str]:
    """Compile a template to the pattern of all its names."""
    pieces, end = [], 0
    for found in PLACEHOLDER.finditer(template):
        # A placeholder stands for a number; in the table's own names it stands for itself.
        pieces += [re.escape(template[end : found.start()]), rf"(?P<{found[1]}>\d{{1,9}}|\{{{found[1]}\}})"]
        end = found.end()
    return re.compile("".join(pieces) + re.escape(template[end:]))


def fill(template: str, values: Mapping[str, str], shift: int = 0, shifted_in: str | None = None) -> str:
    """Fill the placeholders of a template; those written {s-1} (here or in `shifted_in`) move by `shift`.

    A row that maps "stages.{s-1}.conv" to "stage_{s}/conv" is filled by -1 with s = 1 as "stages.0.conv"; the other
    way, by +1 with what was found there, s = 0, as "stage_1/conv".
    """
    shifted = {name for name, option in PLACEHOLDER.findall(shifted_in or template) if option == "-1"}
    moved = {name: str(int(value) + shift * (name in shifted)) for name, value in values.items()}
    # {u:02} has two digits.
    return PLACEHOLDER.sub(lambda found: moved[found[1]].zfill(2 if found[2] == ":02" else 1), template)


def wildcard(template: str) -> str:
    """Replace the placeholders of a template by *, for fnmatch."""
    return PLACEHOLDER.sub("*", template.removeprefix("/"))


# Prefix of tensors that only keras_vit reads: variables as they were before the format's rules changed them.
OWN_PREFIX = "keras_vit/"


class _File(TypedDict):
    """The keys of a checkpoint format, converters/checkpoints/*.toml."""

    format: str
    container: Literal["npz", "safetensors", "h5"]
    layout: Literal["keras", "torch"]
    write_prefix: NotRequired[str]
    head_prefix: NotRequired[str]
    writable: NotRequired[bool]
    detect: list[str]
    prefixes: NotRequired[list[str]]
    ignore: NotRequired[list[str]]
    unused: NotRequired[list[str]]
    other_parts: NotRequired[list[str]]
    detect_absent: NotRequired[list[str]]
    detect_several: NotRequired[list[str]]
    beside: NotRequired[list[str]]
    renumber: NotRequired[list[str]]
    unstated: NotRequired[list[dict[str, Any]]]
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
    is_depthwise: bool = False  # whether the tensor is a kernel that filters each channel by itself
    folds_class_row: bool = False  # whether the first position is the class token's alone, and is added to it
    is_flat: bool = False  # whether it is a matrix of flat patches (rows, columns, 3), or has positions on two axes

    @property
    def is_kernel(self) -> bool:
        """Whether the variable is a matrix or a convolution that a torch file has in another order of axes."""
        return self.variable.endswith("/kernel") and not self.is_untransposed

    def torch_axes(self, rank: int) -> tuple[int, ...]:
        """Order of the axes of a torch file's kernel that is the variable's."""
        return (2, 3, 0, 1) if self.is_depthwise else TORCH_AXES.get(rank, tuple(range(rank)))


class Source(NamedTuple):
    """The place of one variable in a file: the tensor's full name, its row, and its index in a stack of blocks."""

    tensor: str
    row: Row
    layer: int | None = None


@dataclass(frozen=True)
class MatchedTensors:
    """The tensors of a file, matched with a table: the source of every variable, and the names that no row has."""

    sources: dict[str, Source]
    shapes: dict[str, tuple[int, ...]]  # of the tensors as variables, by the variable; see `variable_shape`
    unknown: list[str]
    other_parts: list[str] = field(default_factory=list)  # of a text tower, a decoder or an optimizer: not read


@dataclass(frozen=True)
class Table:
    """A checkpoint format."""

    format: str
    container: str  # of its files: "npz", "safetensors" or "h5"
    layout: str  # "keras" or "torch": the order of the axes of kernels, see `Row.torch_axes`
    rows: tuple[Row, ...]
    detect: tuple[str, ...] = ()  # tensors that its files have; of "a | b" one is enough
    detect_absent: tuple[str, ...] = ()  # tensors that its files do not have
    detect_several: tuple[str, ...] = ()  # tensors that have several rows in its files
    names: TensorNames = TensorNames()
    # Fields of ViTConfig that the format implies.
    config: Mapping[str, Any] = field(default_factory=dict)  # values of all its files, unless the tensors say otherwise
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values that its users choose, such as preprocessing
    without: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # variable -> fields its absence implies
    # Variables that are zero where a file has no tensor for them; "NAME | beside TENSOR" only in files with another.
    zeros: tuple[str, ...] = ()
    unstated: tuple[Mapping[str, Any], ...] = ()  # rules for what no tensor states, see facts.py
    refused: tuple[Mapping[str, Any], ...] = ()  # combinations of values that the format cannot hold
    json: JsonConfig | None = None  # None for a format without a config.json
    writable: bool = True

    def find_places(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Find what stands before the format's marks among the names of a file's tensors, whose shapes are known.

        It is "" or "vit." in the format's own files, and "state_dict/module." in others.
        """
        spelled = {name: self.names.spell(name) for name in shapes}
        present = {spelled[name]: shape for name, shape in shapes.items()}
        marks = self.detect[0].split(" | ") if self.detect else ()
        starts = {
            start
            for mark in marks
            for name, other in spelled.items()
            # A place is where a name begins, and where it is not spelled otherwise.
            if other.endswith(mark) and name.startswith(start := other.removesuffix(mark))
        }
        return [
            start
            for start in sorted(starts)
            if start[-1:] in ("", ".", "/")
            and all(any(start + mark in present for mark in marks.split(" | ")) for marks in self.detect)
            and not any(start + mark in present for mark in self.detect_absent)
            and all(math.prod(present.get(start + mark, ())[:-1]) > 1 for mark in self.detect_several)
        ]

    def match(self, headers: Mapping[str, Header], prefix: str = "") -> MatchedTensors:
        """Find the tensor of every variable among those of a file, whose names begin with one of the own prefixes.

        Tensors without the prefix are rows that begin with "/", such as a head, or other parts, beside the model. One
        with the prefix, or in the layer of such a row, that no row has is unknown: the model would compute something
        else.
        """
        own = {name: name.removeprefix(OWN_PREFIX) for name in headers if name.startswith(OWN_PREFIX)}
        names = {name: self.names.spell(name.removeprefix(prefix)) for name in headers if name not in own}
        present = {spelled: headers[name].shape for name, spelled in names.items()}
        ignored = [*self.names.ignore, *(wildcard(row.tensor) for row in self.rows if row.unless in present)]
        sources: dict[str, Source] = {}
        unknown: list[str] = []
        other_parts: list[str] = []
        all_found = self._find_sources(names, headers, present, prefix)
        layers = {name.rpartition(".")[0] + "." for name, found in all_found.items() if found and "." in name}
        for name, found in all_found.items():
            if found and not found.keys() & sources.keys():
                sources |= found
            elif _matches(names[name], self.names.other_parts):
                other_parts.append(name)
            elif not _matches(names[name], ignored):
                is_inside = name.startswith((prefix, *layers))
                (unknown if is_inside else other_parts).append(name)
        sources |= {variable: Source(name, Row(variable, name)) for name, variable in own.items()}
        shapes = {
            variable: variable_shape(headers[source.tensor].shape, source, self.layout)
            for variable, source in sources.items()
        }
        return MatchedTensors(sources, shapes, unknown, other_parts)

    def _find_sources(
        self,
        names: Mapping[str, str],
        headers: Mapping[str, Header],
        present: Mapping[str, tuple[int, ...]],
        prefix: str,
    ) -> dict[str, dict[str, Source]]:
        """Find the variables that each tensor of a file holds; `names` are the tensors' names in the table."""
        blocks = {name: self.names.unstack(spelled, headers[name]) for name, spelled in names.items()}
        canonical = self.names.renumbered([single for pairs in blocks.values() for single, _ in pairs])
        sources: dict[str, dict[str, Source]] = {name: {} for name in names}
        for name, pairs in blocks.items():
            for single, layer in pairs:
                for variable, row in self._variables(canonical[single], present):
                    if prefix and row.tensor.startswith("/") == name.startswith(prefix):
                        continue
                    sources[name].setdefault(variable, Source(name, row, layer))
        return sources

    def tensor_of(self, variable: str, config: Mapping[str, Any]) -> Source | None:
        """Find the tensor for a variable of a model with this config; None if the format has no place for it."""
        for row in self.rows:
            found = pattern(row.variable).fullmatch(variable)
            if found and all(lookup(config, name) == value for name, value in row.only_if):
                prefix = "" if row.tensor.startswith("/") else self._write_prefix(config)
                return Source(prefix + fill(row.tensor.removeprefix("/"), found.groupdict(), -1), row)
        return None

    def unused_tensors(self, config: Mapping[str, Any]) -> list[str]:
        """Names of the tensors of zeros in the file of a model with this config."""
        return [self._write_prefix(config) + name for name in self.names.unused]

    def _write_prefix(self, config: Mapping[str, Any]) -> str:
        return self.names.write_prefix + (self.names.head_prefix if config.get("num_classes") else "")

    def implied(self, variables: Container[str]) -> dict[str, Any]:
        """Look up the fields that a file with these variables implies, `defaults` apart."""
        fields = dict(self.config)
        for variable, implied in self.without.items():
            if variable not in variables:
                fields |= implied
        return fields

    def is_zero_without_tensor(self, variable: str, tensors: Container[str] = ()) -> bool:
        """Whether a variable is zero in files that have no tensor for it, and have these tensors."""
        rules = (rule.partition(" | beside ") for rule in self.zeros)
        return any(
            pattern(template).fullmatch(variable) and (not other or other in tensors) for template, _, other in rules
        )

    def has_row(self, variable: str) -> bool:
        """Whether the format has a name for a variable."""
        return any(pattern(row.variable).fullmatch(variable) for row in self.rows)

    def _variables(self, canonical: str, present: Mapping[str, tuple[int, ...]]) -> list[tuple[str, Row]]:
        """Find every variable that a tensor holds, with its row; `present` are the shapes of all tensors."""
        found = []
        for row_pattern, row in self._patterns:
            match = row_pattern.fullmatch(canonical)
            is_other = row.is_flat and len(present.get(canonical, ())) != (2 if row.is_kernel else 4)
            if not match or is_other or row.unless in present or not (row.beside is None or row.beside in present):
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


def variable_shape(shape: tuple[int, ...], source: Source, layout: str) -> tuple[int, ...]:
    """Convert the shape of a file's tensor to that of a variable; in layout "torch" the heads stay folded."""
    row = source.row
    if source.layer is not None:
        shape = shape[1:]
    _, count = row.part
    if count > 1 and shape:
        shape = (shape[0] // count, *shape[1:])
    if row.folds_class_row and len(shape) > 1:
        shape = (*shape[:-2], shape[-2] - 1, shape[-1])
    if row.is_flat and not row.is_kernel:
        return (1, shape[1] * shape[2], shape[3])
    if row.is_flat and 3 * (side := math.isqrt(shape[1] // 3)) ** 2 == shape[1]:
        return (side, side, 3, shape[0])
    if layout == "torch" and row.is_kernel:
        shape = tuple(shape[axis] for axis in row.torch_axes(len(shape)) if axis < len(shape))
    return shape if row.rank is None else without_leading_ones(shape)


def fold_heads(shape: tuple[int, ...], row: Row) -> tuple[int, ...]:
    """Fold the heads: kernels (D, H, d) and (H, d, D) become square matrices, biases (H, d) become vectors."""
    if row.is_kernel and len(shape) == 3:
        side = math.isqrt(math.prod(shape))
        return (side, side)
    return (math.prod(shape),) if row.variable.endswith("/bias") else shape


def without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop the leading axes of length 1."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def formats(tower: str = "") -> list[str]:
    """Names of the checkpoint formats, in alphabetical order.

    Args:
        tower: "" for images, or "text" for the text towers of pairs.

    Example:

    >>> [name for name in keras_vit.converters.formats() if "bit" in name]
    ['big_vision_bit', 'bit', 'timm_bit']
    """
    return [*_format_names(tower)]


@functools.cache
def _format_names(tower: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _folder(tower).glob("*.toml")))


def load_table(format: str | os.PathLike[str], tower: str = "") -> Table:
    """Load the table of a format: one of `formats(tower)`, or a path to your own .toml file."""
    if as_path(format, "format").endswith(".toml"):
        return _read_table(Path(format).resolve(), tower)
    if format not in _format_names(tower):
        raise ValueError(
            f"format must be one of {formats(tower)}, or a path to a .toml table of your own. Received: {format!r:.200}"
        )
    return _read_table(_folder(tower) / f"{format}.toml", tower)


def _folder(tower: str) -> Path:
    """Folder of the tables for images, or for the other `tower` of an image and text pair."""
    return files.data_folder("converters") / "checkpoints" / tower


def fields_of_rows(rows: Iterable[Row]) -> dict[str, Any]:
    """Fields of ViTConfig that the presence of these rows' tensors implies."""
    return {name: value for row in rows for name, value in row.only_if if "." not in name}


def lookup(values: Mapping[str, Any], path: str | None, default: Any = None) -> Any:
    """Look up the value at a dotted path, or else a default; tuples become lists, as in TOML and JSON."""
    value: Any = values
    for key in (path or "").split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return list(value) if isinstance(value, tuple) else value


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob.replace("**", "*")) for glob in globs)


def _read_raw(path: Path, tower: str) -> dict[str, Any]:
    """Read the keys of a table over those of its `base`: tables are merged, other values replaced."""
    raw = files.read_toml(path)
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
        raw["json"] = JSON_CONFIGS[raw["json"]] if "json" in raw else None
        rows = tuple(_row(variable, text) for variable, texts in raw["tensors"].items() for text in texts)
        return Table(rows=rows, names=TensorNames(**_arguments(TensorNames, raw)), **_arguments(Table, raw))
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _arguments(kind: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Select the keys of a table that are fields of a dataclass, lists as tuples."""
    known = {key: value for key, value in raw.items() if key in kind.__dataclass_fields__}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in known.items()}


def _parse_fields(fields: dict[str, Any], kind: type) -> dict[str, Any]:
    check_fields(fields, kind)
    types = {"resnet": ResNetConfig, "preprocessing": Preprocessing}
    fields |= {name: None for name, value in fields.items() if value == "none" and getattr(kind, name) is None}
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
            case ["untransposed" | "depthwise" | "flat"]:
                options[f"is_{step}"] = True
            case ["fold", "class", "row"]:
                options["folds_class_row"] = True
            case _:
                raise ValueError(
                    f"{variable}: no step {step!r:.200}. Steps: 'part K of N', 'rank N', 'if FIELD = VALUE', 'unless "
                    "TENSOR', 'beside TENSOR', 'twice TENSOR', 'untransposed', 'depthwise', 'flat', 'fold class row'"
                )
    if {name for name, _ in PLACEHOLDER.findall(variable)} != {name for name, _ in PLACEHOLDER.findall(tensor)}:
        raise ValueError(f"{variable}: both names need the same placeholders. Received: {tensor!r:.200}")
    return Row(variable, tensor, **options)
