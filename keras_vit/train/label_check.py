"""Check the labels of a data set before the first step or an evaluation: do they say what is to be learned?

Of records, and of folders of maps, a bounded number of labels is read. Also finds the weights of classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from keras_vit._util.text import abbreviated, suggestion, warn
from keras_vit.dense.map_tasks import IGNORED, Depth, Segmentation
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.label_values import Tally, ask_values, tally_labels
from keras_vit.train.data.split import Data, Order, Split

MOST_LABELS = 10_000  # classes of images in records that are read
ENOUGH = 100  # of them for each class: with fewer a class may have none, or a tenth of another, by chance
UNBALANCED = {False: 10, True: 100}  # ratio of the largest to the smallest class that is told; True for maps
TWO_CLASSES = "Expected: at least two classes that occur"


def check_training(data: Data, recipe: Recipe) -> str:
    """Check the labels that a recipe learns from, and those it is evaluated on; describe them in a line, or "".

    Warns of classes that never occur, of pixels that do not count, and of classes that are far from balanced.

    Raises:
        ValueError: fewer than two classes occur, or no distance.
    """
    learns_labels = recipe.trains_head and (not recipe.has_teacher or recipe.label_weight > 0)
    if not (data.is_labelled and learns_labels):
        return ""
    tally = _read(data.training_split())
    if isinstance(data.task, Depth):
        _check_distances(data, "training", tally, recipe.max_depth)
    else:
        _check_classes(data, tally, recipe)
    if data.evaluation is not None:
        check_held_out(data, recipe.max_depth, warns=False)
    return _describe(data, tally)


def check_held_out(data: Data, max_depth: float | None = None, *, warns: bool = True) -> None:
    """Check that the maps of the held-out split have something to measure; `warns` of pixels that do not count.

    Raises:
        ValueError: no pixel counts.
    """
    split = data.evaluation
    if split is None or split.tally is None or not isinstance(data.task, Segmentation | Depth):
        return
    if isinstance(data.task, Depth):
        _check_distances(data, "held-out", split.tally, max_depth)
        return
    classes = _classes(data, split.tally)
    if not classes and split.tally.is_complete:
        raise ValueError(f"{data.name}: no pixel of the {split.count:,} held-out masks counts. {_values(split.tally)}")
    if warns:
        _warn_ignored(data, "held-out", split.tally)
    if len(classes) > 1 and warns:
        _warn_absent(data, "held-out masks", split.tally)
    elif len(classes) == 1:
        warn(
            f"{data.name}: the held-out masks have one class only, {data.class_names[classes[0]]}, of the "
            f"{data.num_classes}: the figures say little about the others. {_values(split.tally)}"
        )


def _read(split: Split) -> Tally:
    if split.tally is not None:
        return split.tally
    with split.naming_bad_image(Order(batch=1, shuffle=False), batches=min(split.count, MOST_LABELS)):
        return tally_labels(split.some_labels(MOST_LABELS), total=split.count)


def _classes(data: Data, tally: Tally) -> list[int]:
    """Numbers of the classes that occur; of rows of zeros and ones, those that some images have and others not."""
    if data.multi_label:
        return [number for number, count in tally.counts.items() if 0 < count < tally.read]
    return sorted(number for number, count in tally.counts.items() if count and number < data.num_classes)


def _check_classes(data: Data, tally: Tally, recipe: Recipe) -> None:
    is_map, classes = isinstance(data.task, Segmentation), _classes(data, tally)
    unit = "masks" if is_map else "images"
    least = 1 if data.multi_label and recipe.objective == "sigmoid" else 2
    if len(classes) < least or data.num_classes < least:
        message = (
            f"{data.name}: the labels of the {tally.extent} training {unit} leave nothing to learn. {TWO_CLASSES}. "
            f"{_values(tally, data)}. {_advice(data, tally)}"
        )
        if tally.is_complete:
            raise ValueError(message)
        warn(message)
        return
    names = data.class_names
    if is_map:
        _warn_ignored(data, "training", tally)
    if not (is_map or tally.is_complete or tally.read >= ENOUGH * data.num_classes):
        return
    _warn_absent(data, f"training {unit}", tally)
    counts = {number: tally.counts[number] for number in classes}
    most, fewest = max(counts, key=lambda number: counts[number]), min(counts, key=lambda number: counts[number])
    ratio = counts[most] / counts[fewest]
    if ratio >= UNBALANCED[is_map] and recipe.class_weights is None and not data.multi_label:
        of = "pixels" if is_map else "images"
        warn(
            f"{data.name}: the classes are far from balanced, {ratio:,.0f} : 1 ({counts[most]:,} {of} of {names[most]},"
            f" {counts[fewest]:,} of {names[fewest]}). class_weights='balanced' (--set class_weights=balanced) gives "
            "each class the same share of the loss"
        )


def _values(tally: Tally, data: Data | None = None) -> str:
    """Describe the values that were met."""
    if not tally.counts:
        return f"Received: no label that can be read. The first: {tally.problem}"
    total = sum(tally.counts.values())
    shares = []
    for number, count in sorted(tally.counts.items()):
        share = f"{count:,} of {tally.read:,}" if data and data.multi_label else f"{count / total:.1%}"
        name = data.class_names[number] if data and number < len(data.class_names) else str(number)
        shares.append(
            f"{name}: {share}" + " (does not count)" * (number == IGNORED and not (data and data.multi_label))
        )
    return f"Received: {abbreviated(shares)}"


def _advice(data: Data, tally: Tally) -> str:
    """Say what to do about labels with fewer than two classes."""
    if isinstance(data.task, Segmentation):
        return ask_values(sorted({0, *tally.counts})) if tally.counts.get(IGNORED) else "Add masks of the other classes"
    if data.multi_label and data.num_classes == 1:
        return (
            "The softmax of one class is always 1. For a class that an image has or not, set objective='sigmoid' "
            "(--set objective=sigmoid), or pass labels 0 and 1 of shape (n,), and the names of both classes"
        )
    return "Add images of another class: in a folder of its own, or with another number in the labels"


def _warn_absent(data: Data, what: str, tally: Tally) -> None:
    if absent := [data.class_names[number] for number in range(data.num_classes) if not tally.counts.get(number)]:
        warn(
            f"{data.name}: classes of which the {tally.extent} {what} have none: {abbreviated(absent)} "
            f"({len(absent):,} of {data.num_classes:,})"
        )


def _warn_ignored(data: Data, part: str, tally: Tally) -> None:
    ignored = tally.counts.get(IGNORED, 0)
    if ignored and not data.states_values:
        warn(
            f"{data.name}: {IGNORED} in masks does not count: {ignored / sum(tally.counts.values()):.1%} of the pixels "
            f"of the {tally.extent} {part} masks. To say so: mask_values with the values of the classes"
        )


def _check_distances(data: Data, part: str, tally: Tally, max_depth: float | None) -> None:
    known = {metres: count for metres, count in tally.counts.items() if metres}
    far = {metres: count for metres, count in known.items() if max_depth is not None and metres - 1 >= max_depth}
    limit = f" below max_depth={max_depth:g} m" if far else ""
    if len(far) == len(known):
        received = f"distances up to {max(known):,} m" if known else "none" if tally.counts else tally.problem
        message = (
            f"{data.name}: no pixel of the {tally.extent} {part} maps has a distance{limit}. Expected: metres above 0; "
            f"in a PNG file divided by the number in depth_scale.txt, or 1000. Received: {received}"
        )
        if tally.is_complete:
            raise ValueError(message)
        warn(message)
    elif far:
        warn(
            f"{data.name}: distances beyond max_depth={max_depth:g} m do not count: "
            f"{sum(far.values()) / sum(known.values()):.1%} of those in the {tally.extent} {part} maps"
        )


def _describe(data: Data, tally: Tally) -> str:
    """Describe the labels of the training in a line."""
    total = sum(tally.counts.values())
    if isinstance(data.task, Depth):
        known = [metres for metres in tally.counts if metres]
        share = 1 - tally.counts.get(0, 0) / total if total else 0.0
        return f"labels of {tally.extent} maps: up to {max(known, default=0):,} m, {share:.1%} of the pixels"
    classes = _classes(data, tally)
    found = f"{len(classes):,} of {data.num_classes:,} classes occur"
    if isinstance(data.task, Segmentation):
        ignored = tally.counts.get(IGNORED, 0) / total if total else 0.0
        return f"labels of {tally.extent} masks: {found}, {ignored:.1%} of the pixels do not count"
    counts = [tally.counts[number] for number in classes]
    sizes = f"{min(counts):,} to {max(counts):,} images of each" if counts else "none"
    return f"labels of {tally.extent} images: {found}, {sizes}"


def class_weights(recipe: Recipe, data: Data) -> npt.NDArray[np.float32] | None:
    """Find the weight of each class by its number in the data, float32 (classes,); None where all are equal.

    "balanced" gives labels / (classes that occur * labels of the class), as scikit-learn; to maps by their pixels.

    Raises:
        ValueError: the weights are not of these classes, or the labels are not one class each.
    """
    given = recipe.class_weights
    if given is None:
        return None
    split = data.training_split()
    if isinstance(data.task, Depth) or (
        data.multi_label and (np.asarray(split.some_labels(MOST_LABELS)).sum(axis=1) != 1).any()
    ):
        raise ValueError(f"class_weights need one class for each image or pixel. Received: {data.name}")
    names = list(data.class_names)
    if isinstance(given, Mapping):
        weights = np.ones(data.num_classes)
        for name, weight in given.items():
            weights[_number_of(name, names)] = weight
    elif isinstance(given, str):
        counts = _read(split).counts
        numbers = [number for number in range(data.num_classes) if counts.get(number)]
        total = sum(counts[number] for number in numbers)
        weights = np.ones(data.num_classes)
        weights[numbers] = [total / (len(numbers) * counts[number]) for number in numbers]
    elif len(given) == data.num_classes:
        weights = np.array(given, np.float64)
    else:
        raise ValueError(
            f"class_weights must be one for each of the {data.num_classes} classes of {data.name}: "
            f"{abbreviated(names)}. Received: {len(given)}"
        )
    return weights.astype(np.float32)


def _number_of(name: str, names: list[str]) -> int:
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    raise ValueError(f"class_weights has {name!r:.200}, which is no class of the data; {suggestion(name, names)}")
