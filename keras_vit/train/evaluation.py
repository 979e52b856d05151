"""Evaluate models on data sets, on one or several devices, with exact sums."""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_vit._util import html
from keras_vit._util.checks import check_counts, json_able, one_of
from keras_vit._util.progress import track
from keras_vit.dense.model import DenseModel
from keras_vit.model import task as tasks
from keras_vit.model.classify import check_outputs, check_unbroken, find_broken
from keras_vit.model.config import Preprocessing
from keras_vit.model.task import Classification, Task
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import strategies
from keras_vit.train.data import sources
from keras_vit.train.data.pipeline import ModelInput, evaluation_batches
from keras_vit.train.data.split import Order, Split, check_kind, match_data

Batch = dict[str, Any]
LABELS = ("single", "real")
SHARE = "{:.2%}"
PRINTED_METRICS = {  # title and format of each metric
    "top1": ("top-1", SHARE),
    "top5": ("top-5", SHARE),
    "loss": ("cross-entropy", "{:.4f}"),
    "mean_iou": ("mean IoU", SHARE),
    "pixel_accuracy": ("pixel accuracy", SHARE),
    "mean_accuracy": ("mean accuracy", SHARE),
    "iou": ("IoU", SHARE),
    "accuracy": ("accuracy", SHARE),
    "share": ("of all pixels", SHARE),
    **{f"delta{k}": (f"delta{k}", SHARE) for k in (1, 2, 3)},
}
Step = Callable[[Any], tf.Tensor]  # from a distributed batch to its sums
BROKEN = "broken"  # number of images whose outputs are not finite, after the sums of the task
_STEPS: weakref.WeakKeyDictionary[keras.Model, tuple[tf.distribute.Strategy, Step]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics and speed of a model on a data set, as `evaluate` returns them.

    Attributes:
        data: name of the data set.
        split: the part that was measured, such as "val" or "test[:10%]"; "all" for a whole folder, "held-out" for the
            tenth of a folder that training holds out.
        classes: number of classes of the data.
        model_classes: number of classes of the model, which may have more.
        labels: "single" or "real".
        metrics: the task's metrics by name; also attributes. Of a classifier:
            top1: share of the images whose best class is right, 0..1. With ReaL labels, any of its labels is right.
            top5: share of the images with a right class among the best five, 0..1.
            loss: mean cross-entropy in nats; the target of an image with several labels is uniform over them.
            of a DenseModel: mean_iou, pixel_accuracy and mean_accuracy, or for depth delta1, abs_rel, rmse and more;
            at the size of the model's input.
        by_class: the metrics of each class by its name, of a DenseModel for segmentation.
        count: number of images in the means.
        unlabelled: number of images left out because they have no label (ReaL).
        skipped: number of images left out because they cannot be decoded.
        unread: number of other files and folders in the class folders of a folder, which are not read.
        images_per_second: including reading and preparing; the first batch, in which TensorFlow compiles, counts only
            if there is no other batch.

    Example:
        >>> result = keras_vit.train.Evaluation(
        ...     data="photos/val", split="all", classes=2, model_classes=2, labels="single",
        ...     metrics={"top1": 0.75, "top5": 1.0, "loss": 0.5}, count=4, unlabelled=0, skipped=0,
        ...     images_per_second=100.0,
        ... )
        >>> print(result)
        photos/val, all 4 images of 2 classes: top-1 75.00% (3 of 4), top-5 100.00%, cross-entropy 0.5000; 100 images/s
        >>> result.top1, result.to_dict()["top1"]
        (0.75, 0.75)
    """

    data: str
    split: str = ""
    classes: int = 0
    model_classes: int = 0
    labels: str
    metrics: Mapping[str, float]
    count: int
    unlabelled: int
    skipped: int
    unread: int = 0
    images_per_second: float
    by_class: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def __getattr__(self, name: str) -> float:
        """Metric of this name."""
        metrics = self.__dict__.get("metrics", {})
        if name not in metrics:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; its metrics are {list(metrics)}")
        return float(metrics[name])

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dictionary that JSON can hold, with the metrics among the attributes.

        A number that JSON does not have is None, such as the IoU of a class that does not occur.
        """
        values: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            values |= value if name == "metrics" else {name: value}
        return dict(json_able(values))

    def _repr_html_(self) -> str:
        """Results as a table for notebooks."""
        values = {
            **dict(_format_metrics(self.metrics)),
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
        counts = {
            "without a label": self.unlabelled,
            "that cannot be read": self.skipped,
            "other files or folders": self.unread,
        }
        left_out = [f"{count:,} {reason}" for reason, count in counts.items() if count]
        metrics = [f"{name} {value}" for name, value in _format_metrics(self.metrics)]
        if "top1" in self.metrics:
            metrics[0] += f" ({round(self.top1 * self.count):,} of {self.count:,})"
        part = "all" if self.split == "all" else f"{self.split},"
        others = f" of the model's {self.model_classes:,}" if self.classes != self.model_classes else ""
        of = f" of {self.classes:,}{others} classes" if self.classes else ""
        measured = f", {part} {self.count:,} images{of}" if self.split else ""
        return (
            f"{self.data}{measured}: {', '.join(metrics)}"
            + (", ReaL labels" if self.labels == "real" else "")
            + (f"; left out: {', '.join(left_out)}" if left_out else "")
            + f"; {self.images_per_second:,.0f} images/s"
            + "".join(
                f"\n{name}: {', '.join(map(' '.join, _format_metrics(each)))}" for name, each in self.by_class.items()
            )
        )


def _format_metrics(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the names and the values of metrics as people read them."""
    for name, value in metrics.items():
        title, shown = PRINTED_METRICS.get(name, (name, "{:.4f}"))
        yield title, shown.format(value)


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
    """Measure a model on the held-out split of a data set, or on a folder of class folders, each image once.

    If model and data have names of their classes, labels are matched by these names: the data may have the model's
    classes in another order, or some of them only. All devices give the same counts as one device. With several
    workers, all of them call this, and all get the result.

    Args:
        model: returns logits (batch, classes) for prepared images, or a map; a VisionTransformer, a DenseModel, or any
            Keras model.
        data: "digits", a folder of images, or of images and maps, a data set prepared by tensorflow-datasets, or
            arrays {"evaluation": (images, labels)}. For an opened data set, split, data_dir and on_bad_image are
            ignored.
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
            split, or no image to measure on; or the model computes NaN or infinity.

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
    opened, held_out, task, classes = open_held_out(model, data, split, data_dir, on_bad_image)
    if (labels == "real") != opened.multi_label:
        kind = "several labels per image: pass labels='real' (--real)" if opened.multi_label else "one label per image"
        raise ValueError(f"{opened.name} has {kind}. Received: labels={labels!r:.200}")
    devices = choose_strategy(model, strategy)
    replicated = replicate(model, devices)
    together = batch_size * devices.num_replicas_in_sync
    show = progress and strategies.is_chief(devices)
    batches = distribute_batches(held_out, devices, batch_size=batch_size, model_input=model_input, task=task)
    shown = track(batches, "Evaluating", total=ceil(held_out.count / together), show=show)
    names = (*task.sum_names, BROKEN)
    totals, first_seconds, other_seconds = _add_up(_compiled_step(replicated, task, devices), shown, names)
    check_unbroken(totals.pop(BROKEN))
    later = held_out.count - together
    speed = later / other_seconds if later > 0 else held_out.count / first_seconds
    skipped = held_out.count - round(totals["count"] + totals["unlabelled"])  # by all workers
    if not totals["count"]:
        raise ValueError(
            f"{opened.name} has no image to measure on: {totals['unlabelled']:.0f} have no label, "
            f"{skipped} cannot be read"
        )
    return Evaluation(
        data=opened.name,
        split=opened.eval_split,
        classes=classes,
        model_classes=opened.num_classes,
        labels=labels,
        metrics=task.means(totals),
        by_class=task.by_class(totals),
        count=round(totals["count"]),
        unlabelled=round(totals["unlabelled"]),
        skipped=skipped,
        unread=len(held_out.unread),
        images_per_second=speed,
    )


def open_held_out(
    model: keras.Model, data: Any, split: str | None, data_dir: str | os.PathLike[str] | None, on_bad_image: str
) -> tuple[sources.Data, sources.Split, tasks.Task, int]:
    """Open data; return them with the class numbers of a model, the split, the task, and their own number of classes.

    Raises a ValueError if the data have no held-out split, or classes that the model does not have.
    """
    opened = sources.open_data(data, data_dir=data_dir, eval_split=split, on_bad_image=on_bad_image, training=False)
    task = tasks.of_model(model)
    if opened.evaluation is None:
        raise ValueError(f"{opened.name} has no held-out split: choose the one to evaluate on with split")
    check_kind(opened, task)
    task.check_output(model.output_shape)
    matched = match_data(opened, task.labels, task.num_classes)
    assert matched.evaluation
    return matched, matched.evaluation, task, opened.num_classes


def choose_strategy(model: keras.Model, strategy: str | tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Find the strategy for a name; "auto" is the one that the model was created with, if there is one."""
    if not isinstance(strategy, str):
        return strategy
    values = [weight.value for weight in model.weights] if strategy == "auto" else []
    owners = [value.distribute_strategy for value in values if isinstance(value, tf.distribute.DistributedValues)]
    return owners[0] if owners else strategies.strategy(strategy)


def replicate(model: keras.Model, strategy: tf.distribute.Strategy) -> keras.Model:
    """Copy a model to every replica of a strategy, unless its weights are there already."""
    if all(strategy.extended.variable_created_in_scope(weight.value) for weight in model.weights):
        return model
    with strategy.scope():
        if isinstance(model, VisionTransformer | DenseModel):
            return model.with_config(model.config)
        copy = keras.models.clone_model(model)
        copy.set_weights(model.get_weights())
    return copy


def distribute_batches(
    split: Split,
    strategy: tf.distribute.Strategy,
    *,
    only: npt.NDArray[np.int64] | None = None,
    batch_size: int,
    model_input: ModelInput,
    task: Task,
) -> Iterator[Any]:
    """Yield `evaluation_batches` of `batch_size` images for every replica, divided among the workers.

    Warns at the end of images that were left out. A ValueError names an image that is lost, or says that none is left.
    """

    def make_worker_batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return evaluation_batches(
            split,
            only=only,
            shard=(context.input_pipeline_id, context.num_input_pipelines),
            multiple=context.num_replicas_in_sync // context.num_input_pipelines,
            batch_size=batch_size,
            model_input=model_input,
            task=task,
        )

    with split.naming_bad_image(Order(batch=1, shuffle=False), batches=split.count):
        yield from strategy.distribute_datasets_from_function(make_worker_batches)
    if split.num_skipped == split.count:
        raise ValueError(f"None of the {split.count:,} images of {split.name} can be decoded.")
    split.warn_skipped()


def _compiled_step(model: keras.Model, task: tasks.Task, devices: tf.distribute.Strategy) -> Step:
    """Compile the sums of a model's metrics once, also for several evaluations."""
    if model not in _STEPS or _STEPS[model][0] is not devices:
        reference = weakref.ref(model)  # the cache does not keep its models alive

        def replica_sums(batch: Batch) -> tf.Tensor:
            network = reference()
            assert network is not None  # `evaluate` holds it
            output = network(batch["image"], training=False)
            is_broken = find_broken(output, are_logits=isinstance(task, Classification)) & (batch["weight"] > 0)
            broken = tf.math.count_nonzero(is_broken, keepdims=True, dtype=tf.float64)
            return tf.concat([task.sums(output, batch["label"], batch["weight"]), broken], axis=0)

        @tf.function(autograph=False)
        def step(batch: Any) -> tf.Tensor:
            return devices.reduce("SUM", devices.run(replica_sums, args=(batch,)), axis=None)

        _STEPS[model] = devices, step
    return _STEPS[model][1]


def _add_up(step: Step, batches: Iterable[Any], names: Sequence[str]) -> tuple[dict[str, float], float, float]:
    """Add up the sums of all batches; time the first batch, which compiles, and the others, in seconds."""
    totals = tf.zeros(len(names), tf.float64)
    times = [time.perf_counter()]
    for batch in batches:
        totals += step(batch)
        if len(times) == 1:
            totals.numpy()  # waits for the device
            times.append(time.perf_counter())
    sums = dict(zip(names, map(float, totals.numpy()), strict=True))
    return sums, times[1] - times[0], time.perf_counter() - times[1]


def collect_images(
    strategy: tf.distribute.Strategy, function: Callable[[Batch], Sequence[Any]], *, are_logits: bool = False
) -> Callable[[Iterable[Any]], list[np.ndarray]]:
    """Make a function from distributed batches to the arrays of function(batch) and the indices, in their order.

    The first of the arrays is the model's output: if it is not finite, a ValueError says so.
    """

    def on_replica(batch: Batch) -> list[Any]:
        context = tf.distribute.get_replica_context()
        tensors = (*function(batch), batch["index"], batch["weight"])
        # What comes with the batch itself may be on no device yet, and all_gather asks for one.
        return [context.all_gather(tf.identity(tensor), axis=0) for tensor in tensors]

    compiled = tf.function(lambda batch: strategy.run(on_replica, args=(batch,)), autograph=False)

    def collect(batches: Iterable[Any]) -> list[np.ndarray]:
        rows = [[strategy.experimental_local_results(tensor)[0] for tensor in compiled(batch)] for batch in batches]
        *arrays, indices, weights = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        order = np.argsort(indices, kind="stable")
        order = order[weights[order] > 0]  # without the padding of the last batches
        check_outputs(arrays[0][order], are_logits=are_logits)
        return [array[order] for array in (*arrays, indices)]

    return collect
