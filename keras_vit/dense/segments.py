"""Segments: masks of things and of areas from an EoMT's queries, and the task of its outputs.

Source of the rules: image_processing_eomt.py of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from keras_vit._util.checks import Rule, as_python, is_count, one_of
from keras_vit.model.resizing import resize_axis
from keras_vit.model.task import NOT_TRAINED, Classification, Labels, Task, Tensors, sigmoid, softmax

SEGMENT_TASKS = ("panoptic", "instance", "semantic")
MASK_THRESHOLD = 0.5  # least probability of a pixel of a mask
OVERLAP_THRESHOLD = 0.8  # a mask of which less is left beside the others is no segment
SAME_IOU = 0.5  # above which two segments of a class are the same, as in the panoptic quality (arXiv 1801.00868)

Size = tuple[int, int]  # height, width
Row = tuple[int, float | None]  # class, score


class Segment(NamedTuple):
    """A segment of an image.

    Args:
        id: its number in the map, from 1.
        label_id: number of its class.
        label: name of its class.
        score: 0 to 1; None in a semantic map.
        area: number of its pixels.

    Example:
        >>> keras_vit.dense.Segment(id=1, label_id=7, label="cat", score=0.9, area=120).label
        'cat'
    """

    id: int
    label_id: int
    label: str
    score: float | None
    area: int


@dataclass(frozen=True, eq=False)
class SegmentMap:
    """The segments of an image.

    Args:
        ids: int32 (height, width), the number of the segment of each pixel, 0 for none.
        segments: in the order of their numbers.

    Example:
        >>> found = keras_vit.dense.SegmentMap(np.array([[0, 1]]), [keras_vit.dense.Segment(1, 7, "cat", 0.9, 1)])
        >>> found.segments[0].label
        'cat'
    """

    ids: np.ndarray
    segments: list[Segment]


class Window(NamedTuple):
    """A square of a prepared image, the place of its corner, and what the model computes for it."""

    row: int
    column: int
    pixels: np.ndarray
    classes: np.ndarray = np.zeros(0)  # logits (queries, classes + 1)
    masks: np.ndarray = np.zeros(0)  # logits (rows, columns, queries)


def check_limits(threshold: Any, stuff_classes: Collection[Any], num_classes: int) -> None:
    """Raise a ValueError if the threshold, or a number of a class of which an image has one segment, is wrong."""
    wrong = list(Rule.from_type(Annotated[float, "[0, 1]"]).problems(as_python(threshold), "threshold"))
    if unknown := [one for one in stuff_classes if not is_count(one, least=0) or one >= num_classes]:
        wrong.append(f"stuff_classes must be integers from 0 to {num_classes - 1}. Received: {unknown!r:.200}")
    if wrong:
        raise ValueError("predict_segments: " + "; ".join(wrong))


def segment_task(task: str | None, framing: str) -> str:
    """Check the kind of segments that is asked for, or choose that for which a model's images are prepared."""
    chosen = task or ("semantic" if framing == "windows" else "panoptic")
    one_of("task", chosen, SEGMENT_TASKS)
    if framing == "windows" and chosen != "semantic":
        raise ValueError(f"task must be 'semantic' for a model that reads windows of an image. Received: {task!r}")
    return chosen


def fitted_size(sides: Size, least: int, most: int | None = None) -> Size:
    """Scale the shorter side to `least`, but the longer one to `most` at most; get_size_with_aspect_ratio."""
    short, long = min(sides), max(sides)
    exact: float = most * short / long if most and long / short * least > most else least
    new = round(exact)
    if short == new:
        return sides
    other = int(exact * long / short)
    return (new, other) if sides[0] <= sides[1] else (other, new)


def windows(prepared: np.ndarray, side: int, black: np.ndarray) -> Iterator[Window]:
    """Cut a prepared image (height, width, channels) into squares along its longer side, or fill one with `black`."""
    height, width, _ = prepared.shape
    long = max(height, width)
    count = math.ceil(long / side)
    overlap = (count * side - long) / (count - 1) if count > 1 else 0
    for i in range(count):
        start = int(i * (side - overlap))
        row, column = (start, 0) if height > width else (0, start)
        pixels = np.broadcast_to(black, (side, side, prepared.shape[-1])).copy()
        cut = prepared[row : row + side, column : column + side]
        pixels[: cut.shape[0], : cut.shape[1]] = cut
        yield Window(row, column, pixels)


def resize(masks: np.ndarray, size: Size) -> np.ndarray:
    """Resize maps (rows, columns, channels) bilinearly."""
    return resize_axis(resize_axis(masks.astype(np.float32), 0, size[0]), 1, size[1])


def class_scores(parts: Sequence[Window], size: Size) -> np.ndarray:
    """Add up the masks of all queries by their classes, (height, width, classes), the mean where windows overlap."""
    total, count = np.zeros((*size, parts[0].classes.shape[-1] - 1), np.float32), np.zeros((*size, 1), np.float32)
    for part in parts:
        side = len(part.pixels)
        scores = sigmoid(resize(part.masks, (side, side))) @ softmax(part.classes.astype(np.float32))[:, :-1]
        place = np.s_[part.row : part.row + side, part.column : part.column + side]
        total[place] += scores[: size[0], : size[1]]
        count[place] += 1
    whole: np.ndarray = total / np.maximum(count, 1)
    return whole


def find_segments(
    classes: np.ndarray,
    masks: np.ndarray,
    sizes: tuple[Size, Size, Size] | None = None,
    *,
    task: str = "panoptic",
    threshold: float = 0.8,
    stuff_classes: Collection[int] = (),
) -> tuple[np.ndarray, list[Row]]:
    """Find panoptic or instance segments: their numbers from 1, int32 (height, width), and their classes and scores.

    `classes` and `masks` are a `Window`'s logits. `sizes` are those of the window, of the image in it, and of the image
    itself; None leaves the masks as they are.
    """
    probabilities = softmax(classes.astype(np.float32))
    is_panoptic = task == "panoptic"
    known = probabilities if is_panoptic else probabilities[:, :-1]
    scores, labels = known.max(axis=-1), known.argmax(axis=-1)
    # An instance's score is multiplied by the mean of its mask, which is below 1.
    chosen = np.flatnonzero(
        (labels < classes.shape[-1] - 1) & (scores > threshold if is_panoptic else scores >= threshold)
    )
    logits = masks[..., chosen]
    if sizes is not None:
        window, framed, whole = sizes
        logits = resize(resize(logits, window)[: framed[0], : framed[1]], whole)
    ids, rows = np.zeros(logits.shape[:2], np.int32), list[Row]()
    if not len(chosen):
        return ids, rows
    shares = sigmoid(logits)
    best = (scores[chosen] * shares).argmax(axis=-1)
    merged: dict[int, int] = {}  # class -> number of its only segment
    for k, query in enumerate(chosen):
        label, score = int(labels[query]), float(scores[query])
        if is_panoptic:
            own, certain = best == k, shares[..., k] >= MASK_THRESHOLD
            found = own & certain
            if not found.any() or not own.sum() / certain.sum() > OVERLAP_THRESHOLD:
                continue
            if label in merged:
                ids[found] = merged[label]
                continue
            if label in stuff_classes:
                merged[label] = len(rows) + 1
        else:
            found = logits[..., k] > 0
            score *= float(shares[..., k][found].sum() / (found.sum() + 1e-6))
            if not found.any() or score < threshold:
                continue
        rows.append((label, score))
        ids[found] = len(rows)
    return ids, rows


def describe(ids: np.ndarray, rows: Sequence[Row], names: Sequence[str] | None) -> SegmentMap:
    """Add names and areas to the segments of a map."""
    areas = np.bincount(ids.ravel(), minlength=len(rows) + 1)
    return SegmentMap(
        ids,
        [
            Segment(number, label, names[label] if names else str(label), score, int(areas[number]))
            for number, (label, score) in enumerate(rows, start=1)
        ],
    )


def same_segments(first: tuple[np.ndarray, list[Row]], second: tuple[np.ndarray, list[Row]]) -> int:
    """Count the segments that two maps of an image share: of one class, and with an IoU above 0.5."""
    counts = [len(rows) + 1 for _, rows in (first, second)]
    common = np.bincount((first[0] * counts[1] + second[0]).ravel(), minlength=counts[0] * counts[1]).reshape(counts)
    union = common.sum(axis=1, keepdims=True) + common.sum(axis=0) - common
    labels = [np.array([-1 - side, *(label for label, _ in rows)]) for side, (_, rows) in enumerate((first, second))]
    return int(((labels[0][:, None] == labels[1]) & (common > SAME_IOU * union)).sum())


@dataclass(frozen=True, kw_only=True)
class Segments(Task):
    """Find segments: logits of each query's class (batch, queries, classes + 1), and of its mask.

    Args:
        num_classes: number of classes, without "none".
        labels: name of a list in zoo/labels, or the names of the classes.
    """

    num_classes: int = 0
    labels: str | tuple[str, ...] | None = None

    NAME: ClassVar[str] = "a class and a mask for every query"
    OBJECTIVES: ClassVar[tuple[str, ...]] = ()
    outputs = ("class_logits", "mask_logits")
    metrics = ()
    sum_names = ()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(NOT_TRAINED.format(self.NAME))

    check_labels = check_output = targets = losses = sums = means = _refuse

    def served_outputs(self, computed: Tensors, names: Sequence[str] | None, top: int) -> Tensors:
        """Serve both outputs."""
        return {name: computed[name] for name in self.outputs}

    def exported_output(self, name: str, output: Any) -> np.ndarray:
        """Select an output of the model."""
        return np.asarray(output[name])

    def agreement(self, name: str, expected: np.ndarray, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the queries of the same class, and those of the same class or a near tie."""
        return Classification(num_classes=self.num_classes + 1).agreement("logits", expected, received)

    def joint_comparison(self, expected: Tensors, received: Tensors) -> dict[str, Any]:
        """Compare the panoptic segments, and the masks of the queries that have a class (of all if none has one)."""
        count = found = same = 0
        common = union = np.zeros(0)
        for i, classes in enumerate(expected["class_logits"]):
            masks = [side["mask_logits"][i] for side in (expected, received)]
            logits = [classes, received["class_logits"][i]]
            maps = [find_segments(*pair) for pair in zip(logits, masks, strict=True)]
            count, found = count + len(maps[0][1]), found + sum(len(rows) for _, rows in maps)
            same += same_segments(*maps)
            has_class = classes.argmax(axis=-1) < self.num_classes
            chosen = has_class if has_class.any() else ~has_class
            want, got = (mask[..., chosen] > 0 for mask in masks)
            common, union = (
                np.append(areas, part.sum(axis=(0, 1))) for areas, part in ((common, want & got), (union, want | got))
            )
        errors = [np.abs(received[name] - want).max() / np.abs(want).max() for name, want in expected.items()]
        agreement = 2 * same / found if found else 1.0
        return {
            "max_error": float(max(errors)),
            "segments": count,
            "agreement": agreement,
            "decided_agreement": agreement,
            "mean_iou": float((common[union > 0] / union[union > 0]).mean()) if union.any() else 1.0,
        }

    def class_names(self, labels: Labels | Iterable[str] = None) -> list[str] | None:
        """See `keras_vit.model.task.Task`."""
        return Classification(num_classes=self.num_classes, labels=self.labels).class_names(labels)

    def decode(self, output: Mapping[str, np.ndarray], top: int) -> list[list[Segment]]:
        """List the panoptic segments of each image, at the size of the masks, the largest first."""
        found = [find_segments(*logits) for logits in zip(output["class_logits"], output["mask_logits"], strict=True)]
        maps = [describe(*segments, self.class_names()) for segments in found]
        return [sorted(part.segments, key=lambda segment: -segment.area)[:top] for part in maps]
