"""Class names: the lists in zoo/labels, or a model's own."""

from __future__ import annotations

import functools

from keras_vit._util import data_files


def names(labels: str | tuple[str, ...] | None, num_classes: int) -> list[tuple[str, str]]:
    """The (label_id, label) of every class, in the order of the logits.

    Args:
        labels: name of a list in zoo/labels ("imagenet2012"), the names themselves, or None for plain numbers.
        num_classes: how many there must be.

    Raises:
        ValueError: where the list is unknown or has another length.
    """
    if labels is None:
        return [(str(number), f"class {number}") for number in range(num_classes)]
    known = read(labels) if isinstance(labels, str) else tuple((str(i), label) for i, label in enumerate(labels))
    if len(known) != num_classes:
        raise ValueError(f"The labels are {len(known)} for {num_classes} classes. Received: labels={labels!r}")
    return list(known)


@functools.cache
def read(name: str) -> tuple[tuple[str, str], ...]:
    """The (label_id, label) pairs of zoo/labels/NAME.txt; a ValueError names the lists there are."""
    folder = data_files.folder("zoo") / "labels"
    known = sorted(path.stem for path in folder.glob("*.txt"))
    if name not in known:
        raise ValueError(f"The label lists are {known}. Received: {name!r}")
    lines = (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple((label_id, label) for label_id, _, label in (line.partition("\t") for line in lines))
