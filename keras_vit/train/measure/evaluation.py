"""How good a classifier is: top-1, top-5, cross-entropy and speed on a data set, with one label an image or several."""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tqdm import tqdm

from keras_vit._util import html
from keras_vit._util.checks import pair
from keras_vit.model.config import Preprocessing
from keras_vit.train.data import pipeline, sources

LABELS = ("single", "real")
SUMS = ("top1", "top5", "loss", "count", "unlabelled")
_STEPS: weakref.WeakKeyDictionary[keras.Model, Callable[..., tf.Tensor]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured, over the images that count.

    Attributes:
        data: the data set.
        labels: "single" or "real".
        top1: share of the images whose best class is right, 0..1. With ReaL labels: is one of the image's.
        top5: share of those that have a right class among the five best.
        loss: mean cross-entropy, in nats; an image with several labels wants an equal share of each.
        count: images counted.
        unlabelled: images left out because they have no label (ReaL).
        skipped: images left out because they cannot be read.
        images_per_second: by the wall clock, reading and preparing included, without the first batch, in which
            TensorFlow compiles (where there is no second, with it).
    """

    data: str
    labels: str
    top1: float
    top5: float
    loss: float
    count: int
    unlabelled: int
    skipped: int
    images_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        values = {
            "top-1": f"{self.top1:.2%}",
            "top-5": f"{self.top5:.2%}",
            "cross-entropy": f"{self.loss:.4f}",
            "labels": self.labels,
            "images": f"{self.count:,}",
            "without a label": self.unlabelled or None,
            "unreadable": self.skipped or None,
            "images/s": f"{self.images_per_second:,.0f}",
        }
        return html.facts(self.data, values)

    def __str__(self) -> str:
        left_out = [f"{self.unlabelled:,} without a label"] * bool(self.unlabelled)
        left_out += [f"{self.skipped:,} that cannot be read"] * bool(self.skipped)
        return (
            f"{self.data}: top-1 {self.top1:.2%} ({round(self.top1 * self.count):,} of {self.count:,}), "
            f"top-5 {self.top5:.2%}, cross-entropy {self.loss:.4f}"
            + (", ReaL labels" if self.labels == "real" else "")
            + (f"; left out: {', '.join(left_out)}" if left_out else "")
            + f"; {self.images_per_second:,.0f} images/s"
        )


class Images(NamedTuple):
    """What a model takes: the arguments of `pipeline.evaluation_batches` that it decides."""

    image_size: tuple[int, int]
    num_channels: int
    preprocessing: Preprocessing

    @classmethod
    def of(cls, model: keras.Model, preprocessing: Preprocessing | None = None) -> Images:
        """Reads them off a model: a VisionTransformer's config, or the shape of another's input.

        Args:
            model: built, with images (height, width, channels) as its one input.
            preprocessing: None is the model's own; for another model than a VisionTransformer, -1..1.

        Raises:
            TypeError: where it is no Keras model.
            ValueError: where it does not say which images it takes.
        """
        if not isinstance(model, keras.Model):
            raise TypeError(f"A Keras model is wanted, such as keras_vit.zoo.load gives. Received: {model!r}")
        shape = getattr(model, "input_shape", None)
        if not isinstance(shape, tuple) or len(shape) != 4 or None in shape[1:]:
            raise ValueError(
                f"The model's input is to be (batch, height, width, channels), all known. Received: {shape}"
            )
        config = getattr(model, "config", None)
        own = getattr(config, "preprocessing", None) or Preprocessing()
        return cls(pair(shape[1:3], "image_size"), shape[3], preprocessing or own)


def evaluate(
    model: keras.Model,
    data: str | os.PathLike[str] | Mapping[str, Any] | sources.Data = "digits",
    *,
    split: str | None = None,
    batch_size: int = 64,
    labels: str = "single",
    preprocessing: Preprocessing | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    on_bad_image: str = "skip",
    progress: bool = False,
) -> Evaluation:
    """Measures a classifier on the held-out part of a data set, every image once.

    Args:
        model: gives logits (batch, classes) for prepared images; a VisionTransformer, or any Keras model.
        data: as for `sources.open_data`: "digits", a folder, a prepared tfds builder, arrays; or what it gave, whose
            held-out part is taken (and split, data_dir and on_bad_image are not looked at).
        split: which part, such as "validation" or "test[:10%]"; None is the held-out one.
        batch_size: images a call. The last batch is filled up, and what fills it up counts nothing.
        labels: "single"; or "real" for data with several labels an image, as ImageNet-ReaL (arXiv 2006.07159): the
            best class is right where it is any of them, and images without a label are left out.
        preprocessing: None is the model's own.
        data_dir: where tfds has its data sets.
        on_bad_image: "skip" leaves out what cannot be read, and counts it; "fail" stops there.
        progress: whether to draw a progress bar.

    Raises:
        TypeError: where `model` is no Keras model.
        ValueError: where model and data have other classes, the labels are of the other kind, there is no such part,
            or no image that counts.
    """
    images = Images.of(model, preprocessing)
    _check(labels, batch_size)
    opened = data
    if not isinstance(opened, sources.Data):
        opened = sources.open_data(data, data_dir=data_dir, eval_split=split, on_bad_image=on_bad_image)
    if opened.evaluation is None:
        raise ValueError(f"{opened.name} has no held-out part: name the part to evaluate on with split")
    _check_classes(model, opened)
    if (labels == "real") != opened.multi_label:
        has = "several labels an image: pass labels='real'" if opened.multi_label else "one label an image, not ReaL's"
        raise ValueError(f"{opened.name} has {has}. Received: labels={labels!r}")
    batches = pipeline.evaluation_batches(
        opened.evaluation, batch_size=batch_size, num_classes=opened.num_classes, **images._asdict()
    )
    totals, speed = _run(model, batches, progress=progress)
    return summary(totals, data=opened.name, labels=labels, skipped=len(opened.evaluation.bad), speed=speed)


def sums(logits: Any, labels: Any, weights: Any) -> tf.Tensor:
    """What one batch adds to an evaluation. TensorFlow operations only, so it goes inside any step.

    Equal logits rank by their class number, so that a head of zeros knows one class, not all; logits that are not
    numbers are right nowhere.

    Args:
        logits: (batch, classes).
        labels: float32 (batch, classes), 1 at each of an image's classes; a row of zeros has no label.
        weights: (batch,), 1 for an image, 0 for what fills the batch up.

    Returns:
        float64 (5,), named by `SUMS`; sums over replicas and batches are sums of these.
    """
    logits, labels = tf.cast(logits, tf.float32), tf.cast(labels, tf.float32)
    given = tf.reduce_sum(labels, axis=1)
    counted = tf.cast(weights, tf.float32) * tf.cast(given > 0, tf.float32)
    ranking = tf.math.top_k(logits, k=min(5, logits.shape[1])).indices
    right = tf.gather(labels, ranking, batch_dims=1) > 0
    right &= ~tf.reduce_any(tf.math.is_nan(logits), axis=1, keepdims=True)
    target = tf.math.divide_no_nan(labels, given[:, None])
    loss = tf.nn.softmax_cross_entropy_with_logits(target, logits)
    rows = {
        "top1": counted * tf.cast(right[:, 0], tf.float32),
        "top5": counted * tf.cast(tf.reduce_any(right, axis=1), tf.float32),
        "loss": tf.where(counted > 0, loss * counted, 0),  # what fills the batch up may be infinite; 0 * inf is not 0
        "count": counted,
        "unlabelled": tf.cast(weights, tf.float32) - counted,
    }
    return tf.stack([tf.reduce_sum(tf.cast(rows[name], tf.float64)) for name in SUMS])


def summary(totals: Any, *, data: str, labels: str = "single", skipped: int = 0, speed: float = 0.0) -> Evaluation:
    """Turns the sum of `sums` into means.

    Raises:
        ValueError: where nothing was counted.
    """
    total = dict(zip(SUMS, map(float, totals), strict=True))
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


def _run(model: keras.Model, batches: Any, *, progress: bool) -> tuple[Any, float]:
    """The sum over all batches, and images a second."""
    step = _step_of(model)
    seen = SUMS.index("count"), SUMS.index("unlabelled")
    totals = tf.zeros(len(SUMS), tf.float64)
    first, start = totals.numpy(), time.perf_counter()
    begun = start
    for number, batch in enumerate(tqdm(batches, disable=not progress, unit="batch", desc="evaluate")):
        totals += step(batch)
        if number == 0:
            first, begun = totals.numpy(), time.perf_counter()
    ended = totals.numpy()  # waits for the device
    now = time.perf_counter()
    rest = sum(float(ended[i] - first[i]) for i in seen)
    images, seconds = (rest, now - begun) if rest else (sum(float(ended[i]) for i in seen), now - start)
    return ended, images / seconds


def _step_of(model: keras.Model) -> Callable[[dict[str, tf.Tensor]], tf.Tensor]:
    """One compiled function a model, so that evaluating between epochs compiles once."""
    if model not in _STEPS:
        known = weakref.ref(model)  # the cache does not keep its models alive

        @tf.function
        def step(batch: dict[str, tf.Tensor]) -> tf.Tensor:
            called = known()
            assert called is not None  # whoever evaluates has it
            return sums(called(batch["image"], training=False), batch["label"], batch["weight"])

        _STEPS[model] = step
    return _STEPS[model]


def _check(labels: str, batch_size: int) -> None:
    if labels not in LABELS:
        raise ValueError(f"labels is one of {list(LABELS)}. Received: {labels!r}")
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or batch_size < 1:
        raise ValueError(f"batch_size is a whole number from 1. Received: {batch_size!r}")


def _check_classes(model: keras.Model, data: Any) -> None:
    shape = model.output_shape
    if (
        not isinstance(shape, tuple)
        or len(shape) != 2
        or getattr(model, "config", None)
        and not model.config.num_classes
    ):
        raise ValueError(
            f"The model is to give logits (batch, classes). Received: a model without such a head, {shape}"
        )
    if shape[1] != data.num_classes:
        raise ValueError(
            f"The model tells {shape[1]} classes apart and {data.name} has {data.num_classes}: evaluate weights that "
            f"were trained for its classes, or load the model with num_classes={data.num_classes} and train the head"
        )
