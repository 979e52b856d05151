"""Measure a classifier on a data set: top-1, top-5, cross-entropy and speed, with one or several labels per image."""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_vit._util import html
from keras_vit._util.checks import check_counts, one_of, pair
from keras_vit._util.progress import track
from keras_vit.model.config import Preprocessing
from keras_vit.train.data import sources
from keras_vit.train.data.classes import match_data
from keras_vit.train.data.image_files import name_bad_image
from keras_vit.train.data.order import Order
from keras_vit.train.measure.replicas import choose_strategy, distribute_batches, replicate, sum_replicas
from keras_vit.train.step import strategies
from keras_vit.train.step.workers import name_lost_worker

LABELS = ("single", "real")
SUM_NAMES = ("top1", "top5", "loss", "count", "unlabelled")
Step = Callable[[dict[str, Any]], Any]  # from a distributed batch to its sums
_STEPS: weakref.WeakKeyDictionary[keras.Model, tuple[tf.distribute.Strategy, Step]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Accuracy, loss and speed of a model on a data set, as `evaluate` returns them.

    Attributes:
        data: name of the data set.
        split: the part that was measured, such as "val" or "test[:10%]"; "all" for a whole folder, "held-out" for the
            tenth of a folder that training holds out.
        classes: number of classes of the data.
        model_classes: number of classes of the model, which may have more.
        labels: "single" or "real".
        top1: share of the images whose best class is right, 0..1. With ReaL labels, any label of the image is right.
        top5: share of the images with a right class among the best five, 0..1.
        loss: mean cross-entropy in nats; the target of an image with several labels is uniform over them.
        count: number of images in the means.
        unlabelled: number of images left out because they have no label (ReaL).
        skipped: number of images left out because they cannot be decoded.
        unread: number of other files and folders in the class folders of a folder, which are not read.
        images_per_second: including reading and preparing; the first batch, in which TensorFlow compiles, counts only
            if there is no other batch.

    Example:
        >>> result = keras_vit.train.Evaluation(
        ...     data="photos/val", split="all", classes=2, model_classes=2, labels="single", top1=0.75, top5=1.0,
        ...     loss=0.5, count=4, unlabelled=0, skipped=0, images_per_second=100.0,
        ... )
        >>> print(result)
        photos/val, all 4 images of 2 classes: top-1 75.00% (3 of 4), top-5 100.00%, cross-entropy 0.5000; 100 images/s
        >>> result.to_dict()["top1"]
        0.75
    """

    data: str
    split: str = ""
    classes: int = 0
    model_classes: int = 0
    labels: str
    top1: float
    top5: float
    loss: float
    count: int
    unlabelled: int
    skipped: int
    unread: int = 0
    images_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as a dictionary that JSON can hold."""
        return dataclasses.asdict(self)

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        values = {
            "top-1": f"{self.top1:.2%}",
            "top-5": f"{self.top5:.2%}",
            "cross-entropy": f"{self.loss:.4f}",
            "labels": self.labels,
            "split": self.split or None,
            "images": f"{self.count:,}",
            "without a label": self.unlabelled or None,
            "unreadable": self.skipped or None,
            "other files": self.unread or None,
            "images/s": f"{self.images_per_second:,.0f}",
        }
        return html.facts(self.data, values)

    def __str__(self) -> str:
        left_out = [f"{self.unlabelled:,} without a label"] * bool(self.unlabelled)
        left_out += [f"{self.skipped:,} that cannot be read"] * bool(self.skipped)
        left_out += [f"{self.unread:,} other files or folders"] * bool(self.unread)
        part = "all" if self.split == "all" else f"{self.split},"
        others = f" of the model's {self.model_classes:,}" if self.classes != self.model_classes else ""
        measured = f", {part} {self.count:,} images of {self.classes:,}{others} classes" if self.split else ""
        return (
            f"{self.data}{measured}: top-1 {self.top1:.2%} ({round(self.top1 * self.count):,} of {self.count:,}), "
            f"top-5 {self.top5:.2%}, cross-entropy {self.loss:.4f}"
            + (", ReaL labels" if self.labels == "real" else "")
            + (f"; left out: {', '.join(left_out)}" if left_out else "")
            + f"; {self.images_per_second:,.0f} images/s"
        )


class ModelInput(NamedTuple):
    """The images that a model takes, as arguments of `pipeline.evaluation_batches`."""

    image_size: tuple[int, int]
    num_channels: int
    preprocessing: Preprocessing

    @classmethod
    def from_model(cls, model: keras.Model, preprocessing: Preprocessing | None = None) -> ModelInput:
        """Read the input of a model; without `preprocessing`, other models than a VisionTransformer take -1..1."""
        if not isinstance(model, keras.Model):
            raise TypeError(f"Expected a Keras model, such as keras_vit.zoo.load returns. Received: {model!r}")
        shape = getattr(model, "input_shape", None)
        if not isinstance(shape, tuple) or len(shape) != 4 or None in shape[1:]:
            raise ValueError(
                "Expected a model with the static input shape (batch, height, width, channels)."
                f" Received: a model with {shape}"
            )
        own = getattr(getattr(model, "config", None), "preprocessing", None) or Preprocessing()
        return cls(pair(shape[1:3], "image_size"), shape[3], preprocessing or own)


def evaluate(
    model: keras.Model,
    data: str | os.PathLike[str] | Mapping[str, Any] | sources.Data,
    *,
    split: str | None = None,
    batch_size: int = 64,
    labels: str = "single",
    strategy: str | tf.distribute.Strategy = "auto",
    preprocessing: Preprocessing | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    on_bad_image: str = "skip",
    progress: bool = False,
) -> Evaluation:
    """Measure a classifier on the held-out split of a data set, or on a folder of class folders, each image once.

    If model and data have names of their classes, labels are matched by these names: the data may have the model's
    classes in another order, or some of them only. All devices give the same counts as one device. With several
    workers, all of them call this, and all get the result.

    Args:
        model: returns logits (batch, classes) for prepared images; a VisionTransformer, or any Keras model.
        data: "digits", a folder of images, a data set prepared by tensorflow-datasets, or uint8 arrays
            {"evaluation": (images, labels)}. For an opened data set, split, data_dir and on_bad_image are ignored.
        split: such as "validation" or "test[:10%]"; of a folder a sub-folder, "all" images, or "held-out": the tenth
            that training holds out where there is no such sub-folder. None takes the held-out split; if a folder has no
            train, val, validation or test, all of it.
        batch_size: images per call on each device. The last batches are padded; the padding does not count.
        labels: "single"; or "real" for data with several labels per image, such as ImageNet-ReaL (arXiv 2006.07159):
            any of them is right, and images without a label are left out.
        strategy: name as for `train.strategy`, or its result. "auto" takes the one that the model was created with, if
            there is one. A model that was created without it is copied to every device.
        preprocessing: None takes the model's own.
        data_dir: folder of tensorflow-datasets' prepared data; None is its default.
        on_bad_image: "skip" leaves out and counts files that cannot be decoded; "fail" raises an error.
        progress: whether to draw a progress bar.

    Returns:
        The measurements.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: the data have classes that the model does not have or another kind of labels, there is no such
            split, or no image to measure on.

    Example:
        >>> from keras_vit import digits
        >>> data, model = digits.load(), keras_vit.zoo.load("digits")
        >>> result = keras_vit.train.evaluate(model, {"evaluation": (data.test_images, data.test_labels)})
        >>> print(result)
        arrays, evaluation, 360 images of 10 classes: top-1 99.17% (357 of 360), top-5 100.00%, cross-entropy 0.0...
    """
    strategies.check_backend()
    model_input = ModelInput.from_model(model, preprocessing)
    one_of("labels", labels, LABELS)
    check_counts(batch_size=batch_size)
    opened = sources.open_data(data, data_dir=data_dir, eval_split=split, on_bad_image=on_bad_image, training=False)
    if opened.evaluation is None:
        raise ValueError(f"{opened.name} has no held-out split: choose the one to evaluate on with split")
    classes = opened.num_classes
    opened = match_data(opened, getattr(getattr(model, "config", None), "labels", None), _num_classes(model))
    held_out = opened.evaluation
    assert held_out
    if (labels == "real") != opened.multi_label:
        kind = "several labels per image: pass labels='real' (--real)" if opened.multi_label else "one label per image"
        raise ValueError(f"{opened.name} has {kind}. Received: labels={labels!r}")
    devices = choose_strategy(model, strategy)
    replicated, together = replicate(model, devices), batch_size * devices.num_replicas_in_sync
    batches = distribute_batches(
        held_out, devices, batch_size=batch_size, num_classes=opened.num_classes, **model_input._asdict()
    )
    show = progress and strategies.is_chief(devices)
    shown = track(batches, "Evaluating", total=ceil(held_out.num_valid / together), show=show)
    named = name_bad_image(lambda: held_out.first_bad(Order(batch=1, shuffle=False), batches=held_out.count))
    with name_lost_worker(devices, lambda: "The evaluation is not finished."), named:
        totals, first_seconds, other_seconds = _add_up(_compiled_step(replicated, devices), shown)
    later = held_out.num_valid - together
    speed = later / other_seconds if later > 0 else held_out.num_valid / first_seconds
    result = summarize(totals, data=opened.name, labels=labels, skipped=len(held_out.bad), speed=speed)
    counts: dict[str, Any] = {"classes": classes, "model_classes": opened.num_classes, "unread": len(held_out.unread)}
    return dataclasses.replace(result, split=opened.eval_split, **counts)


def batch_sums(logits: Any, labels: Any, weights: Any) -> tf.Tensor:
    """Return the sums that one batch adds to an evaluation, float64 (5,), named by `SUM_NAMES`.

    Equal logits rank by class index, so that a head of zeros predicts one class. Logits that are NaN are never right.

    Args:
        logits: (batch, classes).
        labels: float32 (batch, classes), 1 for each class of an image; a row of zeros has no label.
        weights: (batch,), 1 for an image, 0 for padding.
    """
    logits, labels = tf.cast(logits, tf.float32), tf.cast(labels, tf.float32)
    num_labels = tf.reduce_sum(labels, axis=1)
    counted = tf.cast(weights, tf.float32) * tf.cast(num_labels > 0, tf.float32)
    ranking = tf.math.top_k(logits, k=min(5, logits.shape[1])).indices
    right = tf.gather(labels, ranking, batch_dims=1) > 0
    right &= ~tf.reduce_any(tf.math.is_nan(logits), axis=1, keepdims=True)
    target = tf.math.divide_no_nan(labels, num_labels[:, None])
    loss = tf.nn.softmax_cross_entropy_with_logits(target, logits)
    sums = {
        "top1": counted * tf.cast(right[:, 0], tf.float32),
        "top5": counted * tf.cast(tf.reduce_any(right, axis=1), tf.float32),
        "loss": tf.where(counted > 0, loss * counted, 0),  # the loss of padding may be infinite, and 0 * inf is NaN
        "count": counted,
        "unlabelled": tf.cast(weights, tf.float32) - counted,
    }
    return tf.stack([tf.reduce_sum(tf.cast(sums[name], tf.float64)) for name in SUM_NAMES])


def summarize(totals: Any, *, data: str, labels: str = "single", skipped: int = 0, speed: float = 0.0) -> Evaluation:
    """Turn the total of `batch_sums` into means, or raise a ValueError if no image was counted."""
    total = dict(zip(SUM_NAMES, map(float, totals), strict=True))
    if not total["count"]:
        raise ValueError(
            f"{data} has no image to measure on: {total['unlabelled']:.0f} have no label, {skipped} cannot be read"
        )
    return Evaluation(
        data=data,
        labels=labels,
        top1=total["top1"] / total["count"],
        top5=total["top5"] / total["count"],
        loss=total["loss"] / total["count"],
        count=round(total["count"]),
        unlabelled=round(total["unlabelled"]),
        skipped=skipped,
        images_per_second=speed,
    )


def _add_up(step: Step, batches: Iterable[Any]) -> tuple[Any, float, float]:
    """Return the sums over all batches, and the seconds of the first batch, which compiles, and of the others."""
    totals = tf.zeros(len(SUM_NAMES), tf.float64)
    times = [time.perf_counter()]
    for batch in batches:
        totals += step(batch)
        if len(times) == 1:
            totals.numpy()  # waits for the device
            times.append(time.perf_counter())
    sums = totals.numpy()
    return sums, times[1] - times[0], time.perf_counter() - times[1]


def _compiled_step(model: keras.Model, devices: tf.distribute.Strategy) -> Step:
    """Return the model's compiled function, so that evaluating between epochs compiles once."""
    if model not in _STEPS or _STEPS[model][0] is not devices:
        reference = weakref.ref(model)  # the cache does not keep its models alive

        def step(batch: dict[str, tf.Tensor]) -> tf.Tensor:
            network = reference()
            assert network is not None  # `evaluate` holds it
            return batch_sums(network(batch["image"], training=False), batch["label"], batch["weight"])

        _STEPS[model] = devices, sum_replicas(devices, step)
    return _STEPS[model][1]


def _num_classes(model: keras.Model) -> int:
    shape, config = model.output_shape, getattr(model, "config", None)
    if not isinstance(shape, tuple) or len(shape) != 2 or (config and not config.num_classes):
        raise ValueError(
            f"Expected a model that returns logits (batch, classes). Received: one without a head, {shape}"
        )
    return int(shape[1])
