"""Read class names, the lists in zoo/labels or a model's own, and compare them with those of data."""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence

from keras_vit._util import files
from keras_vit._util.text import abbreviated, warn


def names(labels: str | tuple[str, ...] | None, num_classes: int) -> list[tuple[str, str]]:
    """List (label_id, label) for every class: from a list in zoo/labels, from given names, or numbers for None."""
    if labels is None:
        return [(str(number), f"class {number}") for number in range(num_classes)]
    known = read(labels) if isinstance(labels, str) else tuple((str(i), label) for i, label in enumerate(labels))
    if len(known) != num_classes:
        raise ValueError(f"Pass one label per class: {len(known)} for {num_classes} classes. Received: {labels!r:.200}")
    return list(known)


def distinct(names: Sequence[str]) -> list[str]:
    """Add the number of the class to names that several classes have, for tables that are keyed by name.

    Two classes of ImageNet, for example, are called "crane".

    >>> distinct(["a", "b", "a"])
    ['a (0)', 'b', 'a (2)']
    """
    counts = Counter(names)
    if len(counts) == len(names):
        return list(names)
    return distinct([f"{name} ({i})" if counts[name] > 1 else name for i, name in enumerate(names)])


@functools.cache
def read(name: str) -> tuple[tuple[str, str], ...]:
    """Read the (label_id, label) pairs of zoo/labels/NAME.txt."""
    folder = files.data_folder("zoo") / "labels"
    if name not in lists():
        raise ValueError(f"labels must be one of {lists()}, or the names of the classes. Received: {name!r:.200}")
    lines = (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple((label_id, label) for label_id, _, label in (line.partition("\t") for line in lines))


def lists() -> list[str]:
    """Names of the lists in zoo/labels."""
    return sorted(path.stem for path in (files.data_folder("zoo") / "labels").glob("*.txt"))


def match_classes(labels: str | tuple[str, ...], num_classes: int, class_names: Sequence[str], data: str) -> list[int]:
    """Find the model's class number for each class of a data set, which may have only some of the model's classes.

    Names are compared with labels and label_ids exactly; then ignoring case, "_" and "-"; then with the parts of labels
    such as "tench, Tinca tinca". A name that matches several classes matches none. If no name matches and all names are
    numbers of classes, they are used as such, with a warning unless they count from 0 in order.

    A ValueError names the classes that the model does not have; `data` is for messages.
    """
    known = names(labels, num_classes)
    texts = [label for _, label in known]
    found: dict[str, int] = {}
    for key, keys in (
        (str, [{label, *ids} for label, ids in zip(texts, _label_ids(labels, known), strict=True)]),
        (loose_name, [{loose_name(label)} for label in texts]),
        (loose_name, [{loose_name(part) for part in label.split(",")} for label in texts]),
    ):
        table: dict[str, int | None] = {}
        for number, spellings in enumerate(keys):
            table |= {spelling: None if spelling in table else number for spelling in spellings}
        taken = set(found.values())
        for name in class_names:
            match = table.get(key(name))
            if match is not None and name not in found and match not in taken:
                found[name] = match
                taken.add(match)
    if not found and all(name.isdecimal() and int(name) < num_classes for name in class_names):
        found = {name: int(name) for name in class_names}
        if list(found) != [str(number) for number in range(num_classes)]:
            last = class_names[-1]
            meaning = f"{last} is {texts[int(last)]!r}"
            warn(f"The classes of {data} are taken as numbers of the model's: {meaning}.")
    if unknown := [name for name in class_names if name not in found]:
        others = sorted(set(range(num_classes)) - set(found.values())) + sorted(found.values())
        raise ValueError(
            f"{data} has classes that the model does not have: {abbreviated(unknown)}. The data's {len(class_names)}"
            f" classes are {abbreviated([*unknown, *found])}; the model's {num_classes} are"
            f" {abbreviated([texts[number] for number in others])}. Give them the same names, or train a new head with"
            " reset_head=True (keras-vit train --set reset_head=true)."
        )
    return [found[name] for name in class_names]


def _label_ids(labels: str | tuple[str, ...], known: list[tuple[str, str]]) -> list[list[str]]:
    """Find the label_ids of each class: those of a list in zoo/labels, also if the labels are most of that list's."""
    if isinstance(labels, str):
        return [[label_id] for label_id, _ in known]
    for pairs in map(read, lists()):  # converted files spell some labels of ImageNet differently
        same = [loose_name(one) == loose_name(other) for (_, one), (_, other) in zip(pairs, known, strict=False)]
        if len(pairs) == len(known) and 2 * sum(same) > len(known):
            return [[label_id] for label_id, _ in pairs]
    return [[] for _ in known]  # the numbers in `known` are not names


def loose_name(name: str) -> str:
    """Spell a class without case, "_" and "-", in which its spellings differ."""
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


def check_labels(labels: str | Iterable[str]) -> str | tuple[str, ...]:
    """Check labels: the name of a list in zoo/labels, or class names, which become a tuple."""
    if isinstance(labels, str):
        return labels
    given = tuple(labels) if isinstance(labels, Iterable) else (labels,)
    if wrong := [name for name in given if not isinstance(name, str)]:
        raise ValueError(
            "labels must be the name of a list in zoo/labels, or the names of the classes, all strings. "
            f"Received: {wrong[0]!r:.200}"
        )
    return given


def single_lines(labels: Sequence[str]) -> list[str]:
    """Remove line breaks from names, for text files with one name on each line."""
    return [" ".join(label.split()) for label in labels]
