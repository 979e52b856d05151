"""Evaluate models on data sets, on one or several devices, with exact sums."""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_vit._util import html
from keras_vit._util.checks import check_counts, json_able, one_of
from keras_vit._util.progress import track
from keras_vit._util.text import image_rate
from keras_vit.dense.model import DenseModel
from keras_vit.export.exported import main_name
from keras_vit.export.runtime import FileModel
from keras_vit.model import task as tasks
from keras_vit.model.calibration import Calibration as Calibration
from keras_vit.model.classify import check_outputs, check_unbroken, find_broken
from keras_vit.model.config import Preprocessing
from keras_vit.model.cost import say_time
from keras_vit.model.task import Classification, Task
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import strategies
from keras_vit.train.data import sources
from keras_vit.train.data.pipeline import ModelInput, evaluation_batches
from keras_vit.train.data.split import Order, Split, check_kind, match_data
from keras_vit.train.label_check import check_held_out

Batch = dict[str, Any]
LABELS = ("single", "several", "real")
SHARE = "{:.2%}"
PRINTED_METRICS = {  # title and format of each metric
    "top1": ("top-1", SHARE),
    "top5": ("top-5", SHARE),
    "loss": ("cross-entropy", "{:.4f}"),
    "mean_average_precision": ("mean average precision", "{:.4f}"),
    "average_precision": ("average precision", "{:.4f}"),
    "images": ("images", "{:,.0f}"),
    "mean_iou": ("mean IoU", SHARE),
    "pixel_accuracy": ("pixel accuracy", SHARE),
    "mean_accuracy": ("mean accuracy", SHARE),
    "iou": ("IoU", SHARE),
    "accuracy": ("accuracy", SHARE),
    "share": ("of all pixels", SHARE),
    **{f"delta{k}": (f"delta{k}", SHARE) for k in (1, 2, 3)},
}
# From a distributed batch to its sums and to what is kept of each image, with the indices and weights of all images.
Step = Callable[[Any], tuple[tf.Tensor, list[tf.Tensor]]]
BROKEN = "broken"  # number of images whose outputs are not finite, after the sums of the task
_STEPS: weakref.WeakKeyDictionary[keras.Model, tuple[Any, Step]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics and speed of a model on a data set, as `evaluate` returns them.

    Attributes:
        data: name of the data set.
        split: the part that was measured, such as "val" or "test[:10%]"; "all" for a whole folder, "held-out" for the
            tenth of a folder that training holds out.
        classes: number of classes of the data.
        model_classes: number of classes of the model, which may have more.
        labels: "single", "several" or "real".
        metrics: the task's metrics by name; also attributes. Of a classifier:
            top1: share of the images whose best class is right, 0..1. With ReaL labels, any of its labels is right.
            top5: share of the images with a right class among the best five, 0..1.
            loss: mean over images in nats of what the head is trained with. Of softmax the cross-entropy; the target of
            an image with ReaL labels is uniform over them. Of sigmoids the sum of all classes' binary cross-entropies.
            of several labels for an image, in place of top1 and top5: mean_average_precision (mAP), the mean over the
            classes that have images of scikit-learn's `average_precision_score`; accuracy, the share of all images and
            classes whose probability and label are on one side of 0.5.
            of a DenseModel: mean_iou, pixel_accuracy and mean_accuracy, or for depth delta1, abs_rel, rmse and more;
            at the size of the model's input.
        by_class: the metrics of each class by its name, of a DenseModel for segmentation or for several labels.
        count: number of images in the means.
        unlabelled: number of images left out because they have no label (ReaL).
        calibration: of a classifier of one label for an image: expected calibration error, and at a threshold of the
            largest probability how many images are answered and how many of these are right.
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
    calibration: Calibration | None = None

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
            "calibration error": f"{self.calibration.error:.4f}" if self.calibration else None,
            "labels": self.labels,
            "split": self.split or None,
            "images": f"{self.count:,}",
            "without a label": self.unlabelled or None,
            "unreadable": self.skipped or None,
            "other files": self.unread or None,
            "images/s": image_rate(self.images_per_second).removesuffix(" images/s"),
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
            + f"; {image_rate(self.images_per_second)}"
            + "".join(
                f"\n{name}: {', '.join(map(' '.join, _format_metrics(each)))}" for name, each in self.by_class.items()
            )
            + (f"\n{self.calibration}" if self.calibration else "")
        )


def _format_metrics(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the names and the values of metrics as people read them."""
    for name, value in metrics.items():
        title, shown = PRINTED_METRICS.get(name, (name, "{:.4f}"))
        yield title, shown.format(value)


def evaluate(
    model: keras.Model | FileModel,
    data: str | os.PathLike[str] | Mapping[str, Any] | sources.Data,
    *,
    split: str | None = None,
    batch_size: int = 64,
    labels: str | None = None,
    strategy: str | tf.distribute.Strategy = "auto",
    preprocessing: Preprocessing | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    on_bad_image: str = "skip",
    mask_values: str | Sequence[int | str] | None = None,
    progress: bool = False,
) -> Evaluation:
    """Measure a model on the held-out split of a data set, or on a folder of class folders, each image once.

    If model and data have names of their classes, labels are matched by these names: the data may have the model's
    classes in another order, or some of them only. All devices give the same counts as one device. With several
    workers, all of them call this, and all get the result.

    Args:
        model: returns logits (batch, classes) for prepared images, or a map; a VisionTransformer, a DenseModel, any
            Keras model, or a .tflite file as `export.load` returns it.
        data: "digits", a folder of images, or of images and maps, a data set prepared by tensorflow-datasets, or
            arrays {"evaluation": (images, labels)}. For an opened data set, split, data_dir and on_bad_image are
            ignored.
        split: such as "validation" or "test[:10%]"; of a folder a sub-folder, "all" images, or "held-out": the tenth
            that training holds out where there is no such sub-folder. None takes the held-out split; if a folder has no
            train, val, validation or test, all of it.
        batch_size: images per call on each device. The last batches are padded; the padding does not count.
        labels: what rows of zeros and ones say. "several": each class is right or wrong for itself, which needs a
            model with probabilities="sigmoid". "real", for data such as ImageNet-ReaL (arXiv 2006.07159): any of the
            labels is right, and images without one are left out (but not of a sigmoid's loss). None takes "several" for
            such a model, and "single" for one label per image.
        strategy: name as for `train.strategy`, or its result. "auto" takes the one that the model was created with, if
            there is one. A model that was created without it is copied to every device.
        preprocessing: None takes the model's own.
        data_dir: folder of tensorflow-datasets' prepared data; None is its default.
        on_bad_image: "skip" leaves out and counts files that cannot be decoded; "fail" raises an error.
        mask_values: the value in masks of each class, as for `train.run`.
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
    request = sources.DataRequest(
        data=data, data_dir=data_dir, eval_split=split, on_bad_image=on_bad_image, mask_values=mask_values
    )
    options: Any = {"labels": labels, "strategy": strategy, "preprocessing": preprocessing, "progress": progress}
    return measure(model, request, batch_size=batch_size, **options).evaluation


class Measured(NamedTuple):
    """An evaluation and what it was made of."""

    evaluation: Evaluation
    task: tasks.Task  # of the labels
    split: Split
    indices: np.ndarray  # int64, numbers in the split of the images, in their order; none unless something is kept
    output: np.ndarray | None  # of these images, float32, if outputs are kept
    targets: np.ndarray | None  # their labels, as `Task.targets` has them


def measure(
    model: keras.Model | FileModel,
    request: sources.DataRequest,
    *,
    batch_size: int,
    labels: str | None = None,
    strategy: str | tf.distribute.Strategy = "auto",
    preprocessing: Preprocessing | None = None,
    progress: bool = False,
    keeps_outputs: bool = False,
) -> Measured:
    """Evaluate a model; arguments and errors as for `evaluate`. `keeps_outputs` keeps the output of every image."""
    strategies.check_backend()
    model = as_keras_model(model)
    model_input = ModelInput.from_model(model, preprocessing)
    if labels is not None:
        one_of("labels", labels, LABELS)
    check_counts(batch_size=batch_size)
    opened, held_out, task, classes = open_held_out(model, request)
    several = tasks.of_labels(task, several=opened.multi_label and labels != "real")
    labels = labels or ("single" if several is task else "several")
    if (labels != "single") != opened.multi_label or (labels == "several") == (several is task):
        kind = (
            "several labels per image: pass labels='real' (--real), or a model with probabilities='sigmoid'"
            if opened.multi_label
            else "one label per image"
        )
        raise ValueError(f"{opened.name} has {kind}. Received: labels={labels!r:.200}")
    task = several
    devices = choose_strategy(model, strategy)
    replicated = replicate(model, devices)
    together = batch_size * devices.num_replicas_in_sync
    show = progress and strategies.is_chief(devices)
    batches = distribute_batches(held_out, devices, batch_size=batch_size, model_input=model_input, task=task)
    if show and strategies.is_cpu() and isinstance(model, VisionTransformer):
        say_time(model, held_out.count)
    shown = track(batches, "Evaluating", total=ceil(held_out.count / together), show=show)
    names = (*task.sum_names, BROKEN)
    step = _compiled_step(replicated, task, devices, keeps_outputs=keeps_outputs)
    totals, rows, first_seconds, other_seconds = _add_up(step, shown, names)
    check_unbroken(totals.pop(BROKEN))
    later = held_out.count - together
    speed = later / other_seconds if later > 0 else held_out.count / first_seconds
    skipped = held_out.count - round(totals["count"] + totals["unlabelled"])  # by all workers
    if not totals["count"]:
        raise ValueError(
            f"{opened.name} has no image to measure on: {totals['unlabelled']:.0f} have no label, "
            f"{skipped} cannot be read"
        )
    *kept, indices = in_order(rows) if rows else [np.zeros(0, np.int64)]
    output, targets = (kept.pop(-2), kept.pop()) if keeps_outputs else (None, None)
    found = task.from_kept(kept)
    evaluation = Evaluation(
        data=opened.name,
        split=opened.eval_split,
        classes=classes,
        model_classes=opened.num_classes,
        labels=labels,
        metrics={**found.metrics, **task.means(totals)},
        by_class=found.by_class or task.by_class(totals),
        calibration=found.calibration,
        count=round(totals["count"]),
        unlabelled=round(totals["unlabelled"]),
        skipped=skipped,
        unread=len(held_out.unread),
        images_per_second=speed,
    )
    return Measured(evaluation, task, held_out, indices, output, targets)


def balanced_accuracy(labels: npt.NDArray[np.integer], predicted: npt.NDArray[np.integer]) -> float:
    """Mean over the classes that occur of the share of their images that is right, as scikit-learn's score."""
    counts = np.bincount(labels)
    right = np.bincount(labels[labels == predicted], minlength=len(counts))
    return float(np.mean(right[counts > 0] / counts[counts > 0]))


def as_keras_model(model: keras.Model | FileModel) -> keras.Model:
    """Make a Keras model, without weights, that runs a .tflite file; another model stays as it is."""
    if not isinstance(model, FileModel):
        return model
    return _FileInKeras(model)


class _FileInKeras(keras.Model):
    """A .tflite file as a Keras model of images that TensorFlow has prepared."""

    def __init__(self, file: FileModel) -> None:
        super().__init__(name="file")
        self.file, self.task = file, file.task
        self.input_shape, self.output_shape = file.input_shape, (None, *file.output_shape[1:])
        self.config = file.config.replace(preprocessing=file.input_preprocessing)
        self.built = True

    def call(self, images: Any, training: bool | None = None) -> Any:
        """Run the file outside of the graph."""
        output = tf.numpy_function(self._run, [images], tf.float32)
        return tf.ensure_shape(output, (images.shape[0], *self.output_shape[1:]))

    def _run(self, images: np.ndarray) -> np.ndarray:
        if self.file.input_dtype == "uint8":
            images = np.round(images).astype(np.uint8)
        outputs = self.file.run_prepared(images)
        if "probabilities" not in outputs:
            return outputs[main_name(outputs)]
        shares = outputs["probabilities"]
        with np.errstate(divide="ignore"):  # logits of the same ranking and the same probabilities
            is_sigmoid = self.task.probabilities == "sigmoid"
            return np.log(shares) - np.log1p(-shares) if is_sigmoid else np.log(shares)


def open_held_out(
    model: keras.Model, request: sources.DataRequest
) -> tuple[sources.Data, sources.Split, tasks.Task, int]:
    """Open data; return them with the class numbers of a model, the split, the task, and their own number of classes.

    Raises a ValueError if the data have no held-out split, or classes that the model does not have.
    """
    task = tasks.of_model(model)
    has_single_class = task.num_classes == 1
    opened = sources.open_data(dataclasses.replace(request, training=False, has_single_class=has_single_class))
    if opened.evaluation is None:
        raise ValueError(f"{opened.name} has no held-out split: choose the one to evaluate on with split")
    check_kind(opened, task)
    if not isinstance(request.data, sources.Data):  # a training has checked its data
        check_held_out(opened, getattr(task, "max_depth", None))
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
    if split.damage and split.num_skipped == split.count:
        raise split.damage.none_left()
    split.warn_skipped()


def _compiled_step(
    model: keras.Model, task: tasks.Task, devices: tf.distribute.Strategy, *, keeps_outputs: bool
) -> Step:
    """Compile the sums of a model's metrics once, also for several evaluations."""
    key = devices, task, keeps_outputs
    if model not in _STEPS or _STEPS[model][0] != key:
        reference = weakref.ref(model)  # the cache does not keep its models alive

        def replica_sums(batch: Batch) -> tuple[tf.Tensor, list[tf.Tensor]]:
            network = reference()
            assert network is not None  # `measure` holds it
            output = network(batch["image"], training=False)
            is_broken = find_broken(output, are_logits=isinstance(task, Classification)) & (batch["weight"] > 0)
            broken = tf.math.count_nonzero(is_broken, keepdims=True, dtype=tf.float64)
            sums = tf.concat([task.sums(output, batch["label"], batch["weight"]), broken], axis=0)
            outputs = [tf.cast(output, tf.float32), batch["label"]] if keeps_outputs else []
            kept = [*task.kept(output, batch["label"]), *outputs]
            return sums, gather(kept, batch) if kept else []

        @tf.function(autograph=False)
        def step(batch: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
            sums, outputs = devices.run(replica_sums, args=(batch,))
            return devices.reduce("SUM", sums, axis=None), local_values(outputs, devices)

        _STEPS[model] = key, step
    return _STEPS[model][1]


def _add_up(
    step: Step, batches: Iterable[Any], names: Sequence[str]
) -> tuple[dict[str, float], list[list[np.ndarray]], float, float]:
    """Add up the sums of all batches, and keep their outputs; time the first, which compiles, and the others (s)."""
    totals, kept = tf.zeros(len(names), tf.float64), []
    times = [time.perf_counter()]
    for batch in batches:
        sums, outputs = step(batch)
        totals += sums
        if outputs:
            kept.append([tensor.numpy() for tensor in outputs])
        if len(times) == 1:
            totals.numpy()  # waits for the device
            times.append(time.perf_counter())
    sums = dict(zip(names, map(float, totals.numpy()), strict=True))
    return sums, kept, times[1] - times[0], time.perf_counter() - times[1]


def gather(tensors: Sequence[Any], batch: Batch) -> list[Any]:
    """On a replica: tensors (batch, ...), and the indices and weights of the images, of the batches of all replicas."""
    context = tf.distribute.get_replica_context()
    # What comes with the batch itself may be on no device yet, and all_gather asks for one.
    return [context.all_gather(tf.identity(tensor), axis=0) for tensor in (*tensors, batch["index"], batch["weight"])]


def local_values(tensors: Sequence[Any], strategy: tf.distribute.Strategy) -> list[Any]:
    """Values of what `gather` returned, which are the same on all replicas."""
    return [strategy.experimental_local_results(tensor)[0] for tensor in tensors]


def in_order(rows: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Join what `gather` returned for each batch: the arrays and the indices, in the order of the images."""
    *arrays, indices, weights = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    order = np.argsort(indices, kind="stable")
    order = order[weights[order] > 0]  # without the padding of the last batches
    return [array[order] for array in (*arrays, indices)]


def collect_images(
    strategy: tf.distribute.Strategy, function: Callable[[Batch], Sequence[Any]], *, are_logits: bool = False
) -> Callable[[Iterable[Any]], list[np.ndarray]]:
    """Make a function from distributed batches to the arrays of function(batch) and the indices, in their order.

    The first of the arrays is the model's output: if it is not finite, a ValueError says so.
    """

    def on_replica(batch: Batch) -> list[Any]:
        return gather(function(batch), batch)

    compiled = tf.function(lambda batch: strategy.run(on_replica, args=(batch,)), autograph=False)

    def collect(batches: Iterable[Any]) -> list[np.ndarray]:
        rows = [[tensor.numpy() for tensor in local_values(compiled(batch), strategy)] for batch in batches]
        arrays = in_order(rows)
        check_outputs(arrays[0], are_logits=are_logits)
        return arrays

    return collect
