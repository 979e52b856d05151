"""Read class names: the lists in zoo/labels, or a model's own."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from keras_vit._util import data_files
from keras_vit.model.config import ViTConfig


def names(labels: str | tuple[str, ...] | None, num_classes: int) -> list[tuple[str, str]]:
    """Return (label_id, label) for every class: from a list in zoo/labels, from given names, or numbers for None."""
    if labels is None:
        return [(str(number), f"class {number}") for number in range(num_classes)]
    known = read(labels) if isinstance(labels, str) else tuple((str(i), label) for i, label in enumerate(labels))
    if len(known) != num_classes:
        raise ValueError(f"Pass one label per class: {len(known)} for {num_classes} classes. Received: {labels!r}")
    return list(known)


@functools.cache
def read(name: str) -> tuple[tuple[str, str], ...]:
    """Return the (label_id, label) pairs of zoo/labels/NAME.txt."""
    folder = data_files.folder("zoo") / "labels"
    known = sorted(path.stem for path in folder.glob("*.txt"))
    if name not in known:
        raise ValueError(f"The label lists are {known}. Received: {name!r}")
    lines = (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple((label_id, label) for label_id, _, label in (line.partition("\t") for line in lines))


def class_names(config: ViTConfig, labels: str | Iterable[str] | None) -> list[str] | None:
    """Return the class names for an exported file, in the order of the logits; None if the classes have none.

    `labels` is the name of a list in zoo/labels, or the names themselves; None takes the model's own list.
    """
    if labels is not None and not config.num_classes:
        raise ValueError("labels need a head. Received: a model of num_classes=0")
    chosen = config.labels if labels is None else labels
    if chosen is None or not config.num_classes:
        return None
    if not isinstance(chosen, str):
        chosen = tuple(chosen) if isinstance(chosen, Iterable) else (chosen,)
        if wrong := [name for name in chosen if not isinstance(name, str)]:
            raise ValueError(
                "labels are the name of a list in zoo/labels, or the classes' names, all strings. "
                f"Received: {wrong[0]!r}"
            )
    return [str(label) for _, label in names(chosen, config.num_classes)]


def single_lines(labels: Sequence[str]) -> list[str]:
    """Return the names without line breaks, for text files with one name on each line."""
    return [" ".join(label.split()) for label in labels]
