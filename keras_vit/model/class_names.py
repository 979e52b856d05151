"""What the classes are called in an exported file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keras_vit.model import labels as label_lists
from keras_vit.model.config import ViTConfig


def names(config: ViTConfig, labels: str | Iterable[str] | None) -> list[str] | None:
    """The classes' names in the order of the logits; None where there are none.

    Args:
        config: of the model.
        labels: name of a list in zoo/labels, or the names themselves; None is the model's own list.

    Raises:
        ValueError: for an unknown list, another number of names than of classes, or what is no name.
    """
    if labels is not None and not config.num_classes:
        raise ValueError("labels are of classes, and the model has no head that gives any: leave them out")
    wanted = config.labels if labels is None else labels
    if wanted is None or not config.num_classes:
        return None
    if not isinstance(wanted, str):
        wanted = tuple(wanted) if isinstance(wanted, Iterable) else (wanted,)
        if wrong := [name for name in wanted if not isinstance(name, str)]:
            raise ValueError(
                "labels are the name of a list in zoo/labels, or the classes' names, all strings. "
                f"Received: {wrong[0]!r}"
            )
    return [str(label) for _, label in label_lists.names(wanted, config.num_classes)]


def lines(labels: Sequence[str]) -> list[str]:
    """The names for a text file of one a line: a line break inside of one would shift all that follow."""
    return [" ".join(label.split()) for label in labels]
