"""Tasks of maps: the class, or the distance, of every pixel.

Targets have the size of the model's input. A smaller output is enlarged to it: bilinear, corners not aligned, as the
official heads do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from keras_vit.model import task as tasks
from keras_vit.model.labels import distinct
from keras_vit.model.task import Classification, Labels, Task, Tensors

IGNORED = 255  # label of pixels that do not count
TOO_MANY_CLASSES = f"Maps have labels of at most {IGNORED} classes. Received: {{}}"
# Fields of an export's report that numbers of classes do not have.
LOGITS_FIELDS = (
    *("cosine", "mean_cosine", "difference_cosine", "difference_scale", "sqnr", "max_error"),
    "decided_agreement",
)
MIN_DEPTH = 1e-3  # metres; labels up to it, as 0, are pixels without a distance. As DINOv2's evaluations.
SILOG_VARIANCE = 0.5  # lambda of the scale-invariant loss, as in Depth Anything V2's metric_depth/util/loss.py
DEPTH_METRICS = ("delta1", "delta2", "delta3", "abs_rel", "sq_rel", "rmse", "rmse_log", "log10")
DELTA_RATIO = 1.25  # of the deltas


@tasks.register
@dataclass(frozen=True, kw_only=True)
class Segmentation(Task):
    """Classify every pixel: logits (batch, height, width, classes). Pixels labelled 255 do not count.

    Metrics are those of mmsegmentation: intersections and unions are summed over the whole data set, and the mean is
    over the classes that occur in labels or predictions.

    Args:
        num_classes: number of classes, at most 255.
        labels: name of a list in zoo/labels, or the names of the classes.
        image_size: (height, width) of exported class maps; None for that of the logits.
    """

    num_classes: int = 0
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
        """Accept maps of classes as uint8, or wider if a number needs it; None for labels of another task."""
        if labels.ndim != 3 or labels.dtype.kind not in "iub":
            return None
        is_byte = labels.size and labels.min() >= 0 and labels.max() <= IGNORED
        return labels.astype(np.uint8) if is_byte else labels

    @staticmethod
    def count_classes(labels: np.ndarray) -> int:
        """Count the classes of maps: the highest number that is not 255, plus one."""
        return int(labels.max(initial=0, where=labels != IGNORED)) + 1

    def check_labels(self, split: str, labels: np.ndarray) -> None:
        """See `keras_vit.model.task.Task`."""
        if self.num_classes > IGNORED:
            raise ValueError(TOO_MANY_CLASSES.format(self.num_classes))
        wrong = np.unique(labels[(labels < 0) | ((labels >= self.num_classes) & (labels != IGNORED))])
        if wrong.size:
            raise ValueError(
                f"{split} must have the numbers 0 to {self.num_classes - 1} of classes, and {IGNORED} for pixels that "
                f"do not count. Received: {', '.join(map(str, wrong[:5]))}. For other values say which class each one "
                "is: mask_values"
            )

    def renumbered(self, label: Any, numbers: Sequence[int]) -> Any:
        """See `keras_vit.model.task.Task`: uint8 (height, width)."""
        import tensorflow as tf

        table = np.full(IGNORED + 1, IGNORED, np.uint8)
        table[: len(numbers)] = numbers
        return tf.gather(tf.constant(table), tf.cast(label, tf.int32))

    def check_output(self, shape: Any) -> None:
        """See `keras_vit.model.task.Task`: it must be a row of logits for each pixel."""
        if self.num_classes > IGNORED:  # the labels' uint8 could not hold them
            raise ValueError(TOO_MANY_CLASSES.format(self.num_classes))
        if not isinstance(shape, tuple) or len(shape) != 4 or shape[-1] != self.num_classes:
            raise ValueError(
                f"Expected a model that returns logits (batch, height, width, {self.num_classes}). Received: {shape}"
            )

    def targets(self, labels: Any) -> Any:
        """Convert maps of classes to int32."""
        import tensorflow as tf

        labels = tf.cast(labels, tf.int32)
        is_known = (labels < self.num_classes) | (labels == IGNORED)
        tf.debugging.assert_equal(
            is_known, True, f"A mask has a number that is neither below {self.num_classes} nor 255"
        )
        return labels

    def losses(
        self, output: Any, targets: Any, *, kind: str, label_smoothing: float = 0.0, class_weights: Any = None
    ) -> tuple[Any, Tensors]:
        """Mean cross-entropy of each image over its labelled pixels, 0 without any, and its accuracy.

        `class_weights`, float32 (classes,), multiply the cross-entropies of the pixels.
        """
        import tensorflow as tf

        from keras_vit.model.maps import resize_maps

        logits = resize_maps(output, targets.shape[1:])
        counted = tf.cast(targets != IGNORED, tf.float32)
        pixels = tf.maximum(tf.reduce_sum(counted, (1, 2)), 1)
        shares = tf.one_hot(targets, self.num_classes) * (1 - label_smoothing) + label_smoothing / self.num_classes
        losses = tf.nn.softmax_cross_entropy_with_logits(shares, logits) * counted
        if class_weights is not None:
            losses *= tf.reduce_sum(tf.one_hot(targets, self.num_classes) * class_weights, axis=-1)
        right = tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int32) == targets, tf.float32) * counted
        return tf.reduce_sum(losses, (1, 2)) / pixels, {"pixel_accuracy": tf.reduce_sum(right, (1, 2)) / pixels}

    def sums(self, output: Any, targets: Any, weights: Any) -> Any:
        """See `Task`; targets are int32 (batch, height, width), 255 where a pixel does not count."""
        import tensorflow as tf

        from keras_vit.model.maps import resize_maps

        def image_sums(image: Any) -> Any:
            logits, target, weight = image
            logits = resize_maps(tf.cast(logits, tf.float32)[None], targets.shape[1:])[0]
            is_counted = (target != IGNORED) & (weight > 0)
            logits, labels = logits[is_counted], target[is_counted]
            predicted = tf.argmax(logits, axis=-1, output_type=tf.int32)
            areas = [
                tf.math.bincount(numbers, minlength=self.num_classes, maxlength=self.num_classes, dtype=tf.float64)
                for numbers in (labels[predicted == labels], predicted, labels)
            ]
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            has_labels = tf.cast(tf.size(labels) > 0, tf.float64)
            counts = [has_labels, tf.cast(weight, tf.float64) - has_labels]
            return tf.concat([[tf.reduce_sum(tf.cast(losses, tf.float64)), *counts], *areas], axis=0)

        # One image at a time: the enlarged logits of a batch may not fit into the memory.
        images = tf.map_fn(image_sums, (output, targets, weights), fn_output_signature=tf.float64)
        return tf.reduce_sum(images, axis=0)

    def means(self, totals: dict[str, float]) -> dict[str, float]:
        """Mean IoU, pixel accuracy and the mean of the classes' accuracies, 0 to 1; cross-entropy in nats."""
        common, _, labelled = self._areas(totals)
        columns = self._columns(totals)
        return {
            "mean_iou": float(np.nanmean(columns["iou"])),
            "pixel_accuracy": float(common.sum() / labelled.sum()),
            "mean_accuracy": float(np.nanmean(columns["accuracy"])),
            "loss": totals["loss"] / float(labelled.sum()),
        }

    def by_class(self, totals: dict[str, float]) -> Mapping[str, Mapping[str, float]]:
        """IoU, accuracy (NaN where the class does not occur) and share of the pixels, for each class.

        Names that several classes have get the numbers of the classes.
        """
        columns = self._columns(totals)
        names = distinct(self.class_names() or [*map(str, range(self.num_classes))])
        return {
            name: {column: float(values[number]) for column, values in columns.items()}
            for number, name in enumerate(names)
        }

    def _columns(self, totals: Mapping[str, float]) -> dict[str, np.ndarray]:
        """Measures of each class, (classes,)."""
        common, predicted, labelled = self._areas(totals)
        with np.errstate(invalid="ignore"):
            return {
                "iou": common / (predicted + labelled - common),
                "accuracy": common / labelled,
                "share": labelled / labelled.sum(),
            }

    def _areas(self, totals: Mapping[str, float]) -> np.ndarray:
        """Pixels of each class, (3, classes): common to label and prediction, predicted, labelled."""
        return np.array([totals[name] for name in self.sum_names[3:]]).reshape(3, -1)

    def served_outputs(self, computed: Tensors, names: Sequence[str] | None, top: int) -> Tensors:
        """Serve "classes", uint8 (batch, height, width) at `image_size`."""
        import tensorflow as tf

        from keras_vit.model.maps import resize_maps

        logits = computed["logits"]
        logits = resize_maps(logits, self.image_size or logits.shape[1:3])
        return {"classes": tf.cast(tf.argmax(logits, axis=-1), tf.uint8)}

    def exported_output(self, name: str, output: np.ndarray) -> np.ndarray:
        """Class of every pixel for "classes", else the output."""
        return np.asarray(self.served_outputs({"logits": output}, None, 1)[name]) if name == "classes" else output

    def agreement(self, name: str, expected: np.ndarray, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the pixels of the same class, and those of the same class or a near tie."""
        if name == "classes":
            return (expected == received).ravel(), (expected == received).ravel()
        return self._pixel_task.agreement(name, expected, received)

    def comparison(self, name: str, expected: np.ndarray, received: np.ndarray) -> dict[str, Any]:
        """Mean IoU with the model's maps; class numbers have no cosines."""
        want, got = (maps if name == "classes" else maps.argmax(axis=-1) for maps in (expected, received))
        counts = [
            np.bincount(classes.astype(np.int64).ravel(), minlength=self.num_classes)
            for classes in (want[want == got], want, got)
        ]
        common, union = counts[0], counts[1] + counts[2] - counts[0]
        fields: dict[str, Any] = {"mean_iou": float((common[union > 0] / union[union > 0]).mean())}
        if name == "classes":
            fields |= dict.fromkeys(LOGITS_FIELDS)
        return fields

    def decode(self, output: Any, top: int) -> list[list[tasks.Prediction]]:
        """List the `top` largest classes of each image with their shares of its pixels, the largest first."""
        return self.shares(self.exported_output("classes", np.asarray(output)), top)

    def shares(self, classes: np.ndarray, top: int) -> list[list[tasks.Prediction]]:
        """Decode numbers of classes (batch, height, width)."""
        shares = np.stack(
            [np.bincount(numbers.ravel(), minlength=self.num_classes) / numbers.size for numbers in classes]
        )
        with np.errstate(divide="ignore"):
            return self._pixel_task.decode(np.log(shares), top)

    def class_names(self, labels: Labels | Iterable[str] = None) -> list[str] | None:
        """See `keras_vit.model.task.Task`; the names are in the order of the logits."""
        return self._pixel_task.class_names(labels)

    @property
    def _pixel_task(self) -> Classification:
        return Classification(num_classes=self.num_classes, labels=self.labels)


@tasks.register
@dataclass(frozen=True, kw_only=True)
class Depth(Task):
    """Estimate the distance of every pixel: (batch, height, width), float32.

    With a `max_depth` distances are in metres. Without, the output is relative: an inverse distance of unknown scale
    and shift, which an evaluation first fits to each image's labels by least squares.

    Metrics are means over images, over their pixels with a label above 0.001 m and below `max_depth`: abs_rel, sq_rel,
    rmse, rmse_log, log10, and delta1 to delta3, the shares of pixels with a ratio below 1.25, 1.25^2 and 1.25^3
    (Eigen et al., arXiv 1406.2283).

    Args:
        max_depth: largest distance in metres, above 0; None for relative depth.
        num_classes: 0.
        labels: None.
    """

    max_depth: float | None = None
    num_classes: int = 0
    labels: tuple[str, ...] | None = None

    NAME: ClassVar[str] = "the distance of every pixel"
    LABELS = "maps of distances in metres: floats (n, height, width)"
    OBJECTIVES: ClassVar[tuple[str, ...]] = ("silog",)
    outputs = ("depth",)
    metrics = ("delta1", "abs_rel")
    sum_names = (*DEPTH_METRICS, "loss", "count", "unlabelled")

    @staticmethod
    def read_labels(labels: np.ndarray) -> np.ndarray | None:
        """Accept maps of distances as float32; None for labels of another task."""
        return labels.astype(np.float32) if labels.ndim == 3 and labels.dtype.kind == "f" else None

    @staticmethod
    def count_classes(labels: np.ndarray) -> int:
        """Distances have no classes: 0."""
        return 0

    def check_labels(self, split: str, labels: np.ndarray) -> None:
        """See `keras_vit.model.task.Task`; 0 and NaN are pixels without a distance."""
        if (labels < 0).any() or np.isinf(labels).any():
            raise ValueError(
                f"{split} must be metres, 0 or NaN where the distance is not known. Received: negative or infinite ones"
            )

    def check_output(self, shape: Any) -> None:
        """See `keras_vit.model.task.Task`: it must be a number for each pixel."""
        if not isinstance(shape, tuple) or len(shape) != 3:
            raise ValueError(f"Expected a model that returns depth (batch, height, width). Received: {shape}")

    def targets(self, labels: Any) -> Any:
        """Convert maps of distances to float32, 0 where the distance is not known."""
        import tensorflow as tf

        labels = tf.cast(labels, tf.float32)
        return tf.where(tf.math.is_finite(labels), labels, 0.0)

    def losses(
        self, output: Any, targets: Any, *, kind: str, label_smoothing: float = 0.0, class_weights: Any = None
    ) -> tuple[Any, Tensors]:
        """Scale-invariant logarithmic loss of each image (arXiv 1406.2283), 0 without any distances."""
        found = self._image_metrics(output, targets)
        return found["loss"], {name: found[name] for name in self.metrics}

    def sums(self, output: Any, targets: Any, weights: Any) -> Any:
        """See `Task`; targets are metres, float32 (batch, height, width), 0 where the distance is not known."""
        import tensorflow as tf

        weights = tf.cast(weights, tf.float64)
        found = self._image_metrics(tf.cast(output, tf.float64), tf.cast(targets, tf.float64))
        counted = weights * found["count"]
        sums = [found[name] * counted for name in self.sum_names[:-2]]
        return tf.reduce_sum(tf.stack([*sums, counted, weights - counted]), axis=1)

    def _image_metrics(self, output: Any, targets: Any) -> Tensors:
        """Metrics and loss of each image, (batch,); "count" is 1 for images with distances."""
        import tensorflow as tf

        from keras_vit.model.maps import resize_maps

        is_counted = (targets > MIN_DEPTH) & (targets < (self.max_depth or np.inf))
        counted = tf.cast(is_counted, output.dtype)
        pixels = tf.reduce_sum(counted, (1, 2))
        label = tf.where(is_counted, targets, 1)
        depth = resize_maps(output[..., None], targets.shape[1:])[..., 0]
        if self.max_depth is None:
            depth = _align(depth, label, counted)
        depth = tf.where(is_counted, tf.maximum(depth, MIN_DEPTH), 1)

        def mean(values: Any) -> Any:
            return tf.math.divide_no_nan(tf.reduce_sum(values * counted, (1, 2)), pixels)

        error, log_error = depth - label, tf.math.log(depth) - tf.math.log(label)
        ratio = tf.exp(tf.abs(log_error))
        squared, tiny = mean(log_error**2), 1e-12  # the gradient of a square root at 0 is infinite
        return {
            **{f"delta{k}": mean(tf.cast(ratio < DELTA_RATIO**k, counted.dtype)) for k in (1, 2, 3)},
            "abs_rel": mean(tf.abs(error) / label),
            "sq_rel": mean(error**2 / label),
            "rmse": tf.sqrt(mean(error**2)),
            "rmse_log": tf.sqrt(squared),
            "log10": mean(tf.abs(log_error)) / np.log(10),
            "loss": tf.sqrt(tf.maximum(squared - SILOG_VARIANCE * mean(log_error) ** 2, 0) + tiny),
            "count": tf.cast(pixels > 0, counted.dtype),
        }

    def means(self, totals: dict[str, float]) -> dict[str, float]:
        """Mean of every metric over the images with distances: the deltas 0 to 1, rmse in metres."""
        return {name: totals[name] / totals["count"] for name in self.sum_names[:-2]}

    def served_outputs(self, computed: Tensors, names: Sequence[str] | None, top: int) -> Tensors:
        """Serve "depth"."""
        return {"depth": computed["depth"]}

    def agreement(self, name: str, expected: np.ndarray, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the pixels within a ratio of 1.25 of the model's depth; near ties do not exist."""
        want, got = (np.maximum(values, MIN_DEPTH) for values in (expected, received))
        is_near = np.maximum(want / got, got / want).ravel() < DELTA_RATIO
        return is_near, is_near

    def comparison(self, name: str, expected: np.ndarray, received: np.ndarray) -> dict[str, Any]:
        """Mean relative error."""
        want = np.maximum(expected, MIN_DEPTH)
        return {"relative_error": float((np.abs(received - expected) / want).mean())}

    def class_names(self, labels: Labels | Iterable[str] = None) -> list[str] | None:
        """Distances have no classes: None."""
        if labels is not None:
            raise ValueError("labels are names of classes. Received: a model of depth")
        return None

    def decode(self, output: Any, top: int) -> list[dict[str, float]]:
        """Least, median and largest distance of each image."""
        distances = np.quantile(np.asarray(output, np.float64), (0, 0.5, 1), axis=(1, 2)).T
        return [dict(zip(("least", "median", "largest"), row, strict=True)) for row in distances.tolist()]


def _align(inverse: Any, label: Any, counted: Any) -> Any:
    """Scale and shift relative inverse distances to fit the labels; all (batch, height, width)."""
    import tensorflow as tf

    weights = counted / tf.maximum(tf.reduce_sum(counted, (1, 2), keepdims=True), 1)

    def mean(values: Any) -> Any:
        return tf.reduce_sum(values * weights, (1, 2), keepdims=True)

    x, y = inverse, 1 / label
    variance = mean(x**2) - mean(x) ** 2
    scale = tf.math.divide_no_nan(mean(x * y) - mean(x) * mean(y), variance)
    farthest = tf.reduce_max(label * counted, (1, 2), keepdims=True)
    return 1 / tf.maximum(scale * (x - mean(x)) + mean(y), tf.math.divide_no_nan(1.0, farthest))
