"""Convert the names of tensors in a file to those in a format's table, which have placeholders such as {i}."""

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from keras_vit.converters.containers import Header

# No model has more blocks; a header can claim a stack of any number of empty ones.
MAX_LAYERS = 256

PLACEHOLDER = re.compile(r"\{(\w+)(-1|:02)?\}")


@dataclass(frozen=True)
class TensorNames:
    """The rules that turn the names in a file into those of a table's rows."""

    prefixes: tuple[str, ...] = ("",)  # accepted before every name; the first with which the marks are found is used
    write_prefix: str = ""  # written before every name
    head_prefix: str = ""  # written before every name except the head's, if the model has a head
    ignore_outside: bool = False  # ignore tensors without the prefix: an optimizer's state, a text tower
    ignore: tuple[str, ...] = ()  # patterns of tensors that are not part of the model
    other_parts: tuple[str, ...] = ()  # patterns of tensors of a text tower or a decoder, which users are told about
    renumber: tuple[str, ...] = ()  # modules whose children are numbered together or class by class
    # Part of a name, in which # is any number -> its replacement, in which # is the last of these.
    spelled: Mapping[str, str] = field(default_factory=dict)
    # Start of the name of a tensor with a leading axis of blocks -> start of the names of single blocks.
    stacked: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()  # other files of weights in the same folder, read with the first

    def spell(self, name: str) -> str:
        """Return a name with the parts in `spelled` replaced; # in a replacement is the part's last number."""
        for part, other in self.spelled.items():
            number = r"(?P<last>\d{1,9})".join(re.escape(part).replace(r"\#", r"\d{1,9}").rsplit(r"\d{1,9}", 1))
            name = re.sub(number, other.replace("\\", r"\\").replace("#", r"\g<last>"), name)
        return name

    def unstack(self, name: str, header: Header) -> list[tuple[str, int | None]]:
        """Return (name, index) for each block of a stacked tensor, or a single tensor's own name and None."""
        for stack, single in self.stacked.items():
            if name.startswith(stack) and header.shape and header.shape[0] <= MAX_LAYERS:
                rest = name.removeprefix(stack)
                return [(fill(single, {"i": str(i)}) + rest, i) for i in range(header.shape[0])]
        return [(name, None)]

    def renumbered(self, names: list[str]) -> dict[str, str]:
        """Return each name with the children of the `renumber` modules counted class by class, as flax's Linen does."""
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
    """Return the pattern of all names that a template stands for."""
    pieces, end = [], 0
    for found in PLACEHOLDER.finditer(template):
        # A placeholder stands for a number; in the table's own names it stands for itself.
        pieces += [re.escape(template[end : found.start()]), rf"(?P<{found[1]}>\d{{1,9}}|\{{{found[1]}\}})"]
        end = found.end()
    return re.compile("".join(pieces) + re.escape(template[end:]))


def fill(template: str, values: Mapping[str, str], shift: int = 0, shifted_in: str | None = None) -> str:
    """Return a template with its placeholders filled; those written {s-1} (here or in `shifted_in`) move by `shift`."""
    shifted = {name for name, option in PLACEHOLDER.findall(shifted_in or template) if option == "-1"}
    moved = {name: str(int(value) + shift * (name in shifted)) for name, value in values.items()}
    # {u:02} has two digits.
    return PLACEHOLDER.sub(lambda found: moved[found[1]].zfill(2 if found[2] == ":02" else 1), template)


def wildcard(template: str) -> str:
    """Return a template with * for its placeholders, as fnmatch reads it."""
    return PLACEHOLDER.sub("*", template.removeprefix("/"))
