"""Tasks of maps: the class, or the distance, of every pixel.

Targets have the size of the model's input. A smaller output is enlarged to it: bilinear, corners not aligned, as the
official heads do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from keras_vit.dense.depth_task import Depth
from keras_vit.dense.maps import MapTask, enlarge
from keras_vit.model import task as tasks
from keras_vit.model.classification import Classification, Labels, Tensors

__all__ = ["IGNORED", "Depth", "Segmentation"]

IGNORED = 255  # label of pixels that do not count
# Fields of an export's report that numbers of classes do not have.
NO_AMOUNTS = ("cosine", "mean_cosine", "difference_cosine", "sqnr", "max_error", "decided_agreement")


@tasks.register
@dataclass(frozen=True, kw_only=True)
class Segmentation(MapTask):
    """Classify every pixel: logits (batch, height, width, classes). Pixels labelled 255 do not count.

    Metrics are those of mmsegmentation: intersections and unions are summed over the whole data set, and the mean is
    over the classes that occur in labels or predictions.

    Args:
        num_classes: number of classes, at most 255.
        labels: name of a list in zoo/labels, or the names of the classes.
        image_size: (height, width) of exported class maps; None for that of the logits.
    """

    num_classes: int
    labels: str | tuple[str, ...] | None = None
    image_size: tuple[int, int] | None = None

    NAME: ClassVar[str] = "a class for every pixel"
    LABELS = "maps of classes: integers (n, height, width)"
    OBJECTIVES: ClassVar[tuple[str, ...]] = ("softmax",)
    metrics = ("pixel_accuracy",)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """See `keras_vit.model.task.Task`."""
        areas = [
            f"{kind}_{number}" for kind in ("common", "predicted", "labelled") for number in range(self.num_classes)
        ]
        return ("loss", "count", "unlabelled", *areas)

    @property
    def outputs(self) -> tuple[str, ...]:
        """See `keras_vit.model.task.Task`: "classes" are uint8 (batch, height, width) at `image_size`."""
        return ("logits", "classes") if self.num_classes <= IGNORED else ("logits",)

    @staticmethod
    def read_labels(labels: np.ndarray) -> np.ndarray | None:
        """Return maps of classes as uint8, or wider if a number needs it; None for labels of another task."""
        if labels.ndim != 3 or labels.dtype.kind not in "iu":
            return None
        is_byte = labels.size and labels.min() >= 0 and labels.max() <= IGNORED
        return labels.astype(np.uint8) if is_byte else labels

    @staticmethod
    def count_classes(labels: np.ndarray) -> int:
        """Return the number of classes that maps have: the highest number that is not 255, plus one."""
        return int(labels.max(initial=0, where=labels != IGNORED)) + 1

    def check_labels(self, split: str, labels: np.ndarray) -> None:
        """See `keras_vit.model.task.Task`."""
        if self.num_classes > IGNORED:
            raise ValueError(f"Maps have at most {IGNORED} classes. Received: {self.num_classes}")
        wrong = np.unique(labels[(labels < 0) | ((labels >= self.num_classes) & (labels != IGNORED))])
        if wrong.size:
            raise ValueError(
                f"{split} must have the numbers 0 to {self.num_classes - 1} of classes, and {IGNORED} for pixels that "
                f"do not count. Received: {', '.join(map(str, wrong[:5]))}"
            )

    def renumbered(self, label: Any, numbers: Sequence[int]) -> Any:
        """See `keras_vit.model.task.Task`: uint8 (height, width)."""
        import tensorflow as tf

        table = np.full(IGNORED + 1, IGNORED, np.uint8)
        table[: len(numbers)] = numbers
        return tf.gather(tf.constant(table), tf.cast(label, tf.int32))

    def check_output(self, shape: Any) -> None:
        """See `keras_vit.model.task.Task`: it must be a row of logits for each pixel."""
        if not isinstance(shape, tuple) or len(shape) != 4 or shape[-1] != self.num_classes:
            raise ValueError(
                f"Expected a model that returns logits (batch, height, width, {self.num_classes}). Received: {shape}"
            )

    def targets(self, labels: Any) -> Any:
        """Return maps of classes as int32."""
        import tensorflow as tf

        labels = tf.cast(labels, tf.int32)
        is_known = (labels < self.num_classes) | (labels == IGNORED)
        tf.debugging.assert_equal(
            is_known, True, f"A mask has a number that is neither below {self.num_classes} nor 255"
        )
        return labels

    def losses(self, output: Any, targets: Any, *, kind: str, label_smoothing: float = 0.0) -> tuple[Any, Tensors]:
        """Return the mean cross-entropy of each image over its labelled pixels, and the share of them that are right.

        An image without a labelled pixel has loss and accuracy 0. `kind` can only be "softmax".
        """
        import tensorflow as tf

        logits = enlarge(output, targets.shape[1:])
        counted = tf.cast(targets != IGNORED, tf.float32)
        pixels = tf.maximum(tf.reduce_sum(counted, (1, 2)), 1)
        shares = tf.one_hot(targets, self.num_classes) * (1 - label_smoothing) + label_smoothing / self.num_classes
        losses = tf.nn.softmax_cross_entropy_with_logits(shares, logits) * counted
        right = tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int32) == targets, tf.float32) * counted
        return tf.reduce_sum(losses, (1, 2)) / pixels, {"pixel_accuracy": tf.reduce_sum(right, (1, 2)) / pixels}

    def sums(self, output: Any, targets: Any, weights: Any) -> Any:
        """Return what a batch adds to an evaluation, float64, named by `sum_names`. NaN is never right.

        Args:
            output: logits (batch, rows, columns, classes).
            targets: int32 (batch, height, width); 255 for pixels that do not count.
            weights: (batch,), 1 for an image, 0 for padding.
        """
        import tensorflow as tf

        def of_image(image: Any) -> Any:
            logits, target, weight = image
            logits = enlarge(tf.cast(logits, tf.float32)[None], targets.shape[1:])[0]
            is_counted = (target != IGNORED) & (weight > 0)
            logits, labels = logits[is_counted], target[is_counted]
            predicted = tf.argmax(logits, axis=-1, output_type=tf.int32)
            is_right = (predicted == labels) & ~tf.reduce_any(tf.math.is_nan(logits), axis=-1)
            areas = [
                tf.math.bincount(numbers, minlength=self.num_classes, maxlength=self.num_classes, dtype=tf.float64)
                for numbers in (labels[is_right], predicted, labels)
            ]
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            has_labels = tf.cast(tf.size(labels) > 0, tf.float64)
            counts = [has_labels, tf.cast(weight, tf.float64) - has_labels]
            return tf.concat([[tf.reduce_sum(tf.cast(losses, tf.float64)), *counts], *areas], axis=0)

        # One image at a time: the enlarged logits of a batch may not fit into the memory.
        images = tf.map_fn(of_image, (output, targets, weights), fn_output_signature=tf.float64)
        return tf.reduce_sum(images, axis=0)

    def means(self, totals: dict[str, float]) -> dict[str, float]:
        """Return mean IoU, pixel accuracy and the mean of the classes' accuracies, 0 to 1; cross-entropy in nats."""
        common, _, labelled = self._areas(totals)
        classes = self.by_class(totals).values()
        return {
            "mean_iou": float(np.nanmean([each["iou"] for each in classes])),
            "pixel_accuracy": float(common.sum() / labelled.sum()),
            "mean_accuracy": float(np.nanmean([each["accuracy"] for each in classes])),
            "loss": totals["loss"] / float(labelled.sum()),
        }

    def by_class(self, totals: dict[str, float]) -> Mapping[str, Mapping[str, float]]:
        """Return of each class: IoU, accuracy (NaN where the class does not occur), and its share of the pixels."""
        common, predicted, labelled = self._areas(totals)
        with np.errstate(invalid="ignore"):
            columns = {
                "iou": common / (predicted + labelled - common),
                "accuracy": common / labelled,
                "share": labelled / labelled.sum(),
            }
        names = self.class_names() or map(str, range(self.num_classes))
        return {
            name: {column: float(values[number]) for column, values in columns.items()}
            for number, name in enumerate(names)
        }

    def _areas(self, totals: Mapping[str, float]) -> np.ndarray:
        """Return the pixels of each class: common to label and prediction, predicted, labelled: (3, classes)."""
        return np.array([totals[name] for name in self.sum_names[3:]]).reshape(3, -1)

    def served_outputs(self, computed: Tensors, names: Sequence[str] | None, top: int) -> Tensors:
        """Return "classes", uint8 (batch, height, width) at `image_size`."""
        import tensorflow as tf

        return {"classes": tf.cast(tf.argmax(self._full_size(computed["logits"]), axis=-1), tf.uint8)}

    def exported_output(self, name: str, output: np.ndarray) -> np.ndarray:
        """Return the class of every pixel for "classes", else the output."""
        return np.asarray(self.served_outputs({"logits": output}, None, 1)[name]) if name == "classes" else output

    def agreement(self, name: str, expected: np.ndarray, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which pixels have the same class, and which have it or are near ties."""
        if name == "classes":
            return (expected == received).ravel(), (expected == received).ravel()
        return self._of_pixels.agreement(name, expected, received)

    def comparison(self, name: str, expected: np.ndarray, received: np.ndarray) -> dict[str, Any]:
        """Return the fields of an export's report that are particular to the task: the mean IoU with the model's maps.

        Numbers of classes are no amounts: without logits there are no cosines.
        """
        want, got = (each if name == "classes" else each.argmax(axis=-1) for each in (expected, received))
        counts = [
            np.bincount(each.astype(np.int64).ravel(), minlength=self.num_classes)
            for each in (want[want == got], want, got)
        ]
        common, union = counts[0], counts[1] + counts[2] - counts[0]
        fields: dict[str, Any] = {"mean_iou": float((common[union > 0] / union[union > 0]).mean())}
        if name == "classes":
            fields |= dict.fromkeys(NO_AMOUNTS)
        return fields

    def decode(self, output: Any, top: int) -> list[list[tasks.Prediction]]:
        """Return the `top` largest classes of each image with their shares of its pixels, the largest first."""
        return self.shares(self.exported_output("classes", np.asarray(output)), top)

    def shares(self, classes: np.ndarray, top: int) -> list[list[tasks.Prediction]]:
        """Return what `decode` does, from the numbers of classes (batch, height, width)."""
        shares = np.stack([np.bincount(each.ravel(), minlength=self.num_classes) / each.size for each in classes])
        with np.errstate(divide="ignore"):
            return self._of_pixels.decode(np.log(shares), top)

    def class_names(self, labels: Labels | Iterable[str] = None) -> list[str] | None:
        """See `keras_vit.model.task.Task`; the names are in the order of the logits."""
        return self._of_pixels.class_names(labels)

    @property
    def _of_pixels(self) -> Classification:
        """The classification of a single pixel."""
        return Classification(num_classes=self.num_classes, labels=self.labels)

    def _full_size(self, output: Any) -> Any:
        return output if self.image_size is None else enlarge(output, self.image_size)
