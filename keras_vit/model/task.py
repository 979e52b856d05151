"""Tasks: what a model's output means, and so how it is trained, evaluated, exported, compared and shown to people.

Classification is the task of most models. `of_model(model)` returns the task of a model. No other module knows whether
the output is a class, a map or a feature.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from keras_vit._util.checks import check_counts
from keras_vit._util.text import abbreviated
from keras_vit.model import labels as label_lists
from keras_vit.model.calibration import Calibration

if TYPE_CHECKING:
    from keras_vit.model.config import ViTConfig

Tensors = dict[str, Any]  # by name
Labels = str | Sequence[str] | None  # name of a list in zoo/labels, names of the classes, or None

# Two classes are a near tie if the model's logits of them differ by less than this share of the standard deviation of
# its logits over classes. Only the model's logits say so: a bad file must not excuse itself by its own errors.
NEAR_TIE = 0.1
NOT_TRAINED = "keras_vit neither trains nor evaluates a model that returns {}, as an EoMT does"
# Names of the outputs of all tasks. A file's main output is the first of these that it has.
MAIN_OUTPUTS = ("logits", "probabilities", "features", "depth", "classes", "class_logits", "mask_logits")
Kind = TypeVar("Kind", bound=type[Any])


class Prediction(NamedTuple):
    """A class that was predicted for an image: its label_id, its label and its probability, 0 to 1.

    `ViTConfig.probabilities` says whether it is a softmax over all classes or the sigmoid of this class alone.
    """

    label_id: str
    label: str
    probability: float


class WholeSetMetrics(NamedTuple):
    """Metrics that need all images at once: the first ones, those of each class, and the calibration."""

    metrics: Mapping[str, float] = {}
    by_class: Mapping[str, Mapping[str, float]] = {}
    calibration: Calibration | None = None


class Task(Protocol):
    """Base of tasks: everything that the package needs to know about the output of a model.

    A class of tasks in KINDS also has LABELS, `read_labels` and `count_classes`, as `Classification` has. In training,
    `targets` prepares the labels of a batch, and `losses` compares the output with them. In an evaluation `sums`
    returns what one batch adds; replicas and workers add these, and `means` divides at the end.
    """

    NAME: ClassVar[str]  # what the model returns, in words
    OBJECTIVES: ClassVar[tuple[str, ...]]  # of a recipe, which `losses` takes as `kind`; the first is the usual one

    @property
    def num_classes(self) -> int:
        """Number of classes of the labels; 0 without a head."""

    @property
    def has_classes(self) -> bool:
        """Whether the output says classes, of images or of their parts."""
        return bool(self.num_classes)

    @property
    def labels(self) -> str | tuple[str, ...] | None:
        """Name of a list in zoo/labels, or the names of the classes; None if they have none."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs that an exported file may have; the model itself returns the first."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `losses` returns beside the loss."""

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the numbers that `sums` returns: "count" and "unlabelled" are those of images, others are free."""

    def check_labels(self, split: str, labels: np.ndarray) -> None:
        """Raise a ValueError that names the split if labels, as `read_labels` returns them, are not of the classes."""

    def label_numbers(self, labels: Any) -> np.ndarray:
        """Convert labels of images, numbers or names of the model's classes, to int64 (n,), or raise a ValueError."""
        raise ValueError(f"labels are classes of whole images. Received: a model of {self.NAME}")

    def numbers_by_name(self) -> dict[str, int]:
        """Class numbers by those names that one class alone has; {} without names."""
        return {}

    def renumbered(self, label: Any, numbers: Sequence[int]) -> Any:
        """Give the classes of an example's label new numbers; `num_classes` is that of the new numbers."""
        return label

    def check_output(self, shape: Any) -> None:
        """Raise a ValueError if the output of a model, of this shape, cannot be compared with labels."""

    def targets(self, labels: Any) -> Any:
        """Convert a batch of a data set's labels to the tensor that `losses` and `sums` take."""

    def losses(
        self, output: Any, targets: Any, *, kind: str, label_smoothing: float = 0.0, class_weights: Any = None
    ) -> tuple[Any, Tensors]:
        """Compute the loss of every image and further metrics, each float32 (batch,). `kind` is the recipe's.

        `class_weights`, float32 (classes,), are those of the labels; None for labels without classes.
        """

    def sums(self, output: Any, targets: Any, weights: Any) -> Any:
        """Sum the numbers of a batch for an evaluation, float64, named by `sum_names`; `weights` are 0 for padding."""

    def means(self, totals: dict[str, float]) -> dict[str, float]:
        """Turn the totals into metrics. The first decides which model of a run is the best: higher is better."""

    def by_class(self, totals: dict[str, float]) -> Mapping[str, Mapping[str, float]]:
        """Turn the totals into the metrics of each class by its name; {} if only the whole is measured."""
        return {}

    def kept(self, output: Any, targets: Any) -> list[Any]:
        """Tensors (batch, ...) of a batch that `from_kept` needs of all images at once; [] if sums are enough."""
        return []

    def from_kept(self, kept: Sequence[np.ndarray]) -> WholeSetMetrics:
        """Measure what no sums tell, from what `kept` returned of all images."""
        return WholeSetMetrics()

    def served_outputs(self, computed: Tensors, names: Sequence[str] | None, top: int) -> Tensors:
        """Compute the answer of a server, TensorFlow tensors, from the model's "features" and its output."""

    def exported_output(self, name: str, output: np.ndarray) -> np.ndarray:
        """Compute the expected output of a file, of this name in `outputs`, from the model's `output`."""
        return output

    def agreement(self, name: str, expected: np.ndarray, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find decisions of a file that agree with its model's, and those that agree or are near ties; bool (n,)."""

    def comparison(self, name: str, expected: np.ndarray, received: np.ndarray) -> dict[str, Any]:
        """Compute fields of an export's report that this task adds or measures in another way."""
        return {}

    def joint_comparison(self, expected: Tensors, received: Tensors) -> dict[str, Any]:
        """Compute fields of an export's report from all outputs of the model and of the file."""
        return {}

    def class_names(self, labels: Labels | Iterable[str] = None) -> list[str] | None:
        """Names of the classes in an exported file, for `labels` or the model's own; None if there are none."""

    def decode(self, output: Any, top: int) -> list[Any]:
        """Convert the output of each image to a result that people read."""

    def image_logits(self, logits: np.ndarray) -> np.ndarray:
        """Compute logits of whole images, (batch, classes), from the model's output; raise if it is no class."""
        raise ValueError(f"Expected a model that classifies images. Received: one that returns {self.NAME}")

    def embedding_output(self) -> str:
        """Name the output that embeds an image, "features" or "logits"; raise a ValueError if none does."""
        raise ValueError(f"An embedding is of a whole image: take model.backbone. Received: a model of {self.NAME}")


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Classify images: logits (batch, classes), or (batch, tokens, classes) for a classifier of every token.

    Args:
        num_classes: number of classes; 0 for a model without a head, which returns features.
        labels: name of a list in zoo/labels, or the names of the classes.
        is_pooled: whether there is one row of logits for an image.
        is_projection: whether the head returns an embedding instead of classes.
        read_tokens: without pooling, the tokens whose mean logits are an image's.
        probabilities: "softmax" or "sigmoid", as in ViTConfig.
    """

    num_classes: int = 0
    labels: str | tuple[str, ...] | None = None
    is_pooled: bool = True
    is_projection: bool = False
    read_tokens: slice | None = None
    probabilities: str = "softmax"

    NAME: ClassVar[str] = "a class for every image"
    OBJECTIVES: ClassVar[tuple[str, ...]] = ("softmax", "sigmoid", "masked_patch", "distill", "distill_features")
    LABELS = "integers (n,), or zeros and ones (n, classes)"
    metrics = ("accuracy",)
    sum_names: ClassVar[tuple[str, ...]] = ("top1", "top5", "loss", "count", "unlabelled")

    @property
    def outputs(self) -> tuple[str, ...]:
        """See `Task`."""
        return ("logits", "probabilities") if self.has_classes else ("logits",) if self.num_classes else ("features",)

    @property
    def has_classes(self) -> bool:
        """Whether the output is logits of classes, and neither a feature nor a projection."""
        return self.num_classes > 0 and not self.is_projection

    def check_classes(self, what: str) -> None:
        """Raise a ValueError if the output is not logits of classes, which `what` needs."""
        if not self.has_classes:
            received = f"num_classes={self.num_classes}, projection_head={self.is_projection}"
            raise ValueError(f"{what} needs a head for classes. Received: a model of {received}")

    @staticmethod
    def read_labels(labels: np.ndarray) -> np.ndarray | None:
        """Convert the labels of a split to the dtype of the package's examples; None for those of another task."""
        if labels.ndim == 2 and labels.dtype.kind in "fiub" and np.isin(labels, (0, 1)).all():
            return labels.astype(np.float32)
        if labels.ndim == 1 and (labels.dtype.kind in "iub" or _are_whole(labels)):
            return labels.astype(np.int64)
        return None

    @staticmethod
    def count_classes(labels: np.ndarray) -> int:
        """Count the classes of labels, as `read_labels` returns them."""
        return labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1

    def check_labels(self, split: str, labels: np.ndarray) -> None:
        """See `Task`."""
        if labels.ndim == 2:
            if labels.shape[1] != self.num_classes:
                raise ValueError(
                    f"Expected {split} labels of {self.num_classes} classes. Received: shape {labels.shape}"
                )
            return
        outside = np.flatnonzero((labels < 0) | (labels >= self.num_classes))
        if len(outside):
            raise ValueError(
                f"{split} label {labels[outside[0]]} of example {outside[0]} is outside 0..{self.num_classes - 1}"
                f" ({len(outside):,} such labels). Classes are numbered from 0; a data set whose labels do not cover "
                "all classes states num_classes."
            )

    def label_numbers(self, labels: Any) -> np.ndarray:
        """See `Task`."""
        values = np.asarray(labels)
        values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
        if values.dtype.kind in "UO" and values.ndim == 1:
            known = self.numbers_by_name()
            if unknown := [name for name in values if name not in known]:
                names = abbreviated(list(known)) or "it has none"
                raise ValueError(
                    f"labels must be class numbers, or names of the model's classes: {names}. "
                    f"Received: {str(unknown[0])!r:.200}"
                )
            values = np.array([known[name] for name in values], np.int64)
        read = self.read_labels(values) if values.dtype.kind in "iu" else None
        if read is None or read.ndim != 1 or not (self.has_classes and self.is_pooled):
            raise ValueError(
                f"labels must be class numbers, integers (n,), or names of the model's {self.num_classes} classes. "
                f"Received: {values.dtype} {values.shape}"
            )
        self.check_labels("labels:", read)
        return read

    def numbers_by_name(self) -> dict[str, int]:
        """See `Task`."""
        names = self.class_names() or []
        counts = collections.Counter(names)
        return {name: number for number, name in enumerate(names) if counts[name] == 1}

    def renumbered(self, label: Any, numbers: Sequence[int]) -> Any:
        """See `Task`: int64, or float32 (classes,)."""
        import tensorflow as tf

        new = tf.constant(numbers, tf.int64)
        if label.dtype.is_integer:
            return new[label]
        return tf.math.unsorted_segment_sum(label, new, self.num_classes)

    def check_output(self, shape: Any) -> None:
        """See `Task`: it must be one row of logits for each image."""
        if not isinstance(shape, tuple) or len(shape) != 2 or not self.num_classes:
            raise ValueError(
                f"Expected a model that returns logits (batch, classes). Received: one without a head, {shape}"
            )

    def targets(self, labels: Any) -> Any:
        """Convert class numbers to one-hot rows in float32; rows stay rows."""
        import tensorflow as tf

        if labels.dtype.is_integer:
            least = tf.cast(self.num_classes, labels.dtype)
            tf.debugging.assert_less(labels, least, "A label is not below the number of classes")
            tf.debugging.assert_non_negative(labels, "A label is below 0")
            return tf.one_hot(labels, self.num_classes)
        if labels.shape[-1] != self.num_classes:
            raise ValueError(f"Expected labels of {self.num_classes} classes. Received: rows of {labels.shape[-1]}")
        return tf.cast(labels, tf.float32)

    def losses(
        self, output: Any, targets: Any, *, kind: str, label_smoothing: float = 0.0, class_weights: Any = None
    ) -> tuple[Any, Tensors]:
        """Compute "accuracy", and the cross-entropy of logits and float32 targets (batch, classes), which may be mixed.

        "sigmoid" treats each class independently and sums over classes, as big_vision's sigmoid_xent; "softmax" does
        not. `label_smoothing` is the share of a label that is spread over all classes. `class_weights`, float32
        (classes,), multiply the losses of images of these classes, as Keras' `fit(class_weight=)`; of mixed images in
        the shares of their classes.
        """
        import tensorflow as tf

        is_correct = tf.equal(tf.argmax(output, axis=-1), tf.argmax(targets, axis=-1))
        smooth = targets * (1 - label_smoothing) + label_smoothing / targets.shape[-1]
        if kind == "sigmoid":
            losses = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=smooth, logits=output), axis=-1)
        else:
            losses = tf.nn.softmax_cross_entropy_with_logits(labels=smooth, logits=output)
        if class_weights is not None:
            losses *= tf.reduce_sum(targets * class_weights, axis=-1)
        return losses, {"accuracy": tf.cast(is_correct, tf.float32)}

    def sums(self, output: Any, targets: Any, weights: Any) -> Any:
        """See `Task`; a row of zeros in the targets, float32 (batch, classes), has no label.

        Equal logits rank by class index, so that a head of zeros predicts one class. An image without a label counts in
        the loss of sigmoids, to which it says that no class is right, and in nothing else.
        """
        import tensorflow as tf

        logits, targets = tf.cast(output, tf.float32), tf.cast(targets, tf.float32)
        num_labels = tf.reduce_sum(targets, axis=1)
        counted = tf.cast(weights, tf.float32) * tf.cast(num_labels > 0, tf.float32)
        ranking = tf.math.top_k(logits, k=min(5, logits.shape[1])).indices
        right = tf.gather(targets, ranking, batch_dims=1) > 0
        if self.probabilities == "sigmoid":
            loss, measured = sigmoid_losses(logits, targets), tf.cast(weights, tf.float32)
        else:
            shares = tf.math.divide_no_nan(targets, num_labels[:, None])
            # Not by softmax_cross_entropy_with_logits: 0 * -inf, of a class that is never predicted, would be NaN.
            loss = -tf.reduce_sum(tf.where(shares > 0, shares * tf.nn.log_softmax(logits), 0), axis=1)
            measured = counted
        sums = {
            "top1": counted * tf.cast(right[:, 0], tf.float32),
            "top5": counted * tf.cast(tf.reduce_any(right, axis=1), tf.float32),
            "loss": tf.where(measured > 0, loss * measured, 0),  # that of padding may be infinite, and 0 * inf is NaN
            "count": counted,
            "unlabelled": tf.cast(weights, tf.float32) - counted,
        }
        return tf.stack([tf.reduce_sum(tf.cast(sums[name], tf.float64)) for name in self.sum_names])

    def means(self, totals: dict[str, float]) -> dict[str, float]:
        """Top-1 and top-5 accuracy, 0 to 1, and the mean loss in nats: that with which such a head is trained."""
        count = totals["count"]
        images = count + totals["unlabelled"] if self.probabilities == "sigmoid" else count
        return {"top1": totals["top1"] / count, "top5": totals["top5"] / count, "loss": totals["loss"] / images}

    def kept(self, output: Any, targets: Any) -> list[Any]:
        """Largest probability, 1 if its class is right, and 1 if there is a label, float32 (batch,)."""
        import tensorflow as tf

        logits = tf.cast(output, tf.float32)
        right = tf.gather(targets, tf.math.top_k(logits).indices, batch_dims=1)[:, 0]
        probabilities = tf.reduce_max(getattr(tf.nn, self.probabilities)(logits), axis=1)
        return [probabilities, *(tf.cast(values > 0, tf.float32) for values in (right, tf.reduce_sum(targets, axis=1)))]

    def from_kept(self, kept: Sequence[np.ndarray]) -> WholeSetMetrics:
        """See `Task`; images without a label are left out."""
        probabilities, are_right, are_labelled = kept
        used = are_labelled > 0
        return WholeSetMetrics(calibration=Calibration.measure(probabilities[used], are_right[used]))

    def served_outputs(self, computed: Tensors, names: Sequence[str] | None, top: int) -> Tensors:
        """Compute "classes" and "scores", the `top` best of each image, and the "probabilities" of all classes."""
        import tensorflow as tf

        if not self.has_classes:
            return {self.outputs[0]: computed[self.outputs[0]]}
        texts = np.array(names if names is not None else [str(number) for number in range(self.num_classes)], object)
        probabilities = getattr(tf.nn, self.probabilities)(computed["logits"])
        # Of the logits: sigmoids of large ones are all 1.
        numbers = tf.math.top_k(computed["logits"], min(top, self.num_classes)).indices
        scores = tf.gather(probabilities, numbers, batch_dims=1)
        # No output's name may end in _bytes: servers send those as base64.
        return {"classes": tf.gather(tf.constant(texts), numbers), "scores": scores, "probabilities": probabilities}

    def exported_output(self, name: str, output: np.ndarray) -> np.ndarray:
        """Compute the probabilities for "probabilities", else return the output."""
        return PROBABILITIES[self.probabilities](output) if name == "probabilities" else output

    def agreement(self, name: str, expected: np.ndarray, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the images, or tokens, with the same best class, and those that have it or are near ties.

        In a near tie the model itself hardly distinguishes its own class from the file's, see `NEAR_TIE`.
        """
        rows = (values.reshape(-1, values.shape[-1]).astype(np.float64) for values in (expected, received))
        if name == "probabilities":
            rows = (np.log(values.clip(float(np.finfo(np.float32).tiny))) for values in rows)
        want, got = rows
        deviation = (want - want.mean(axis=-1, keepdims=True)).std()
        of_files_class = np.take_along_axis(want, got.argmax(axis=-1)[:, None], axis=-1)[:, 0]
        are_same = want.argmax(axis=-1) == got.argmax(axis=-1)
        return are_same, are_same | (want.max(axis=-1) - of_files_class <= NEAR_TIE * deviation)

    def class_names(self, labels: Labels | Iterable[str] = None) -> list[str] | None:
        """See `Task`; the names are in the order of the logits."""
        if labels is not None:
            self.check_classes("labels=")
        chosen = self.labels if labels is None else labels
        if chosen is None or not self.num_classes:
            return None
        return [label for _, label in label_lists.names(label_lists.check_labels(chosen), self.num_classes)]

    def decode(self, output: Any, top: int) -> list[list[Prediction]]:
        """Name the `top` most probable classes of each image, the best first, from logits (batch, classes)."""
        self.check_classes("naming classes")
        logits = np.asarray(output)
        if logits.ndim != 2 or logits.shape[1] != self.num_classes:
            raise ValueError(f"logits must be (batch, num_classes={self.num_classes}). Received: shape {logits.shape}")
        check_counts(top=top)
        return self.rank(logits, self.exported_output("probabilities", logits), top)

    def rank(self, scores: np.ndarray, probabilities: np.ndarray, top: int) -> list[list[Prediction]]:
        """Name the `top` classes of the largest scores of each image, with their probabilities, (batch, classes)."""
        names = label_lists.names(self.labels, self.num_classes)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
        return [
            [Prediction(*names[int(index)], float(row[index])) for index in order]
            for row, order in zip(probabilities, best, strict=True)
        ]

    def image_logits(self, logits: np.ndarray) -> np.ndarray:
        """Compute logits (batch, classes), also of a classifier of every token."""
        return logits if self.read_tokens is None else logits[:, self.read_tokens].mean(axis=1)

    def embedding_output(self) -> str:
        """Name the output that embeds an image: "features", or "logits" if the head is a projection."""
        if not self.is_pooled:
            raise ValueError("embed needs a pooled feature. Received: a model with features of every token")
        return "logits" if self.is_projection else "features"


@dataclass(frozen=True, kw_only=True)
class SeveralLabels(Classification):
    """Classify images that may have several classes or none: each is a question of its own, answered by a sigmoid.

    Its logits are those of a `Classification`, whose `probabilities` are "sigmoid". The labels tell it apart: rows of
    zeros and ones, all of which count.
    """

    sum_names: ClassVar[tuple[str, ...]] = ("accuracy", "loss", "count", "unlabelled")

    def losses(self, output: Any, targets: Any, **options: Any) -> tuple[Any, Tensors]:
        """Compute the loss of `Classification`; "accuracy" is the share of the classes that are answered rightly."""
        losses, _ = super().losses(output, targets, **options)
        return losses, {"accuracy": _right_answers(output, targets)}

    def sums(self, output: Any, targets: Any, weights: Any) -> Any:
        """See `Task`; every image counts."""
        import tensorflow as tf

        logits, targets, counted = (tf.cast(values, tf.float32) for values in (output, targets, weights))
        sums = {
            "accuracy": counted * _right_answers(logits, targets),
            "loss": tf.where(counted > 0, counted * sigmoid_losses(logits, targets), 0),
            "count": counted,
            "unlabelled": tf.zeros_like(counted),
        }
        return tf.stack([tf.reduce_sum(tf.cast(sums[name], tf.float64)) for name in self.sum_names])

    def means(self, totals: dict[str, float]) -> dict[str, float]:
        """Accuracy, the share of right answers, and the mean over images of the sum of all classes' losses."""
        return {name: totals[name] / totals["count"] for name in ("accuracy", "loss")}

    def kept(self, output: Any, targets: Any) -> list[Any]:
        """All logits and labels, which average precision ranks, float32 (batch, classes)."""
        import tensorflow as tf

        return [tf.cast(output, tf.float32), targets]

    def from_kept(self, kept: Sequence[np.ndarray]) -> WholeSetMetrics:
        """Compute the mean of the classes' average precision, of those that have images; none without any."""
        output, targets = kept
        names = label_lists.distinct(self.class_names() or [str(number) for number in range(self.num_classes)])
        by_class = {
            name: {"average_precision": average_precision(output[:, k], targets[:, k]), "images": float(images)}
            for k, (name, images) in enumerate(zip(names, targets.sum(axis=0), strict=True))
        }
        found = [each["average_precision"] for each in by_class.values() if each["images"]]
        return WholeSetMetrics({"mean_average_precision": float(np.mean(found))} if found else {}, by_class)


def _right_answers(logits: Any, targets: Any) -> Any:
    """Share of the classes of each image, float32 (batch,), whose probability and label are on one side of 0.5."""
    import tensorflow as tf

    return tf.reduce_mean(tf.cast((logits > 0) == (targets > 0.5), tf.float32), axis=1)


def sigmoid_losses(logits: Any, targets: Any) -> Any:
    """Sum the binary cross-entropies of each image's classes, float32 (batch,); 0 for a logit of -inf that is right."""
    import tensorflow as tf

    yes, no = targets * tf.math.softplus(-logits), (1 - targets) * tf.math.softplus(logits)
    return tf.reduce_sum(tf.where(targets > 0, yes, 0) + tf.where(targets < 1, no, 0), axis=1)


def average_precision(scores: np.ndarray, targets: np.ndarray) -> float:
    """Compute the area under the steps of the precision-recall curve; NaN without an image of the class.

    Images (n,) of equal scores are found together, as in scikit-learn's `average_precision_score`.
    """
    order = np.argsort(-scores, kind="stable")
    scores, found = scores[order], np.cumsum(targets[order], dtype=np.float64)
    if not len(found) or not found[-1]:
        return float("nan")
    ends = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    return float(np.sum(np.diff(found[ends], prepend=0.0) * found[ends] / (ends + 1)) / found[-1])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Compute probabilities of logits (..., classes)."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Compute the probability of each logit for itself."""
    return np.exp(-np.logaddexp(0, -logits))


def _are_whole(values: np.ndarray) -> bool:
    """Check for floats that are whole numbers."""
    return values.dtype.kind == "f" and bool(np.all(values == np.floor(values)) and np.isfinite(values).all())


PROBABILITIES = {"softmax": softmax, "sigmoid": sigmoid}

# Tasks whose labels may be given as arrays. Each is called with the number of classes and their labels.
KINDS: list[type[Any]] = [Classification]


def register(kind: Kind) -> Kind:
    """Add a class of tasks to KINDS, as a decorator."""
    KINDS.append(kind)
    return kind


def kind_of_labels(labels: np.ndarray) -> type[Any] | None:
    """Find the class of the task by the labels of a whole split; None if no task has such labels."""
    return next((kind for kind in KINDS if kind.read_labels(labels) is not None), None)


def of_model(model: Any) -> Task:
    """Find the task of a Keras model: its own `task`, or else the classification that its output's shape allows."""
    own: Task | None = getattr(model, "task", None)
    if own is not None:
        return own
    shape = getattr(model, "output_shape", None)
    shape = shape if isinstance(shape, tuple) else ()
    return Classification(num_classes=shape[-1] if len(shape) > 1 and shape[-1] else 0, is_pooled=len(shape) == 2)


def of_labels(task: Task, *, several: bool) -> Task:
    """Choose the task by the labels: `several` for an image, which a head of sigmoids answers one by one, or one."""
    if not several or type(task) is not Classification or task.probabilities != "sigmoid":
        return task
    return SeveralLabels(**{field.name: getattr(task, field.name) for field in dataclasses.fields(task)})


def from_config(config: ViTConfig) -> Classification:
    """Task of the VisionTransformers of a config."""
    return Classification(
        num_classes=config.num_classes,
        labels=config.labels,
        is_pooled=not config.is_unpooled,
        is_projection=config.projection_head,
        read_tokens=config.read_tokens if config.is_unpooled else None,
        probabilities=config.probabilities,
    )
