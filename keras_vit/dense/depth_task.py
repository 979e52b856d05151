"""The task of models that estimate the distance of every pixel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from keras_vit.dense.maps import MapTask, enlarge
from keras_vit.model import task as tasks
from keras_vit.model.classification import Labels, Tensors

MIN_DEPTH = 1e-3  # metres; labels up to it, as 0, are pixels without a distance. As DINOv2's evaluations.
SILOG_VARIANCE = 0.5  # lambda of the scale-invariant loss, as in Depth Anything V2's metric_depth/util/loss.py
DEPTH_METRICS = ("delta1", "delta2", "delta3", "abs_rel", "sq_rel", "rmse", "rmse_log", "log10")
RATIO = 1.25  # of the deltas


@tasks.register
@dataclass(frozen=True, kw_only=True)
class Depth(MapTask):
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
        """Return maps of distances as float32; None for labels of another task."""
        return labels.astype(np.float32) if labels.ndim == 3 and labels.dtype.kind == "f" else None

    @staticmethod
    def count_classes(labels: np.ndarray) -> int:
        """Return 0: distances have no classes."""
        return 0

    def check_labels(self, split: str, labels: np.ndarray) -> None:
        """See `keras_vit.model.task.Task`; 0 and NaN are pixels without a distance."""
        if (labels < 0).any() or np.isinf(labels).any():
            raise ValueError(
                f"{split} must be metres, 0 or NaN where the distance is not known. Received: negative or infinite ones"
            )

    def renumbered(self, label: Any, numbers: Sequence[int]) -> Any:
        """See `keras_vit.model.task.Task`."""
        return label

    def check_output(self, shape: Any) -> None:
        """See `keras_vit.model.task.Task`: it must be a number for each pixel."""
        if not isinstance(shape, tuple) or len(shape) != 3:
            raise ValueError(f"Expected a model that returns depth (batch, height, width). Received: {shape}")

    def targets(self, labels: Any) -> Any:
        """Return maps of distances as float32, 0 where the distance is not known."""
        import tensorflow as tf

        labels = tf.cast(labels, tf.float32)
        return tf.where(tf.math.is_finite(labels), labels, 0.0)

    def losses(self, output: Any, targets: Any, *, kind: str, label_smoothing: float = 0.0) -> tuple[Any, Tensors]:
        """Return the scale-invariant logarithmic loss of each image (arXiv 1406.2283), and its "delta1" and "abs_rel".

        An image without distances has 0. `kind` can only be "silog"; there is no label smoothing.
        """
        found = self._measure(output, targets)
        return found["loss"], {name: found[name] for name in self.metrics}

    def sums(self, output: Any, targets: Any, weights: Any) -> Any:
        """Return what a batch adds to an evaluation, float64, named by `sum_names`.

        Args:
            output: depth (batch, rows, columns).
            targets: metres, float32 (batch, height, width); 0 where the distance is not known.
            weights: (batch,), 1 for an image, 0 for padding.
        """
        import tensorflow as tf

        weights = tf.cast(weights, tf.float64)
        found = self._measure(tf.cast(output, tf.float64), tf.cast(targets, tf.float64))
        counted = weights * found["count"]
        sums = [found[name] * counted for name in self.sum_names[:-2]]
        return tf.reduce_sum(tf.stack([*sums, counted, weights - counted]), axis=1)

    def _measure(self, output: Any, targets: Any) -> Tensors:
        """Return the metrics of each image, its loss, and as "count" whether it has distances; each (batch,)."""
        import tensorflow as tf

        is_counted = (targets > MIN_DEPTH) & (targets < (self.max_depth or np.inf))
        counted = tf.cast(is_counted, output.dtype)
        pixels = tf.reduce_sum(counted, (1, 2))
        label = tf.where(is_counted, targets, 1)
        depth = enlarge(output[..., None], targets.shape[1:])[..., 0]
        if self.max_depth is None:
            depth = _align(depth, label, counted)
        depth = tf.where(is_counted, tf.maximum(depth, MIN_DEPTH), 1)

        def mean(values: Any) -> Any:
            return tf.math.divide_no_nan(tf.reduce_sum(values * counted, (1, 2)), pixels)

        error, log_error = depth - label, tf.math.log(depth) - tf.math.log(label)
        ratio = tf.exp(tf.abs(log_error))
        squared, tiny = mean(log_error**2), 1e-12  # the gradient of a square root at 0 is infinite
        return {
            **{f"delta{k}": mean(tf.cast(ratio < RATIO**k, counted.dtype)) for k in (1, 2, 3)},
            "abs_rel": mean(tf.abs(error) / label),
            "sq_rel": mean(error**2 / label),
            "rmse": tf.sqrt(mean(error**2)),
            "rmse_log": tf.sqrt(squared),
            "log10": mean(tf.abs(log_error)) / np.log(10),
            "loss": tf.sqrt(tf.maximum(squared - SILOG_VARIANCE * mean(log_error) ** 2, 0) + tiny),
            "count": tf.cast(pixels > 0, counted.dtype),
        }

    def means(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the mean of every metric over the images with distances: the deltas 0 to 1, rmse in metres."""
        return {name: totals[name] / totals["count"] for name in self.sum_names[:-2]}

    def by_class(self, totals: dict[str, float]) -> Mapping[str, Mapping[str, float]]:
        """See `keras_vit.model.task.Task`."""
        return {}

    def served_outputs(self, computed: Tensors, names: Sequence[str] | None, top: int) -> Tensors:
        """Return "depth"."""
        return {"depth": computed["depth"]}

    def exported_output(self, name: str, output: np.ndarray) -> np.ndarray:
        """Return the output."""
        return output

    def agreement(self, name: str, expected: np.ndarray, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which pixels are within a ratio of 1.25 of the model's, twice."""
        want, got = (np.maximum(values, MIN_DEPTH) for values in (expected, received))
        is_near = np.maximum(want / got, got / want).ravel() < RATIO
        return is_near, is_near

    def comparison(self, name: str, expected: np.ndarray, received: np.ndarray) -> dict[str, Any]:
        """Return the field of an export's report that is particular to the task: the mean relative error."""
        want = np.maximum(expected, MIN_DEPTH)
        return {"relative_error": float((np.abs(received - expected) / want).mean())}

    def class_names(self, labels: Labels | Iterable[str] = None) -> list[str] | None:
        """Return None: distances have no classes."""
        if labels is not None:
            raise ValueError("labels are names of classes. Received: a model of depth")
        return None

    def decode(self, output: Any, top: int) -> list[dict[str, float]]:
        """Return the least, the median and the largest distance of each image."""
        shares = np.quantile(np.asarray(output, np.float64), (0, 0.5, 1), axis=(1, 2)).T
        return [dict(zip(("least", "median", "largest"), map(float, each), strict=True)) for each in shares]


def _align(inverse: Any, label: Any, counted: Any) -> Any:
    """Return distances from relative inverse ones, scaled and shifted to fit the labels; all (batch, height, width)."""
    import tensorflow as tf

    weights = counted / tf.maximum(tf.reduce_sum(counted, (1, 2), keepdims=True), 1)
    mean = lambda values: tf.reduce_sum(values * weights, (1, 2), keepdims=True)  # noqa: E731
    x, y = inverse, 1 / label
    variance = mean(x**2) - mean(x) ** 2
    scale = tf.math.divide_no_nan(mean(x * y) - mean(x) * mean(y), variance)
    farthest = tf.reduce_max(label * counted, (1, 2), keepdims=True)
    return 1 / tf.maximum(scale * (x - mean(x)) + mean(y), tf.math.divide_no_nan(1.0, farthest))
