"""Values of labels: which were met and how often, and which classes the values of masks stand for.

A mask is read as integers (height, width): a grey value or the index of a palette is itself, and a pixel of another
colour is COLOUR + its 24 bits. `MaskValues` turns these into numbers of classes; IGNORED does not count.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from keras_vit._util.checks import as_python
from keras_vit._util.text import abbreviated, warn
from keras_vit.dense.map_tasks import IGNORED, MIN_DEPTH

COLOUR = 1 << 24
LARGEST = 2**16 - 1  # grey value
MOST_MAPS = 500  # of a split that are read to know what they hold
MOST_ASKED = 8  # values in an example of `mask_values`
MANY_CLASSES = 64  # without names, of which a warning tells
ROWS = 2  # dimensions of labels that are zeros and ones (n, classes)
MOST_METRES = 10**6  # larger distances are counted as this one


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How often each value was met in the labels of a split.

    Args:
        counts: numbers of images, or of pixels of masks, by value; of rows of zeros and ones the number of ones of each
            class; numbers of pixels of depth by metres, rounded up, and 0 for no distance.
        read: number of examples that were read.
        total: number of examples of the split; more than `read` where not all were read.
        problem: the first example that could not be read, and why; "" if all could.
    """

    counts: Mapping[int, int]
    read: int
    total: int
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether every example was read."""
        return self.read == self.total

    @property
    def extent(self) -> str:
        """The examples that were read, in words."""
        return f"{self.total:,}" if self.is_complete else f"{self.read:,} of {self.total:,}"

    def renumbered(self, mask_values: MaskValues) -> Tally:
        """Count the classes that the values of masks stand for."""
        counts: collections.Counter[int] = collections.Counter()
        numbers = mask_values.numbers(np.array([*self.counts], np.int64))
        for number, count in zip(numbers.tolist(), self.counts.values(), strict=True):
            counts[number] += count
        return Tally(counts=counts, read=self.read, total=self.total, problem=self.problem)


def tally_labels(labels: npt.NDArray[Any], total: int | None = None) -> Tally:
    """Count the values of labels as examples have them; `total` is given if these are not all."""
    if labels.ndim == ROWS:
        counts = {number: int(count) for number, count in enumerate(labels.sum(axis=0))}
    else:
        counts = count_metres(labels) if labels.dtype.kind == "f" else count_values(labels)
    return Tally(counts=counts, read=len(labels), total=len(labels) if total is None else total)


def count_values(labels: npt.NDArray[np.integer]) -> dict[int, int]:
    """Count each value of an array of integers, which is not empty."""
    values = labels.ravel()
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))  # of runs: maps have few
    lengths = np.diff(starts, append=len(values))
    found, places = np.unique(values[starts], return_inverse=True)
    counts = np.bincount(places, weights=lengths).astype(np.int64)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def count_metres(depth: npt.NDArray[np.floating]) -> dict[int, int]:
    """Count distances by metres, rounded up; 0 for pixels without a distance."""
    is_known = depth > MIN_DEPTH
    metres = np.where(is_known, np.ceil(np.where(is_known, depth, 0)), 0)
    return count_values(np.minimum(metres, MOST_METRES).astype(np.int64))


def add_counts(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Add up the counts of each value."""
    total: collections.Counter[int] = collections.Counter()
    for each in counts:
        total.update(each)
    return dict(total)


@dataclass(frozen=True)
class MaskValues:
    """The value in masks of each class, in the order of the classes; None where values are the numbers of classes."""

    values: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return ", ".join(map(name_value, self.values)) if self.values else f"0 to {IGNORED - 1}"

    def numbers(self, mask: npt.NDArray[np.integer]) -> npt.NDArray[np.uint8]:
        """Convert the values of a mask to numbers of classes; raise a ValueError for one that is none."""
        is_grey = (mask >= 0) & (mask <= LARGEST)
        numbers = self.table[mask] if is_grey.all() else np.where(is_grey, self.table[np.where(is_grey, mask, 0)], -1)
        for number, value in enumerate(self.values or ()):
            if value > LARGEST:
                numbers[mask == value] = number
        if (numbers < 0).any():
            wrong = np.unique(mask[numbers < 0]).tolist()
            raise ValueError(
                f"must have the values {self} of classes, and {IGNORED} for pixels that do not count. Received: "
                f"{abbreviated([*map(name_value, wrong)])}. {ask_values([*(self.values or (0,)), *wrong[:MOST_ASKED]])}"
            )
        return numbers.astype(np.uint8)

    def class_names(self, tallies: Iterable[Tally]) -> tuple[str, ...]:
        """Name the classes of masks by their numbers, up to the largest that was met."""
        largest = max((n for tally in tallies for n in tally.counts if n != IGNORED), default=-1)
        return tuple(map(str, range(len(self.values) if self.values else largest + 1)))

    @functools.cached_property
    def table(self) -> npt.NDArray[np.int16]:
        """Number of the class of each grey value, int16 (65536,), -1 for a value of none."""
        table = np.full(LARGEST + 1, -1, np.int16)
        if self.values is None:
            table[:IGNORED] = np.arange(IGNORED)
        table[IGNORED] = IGNORED
        for number, value in enumerate(self.values or ()):
            if value <= LARGEST:
                table[value] = number
        return table


def name_value(value: int) -> str:
    """Write a value of a mask as people do: a number, or a colour."""
    return str(value) if value < COLOUR else f"#{value - COLOUR:06x}"


def ask_values(values: Iterable[int]) -> str:
    """Say how to state which classes the values of masks stand for, such as these."""
    example = ",".join(name_value(value) for value in values if value >= 0)
    return (
        "Say which value each class has, in the order of the classes, such as "
        f'mask_values="{example}" (--mask-values); {IGNORED} does not count unless it is one of them'
    )


def pack_colours(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Convert colours (height, width, 3) to values (height, width); grey is a single number."""
    red, green, blue = np.moveaxis(pixels.astype(np.int32), -1, 0)
    is_grey = (red == green) & (green == blue)
    return np.where(is_grey, red, COLOUR + (red << 16) + (green << 8) + blue)


def parse_mask_values(given: str | Sequence[int | str]) -> tuple[int, ...]:
    """Read the argument `mask_values`: integers and colours, in a sequence or a text with commas."""
    items = given.split(",") if isinstance(given, str) else as_python(given)
    texts = [str(item).strip().lower() for item in items] if isinstance(items, list | tuple) else []
    values = []
    for text in texts:
        if re.fullmatch(r"#[0-9a-f]{6}", text):
            pixel = np.frombuffer(bytes.fromhex(text[1:]), np.uint8)
            values.append(int(pack_colours(pixel)))
        elif re.fullmatch(r"\d{1,5}", text) and int(text) <= LARGEST:
            values.append(int(text))
    if not 2 <= len(values) <= IGNORED or len(values) != len(texts) or len(set(values)) != len(values):
        raise ValueError(
            f"mask_values must be the values of 2 to {IGNORED} classes, all different: integers from 0 to {LARGEST}, "
            f'or colours such as "#ff0000". Received: {given!r:.200}'
        )
    return tuple(values)


def choose_mask_values(
    name: str, values: Iterable[int], *, stated: tuple[int, ...] | None, num_classes: int | None
) -> MaskValues:
    """Decide which classes the values of masks stand for, and warn of what the masks do not say themselves.

    Args:
        name: of the data, for messages.
        values: that occur in the masks.
        stated: the user's `mask_values`.
        num_classes: number of classes that the data state; None if they do not.

    Raises:
        ValueError: the values may stand for several things, and the user does not say for which.
    """
    met = sorted(set(values))
    if stated is not None:
        if num_classes not in (None, len(stated)):
            raise ValueError(
                f"{name} has {num_classes} classes. Expected as many mask_values. Received: {len(stated)}: "
                f"{', '.join(map(name_value, stated))}"
            )
        return MaskValues(stated)
    classes, names = [value for value in met if value != IGNORED], [*map(name_value, met)]
    shown = abbreviated(names)
    is_binary = len(met) == 2 and met[0] == 0 and met[1] >= IGNORED
    if is_binary and num_classes in (None, 2):
        warn(
            f"{name}: the values {shown} of the masks are read as two classes, 0 and 1, and no pixel is left out. "
            f'To say so: mask_values="{",".join(names)}"'
        )
        return MaskValues(tuple(met))
    is_sparse = num_classes is None and len(classes) > 1 and len(classes) < (classes[-1] + 1) / 2
    if is_binary or is_sparse or (classes and classes[-1] > IGNORED):
        expected = "the numbers of classes, from 0" if num_classes is None else f"0 to {num_classes - 1}"
        raise ValueError(
            f"{name}: the values of the masks do not say which classes they are. Expected: {expected}, and {IGNORED} "
            f"for pixels that do not count. Received: {shown}. {ask_values(met[:MOST_ASKED])}"
            + ". Distances are floats, in metres"
            * (IGNORED < classes[-1] < COLOUR)
        )
    if num_classes is None and len(classes) > MANY_CLASSES:
        warn(
            f"{name}: the masks have {len(classes)} values beside {IGNORED}, {shown}, which are read as as many "
            "classes. Masks with smooth edges, or from JPEG files, have values that are none"
        )
    return MaskValues()
