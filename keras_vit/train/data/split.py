"""Data sets, their splits (streams of examples in a given order) and classes; what a user asks for as data.

An example is a dictionary:

| key | value |
|---|---|
| `position` | int64 scalar, its place in the sequence of `positions`; seeds its augmentation |
| `index` | int64 scalar, number of the example, the same in every run |
| `image` | string scalar, the encoded file (JPEG or PNG); or numbers (height, width, channels) |
| `label` | as its task has it. Of a class: int64 scalar below num_classes, or float32 (num_classes,), a one for each |
| | a map (height, width) of the image's size: numbers of classes, uint8, or metres, float32 |
"""

import abc
import atexit
import contextlib
import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_vit._util.checks import one_of
from keras_vit._util.text import abbreviated, error_reason, warn
from keras_vit.model.config import Preprocessing
from keras_vit.model.labels import match_classes, names
from keras_vit.model.task import NOT_TRAINED, Classification, Task
from keras_vit.train.data.dataset_files import READ_ERRORS, is_decodable
from keras_vit.train.data.label_values import Tally, name_value, parse_mask_values

# TensorFlow permutes 32-bit numbers (tensorflow/core/kernels/random_index_shuffle.cc); larger sets repeat examples.
MAX_EXAMPLES = 2**31 - 1
AHEAD = 2  # batches whose indices are computed at once
MAX_BATCHES = 2**40  # more than any run needs; times a batch size, it still fits int64


@dataclass(frozen=True, kw_only=True)
class Order:
    """The part of the endless sequence of positions that one worker reads."""

    batch: int  # examples per step on all replicas together
    seed: int = 0  # of the permutations, below 2**64
    start: int = 0  # the first batch to read: as many as have been trained on
    replicas: int = 1  # number on all workers together; divides the batch
    first_replica: int = 0  # index of this worker's first replica
    local_replicas: int = 1  # number of this worker's replicas
    shuffle: bool = True  # False reads the examples by ascending number in every epoch

    @property
    def replica_batch(self) -> int:
        """Number of examples per step on one replica."""
        return self.batch // self.replicas

    @property
    def local(self) -> range:
        """Indices within a batch of this worker's examples."""
        first = self.first_replica * self.replica_batch
        return range(first, first + self.local_replicas * self.replica_batch)


def positions(
    order: Order, count: int, replace: Callable[[tf.Tensor], tf.Tensor] = lambda index: index
) -> tf.data.Dataset:
    """Create the worker's endless stream of (position, index), int64 scalars; an epoch has `count` examples.

    `replace` maps the indices of a batch to those that are read in their place.
    """

    @tf.autograph.experimental.do_not_convert
    def batch_positions(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        position = number * order.batch + tf.range(order.local.start, order.local.stop, dtype=tf.int64)
        index = position % count
        if order.shuffle:
            index = _permute(index, epoch=position // count, seed=order.seed, count=count)
        return position, replace(index)

    # A batch at a time, which is faster than one call per position.
    batches = tf.data.Dataset.range(order.start, MAX_BATCHES)
    return batches.map(batch_positions, num_parallel_calls=AHEAD, deterministic=True).unbatch()


def _permute(index: tf.Tensor, *, epoch: tf.Tensor, seed: int, count: int) -> tf.Tensor:
    """Map each index by the permutation of its epoch; `index` and `epoch` are vectors of equal length."""
    words = (seed % 2**32, seed >> 32)  # the operation reads the low 32 bits of each number of its seed
    low, high = (tf.fill(tf.shape(epoch), tf.constant(word, tf.int64)) for word in words)
    # The public tf.random.experimental.index_shuffle takes one seed for all indices; here each epoch has its own.
    return tf.raw_ops.RandomIndexShuffle(
        index=index, seed=tf.stack([low, high, epoch], axis=1), max_index=tf.constant(count - 1, tf.int64), rounds=4
    )


LABELS_AT_ONCE = 1024
CHECKED_AT_ONCE = 64  # images

Example = dict[str, tf.Tensor]
Indices: TypeAlias = npt.NDArray[np.int64]


class Damage:
    """The images of a folder that cannot be used. A file is checked when it is first read, once in a process."""

    GOOD, BAD = 1, 2
    NAMED = 10  # images that a warning names

    def __init__(
        self,
        folder: str,
        count: int,
        name_of: Callable[[int], str],
        check: Callable[[int, Preprocessing], str | None],
        *,
        fail: bool,
    ) -> None:
        """Create a record of `count` images; `check` returns why a model with this preprocessing cannot use one.

        `fail` makes that an error.
        """
        self.reasons: dict[int, str] = {}  # index of an image -> why it cannot be used
        self.error: ValueError | None = None  # that ended the reading: TensorFlow replaces it by one of its own
        self._folder, self._count, self._fail = folder, count, fail
        self._name_of, self._check = name_of, check
        self._states = np.zeros(count, np.int8)
        self._warned = 0
        self.preprocessing = Preprocessing()

    def expect(self, preprocessing: Preprocessing) -> None:
        """Check the images for a model with this preprocessing from now on."""
        if preprocessing.limits != self.preprocessing.limits:
            self._states[:] = 0
            self.reasons.clear()
        self.preprocessing = preprocessing

    def is_readable(self, index: int) -> bool:
        """Check one image, or raise the ValueError of `fail` if it cannot be used."""
        if not self._states[index]:
            try:
                reason = self._check(index, self.preprocessing)
                if reason and self._fail:
                    raise ValueError(
                        f'{self._name_of(index)} {reason}. Remove the file, or skip it with on_bad_image="skip" '
                        "(--on-bad-image skip)."
                    )
            except ValueError as error:
                self.error = error
                raise
            if reason:
                self.reasons[index] = reason
            self._states[index] = self.BAD if reason else self.GOOD
        return bool(self._states[index] == self.GOOD)

    def are_readable(self, indices: Indices) -> npt.NDArray[np.bool_]:
        """Check several images in parallel."""
        new = indices[self._states[indices] == 0].tolist()
        if new:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(self.is_readable, new))
        return self._states[indices] == self.GOOD

    def replace_unreadable(self, indices: Indices) -> Indices:
        """Replace each unusable image by the next usable one; after the last comes number 0."""
        is_bad = ~self.are_readable(indices)
        return np.array(
            [self._next_readable(index) if bad else index for index, bad in zip(indices, is_bad, strict=True)]
        )

    def _next_readable(self, index: int) -> int:
        for number in range(index + 1, index + self._count):
            if self.is_readable(number % self._count):
                return number % self._count
        self.error = self.none_left()
        raise self.error

    def none_left(self) -> ValueError:
        """Make the error about a folder without a usable image, which names the first one and why."""
        first = min(self.reasons)
        return ValueError(
            f"None of the {self._count:,} images of {self._folder} can be used. The first: {self._name_of(first)} "
            f"{self.reasons[first]}"
        )

    def warn(self) -> None:
        """Warn of the images that were left out, if there are more than at the last warning."""
        found = [f"{self._name_of(index)} {reason}" for index, reason in sorted(self.reasons.items())]
        if len(found) > self._warned:
            self._warned = len(found)
            warn(
                f"Images of {self._folder} that cannot be used: {abbreviated(found, self.NAMED)}. "
                f"Left out: {len(found):,} of {self._count:,}."
            )


@dataclass(frozen=True, kw_only=True)
class Split(abc.ABC):
    """Examples that can be read in any order."""

    name: str  # for messages, such as "cifar10 train[:90%]"
    count: int  # examples per epoch, including those whose image cannot be used
    unread: Sequence[str] = ()  # other files of the folder, which are not examples of any split
    renumber: Callable[[tf.Tensor], tf.Tensor] | None = None  # gives a label the new numbers of its classes
    check: Callable[[], None] = lambda: None  # raises a ValueError that names a damaged file of records
    damage: Damage | None = None  # of a folder; of other data each example must be readable
    # Raises a ValueError for arrays that a model of so many channels and this preprocessing does not take.
    check_arrays: Callable[[int, Preprocessing], None] = lambda num_channels, preprocessing: None
    fingerprint: Callable[[], str] = lambda: ""  # returns a hash that changes with the images, their order or labels
    tally: Tally | None = None  # of the labels, in the data's own numbers; None where none was read yet

    def __post_init__(self) -> None:
        if not 0 < self.count <= MAX_EXAMPLES:
            raise ValueError(f"{self.name} has {self.count:,} examples. Expected: 1 to {MAX_EXAMPLES:,}")

    @property
    def num_skipped(self) -> int:
        """Number of examples that were left out because they cannot be used, of those that were read until now."""
        return len(self.damage.reasons) if self.damage else 0

    def expect(self, num_channels: int, preprocessing: Preprocessing) -> None:
        """Check the images for a model of so many channels and this preprocessing: arrays now, files when read."""
        self.check_arrays(num_channels, preprocessing)
        if self.damage:
            self.damage.expect(preprocessing)

    def is_readable(self, index: int) -> bool:
        """Check one example; those outside of folders always count as readable."""
        return self.damage is None or self.damage.is_readable(index)

    def warn_skipped(self) -> None:
        """Warn of the examples that were left out since the last warning."""
        if self.damage:
            self.damage.warn()

    @abc.abstractmethod
    def examples(self, order: Order) -> tf.data.Dataset:
        """Stream examples without end; the next usable one replaces one that cannot be used."""

    @abc.abstractmethod
    def iterate_once(self, *, only: Indices | None = None, shard: int = 0, shards: int = 1) -> tf.data.Dataset:
        """Stream every usable example once, or `only` some indices, in order; a shard has every `shards`-th."""

    @abc.abstractmethod
    def labels(self) -> np.ndarray:
        """Labels of all examples in order; no image is decoded."""

    @abc.abstractmethod
    def some_labels(self, most: int) -> np.ndarray:
        """Labels of at most `most` examples, in order: spread over the split, or the first of a stream."""

    def renumbered(self, example: Example) -> Example:
        """Give the label of an example the new numbers of its classes."""
        return example if self.renumber is None else {**example, "label": self.renumber(example["label"])}

    def with_numbers(self, renumber: Callable[[tf.Tensor], tf.Tensor]) -> "Split":
        """Give labels new numbers, after those that they get already."""
        first = self.renumber
        both = renumber if first is None else lambda label: renumber(first(label))
        return dataclasses.replace(self, renumber=both)

    def name_of(self, index: int) -> str:
        """Name of an example for messages."""
        return f"example {index} of {self.name}"

    @contextlib.contextmanager
    def naming_bad_image(self, order: Order, *, batches: int = 1) -> Iterator[None]:
        """Name the image of an order's first batches that cannot be read, in place of TensorFlow's error."""
        try:
            yield
        except READ_ERRORS as error:
            try:
                name = self.first_bad(order, batches=batches)
            except READ_ERRORS as cause:
                name = error_reason(getattr(cause, "message", None) or str(cause))
                if isinstance(cause, tf.errors.DataLossError | UnicodeDecodeError):  # of a file of records
                    raise ValueError(f"An example cannot be read: {name}") from error
            if name is None:
                raise
            raise ValueError(
                f"{name}: an image that was there at the start cannot be read any more. Restore the file, or put an "
                "empty one in its place, which is skipped and counted. Then start the same run again: it continues "
                "after its last checkpoint."
            ) from error

    def first_bad(self, order: Order, *, batches: int = 1) -> str | None:
        """Find the first image in an order's first batches that cannot be decoded, and name it; None if all can.

        Raises the error that ended the reading, if it was ours.
        """
        self.check()
        if self.damage and self.damage.error:
            error, self.damage.error = self.damage.error, None
            raise error
        for example in self.examples(order).take(batches * len(order.local)):
            if example["image"].dtype == tf.string and not is_decodable(example["image"]):
                return self.name_of(int(example["index"]))
        return None


@dataclass(frozen=True, kw_only=True)
class RandomAccess(Split):
    """Examples that are read by index: files, records with an index, arrays in memory."""

    # Returns the function from an index (int64 scalar) to image and label; called when the first example is needed.
    make_reader: Callable[[], Callable[[tf.Tensor], Example]]
    example_name: Callable[[int], str] | None = None  # returns the name of an example; None numbers them

    def examples(self, order: Order) -> tf.data.Dataset:
        """See `Split`."""
        if self.damage is None:
            return self._read(positions(order, self.count))
        replace = functools.partial(_in_python, self.damage.replace_unreadable, dtype=tf.int64)
        return self._read(positions(order, self.count, replace))

    def iterate_once(self, *, only: Indices | None = None, shard: int = 0, shards: int = 1) -> tf.data.Dataset:
        """See `Split`."""
        chosen = np.arange(self.count) if only is None else np.unique(only)
        indices = tf.data.Dataset.from_tensor_slices(chosen[shard::shards])
        if damage := self.damage:
            batches = indices.batch(CHECKED_AT_ONCE).map(
                lambda batch: (batch, _in_python(damage.are_readable, batch, dtype=tf.bool)), num_parallel_calls=AHEAD
            )
            indices = batches.unbatch().filter(lambda _, is_readable: is_readable).map(lambda index, _: index)
        return self._read(indices.map(lambda index: (index, index)))

    def labels(self) -> np.ndarray:
        """See `Split`."""
        return self.some_labels(self.count)

    def some_labels(self, most: int) -> np.ndarray:
        """See `Split`."""
        read = self.make_reader()
        chosen = np.unique(np.linspace(0, self.count - 1, min(most, self.count)).astype(np.int64))
        stream = tf.data.Dataset.from_tensor_slices(chosen)
        labels = stream.map(lambda index: self.renumbered(read(index))["label"])
        return np.concatenate(list(labels.batch(LABELS_AT_ONCE).as_numpy_iterator()))

    def name_of(self, index: int) -> str:
        """See `Split`."""
        return self.example_name(index) if self.example_name else super().name_of(index)

    def _read(self, stream: tf.data.Dataset) -> tf.data.Dataset:
        read = self.make_reader()
        return stream.map(
            lambda position, index: {"position": position, "index": index, **self.renumbered(read(index))},
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )


def _in_python(function: Callable[[Indices], Any], indices: tf.Tensor, *, dtype: tf.DType) -> tf.Tensor:
    """Call a function of an array of indices, which returns as many values, from a graph."""
    atexit.unregister(_forget_last_error)
    atexit.register(_forget_last_error)
    values = tf.numpy_function(function, [indices], dtype, stateful=False)
    return tf.ensure_shape(values, indices.shape)


def _forget_last_error() -> None:
    """Free the pipelines that the traceback of an uncaught error keeps.

    Otherwise they are freed when their threads can call Python no more, and the process never ends.
    """
    sys.last_traceback = sys.last_value = None
    gc.collect()


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set: images with the labels of a task."""

    name: str  # for messages and reports
    train: Split | None
    evaluation: Split | None  # held out
    eval_split: str = ""  # what `evaluation` is, such as "val", "all" or "test[:10%]"
    num_classes: int
    class_names: tuple[str, ...]
    make_task: Callable[..., Task] = Classification  # of num_classes and labels, as the classes in `task.KINDS`
    is_labelled: bool = True  # whether the labels mean anything; without labels they are 0
    multi_label: bool = False  # whether an image may have several classes or none; labels are then rows of 0 and 1
    states_values: bool = False  # whether the user says which classes the values of masks stand for

    def training_split(self) -> Split:
        """Training images, or a ValueError if there are none."""
        if self.train is None:
            raise ValueError(f"{self.name} has no training images")
        return self.train

    def fingerprint(self) -> list[str]:
        """Hashes of the splits: their images, in order, and labels; of files the names, sizes and times."""
        return [split.fingerprint() for split in (self.train, self.evaluation) if split]

    @property
    def task(self) -> Task:
        """The task that the labels are for."""
        return self.make_task(num_classes=self.num_classes, labels=self.class_names)


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """A data set and the parts of it to use: the arguments of `train.run`, which describes them.

    If `training` is false, no split to train on is needed, and a folder without split folders is evaluated whole. If
    `needs_labels` is false, images may be without labels: a folder without class folders, or arrays (images, None). If
    `has_single_class` is true, labels (n, 1) are zeros and ones of one class, and otherwise the same as (n,).
    """

    data: Any
    data_dir: str | os.PathLike[str] | None = None
    train_split: str | None = None
    eval_split: str | None = None
    on_bad_image: str = "skip"
    mask_values: str | Sequence[int | str] | None = None
    training: bool = True
    needs_labels: bool = True
    has_single_class: bool = False

    def __post_init__(self) -> None:
        one_of("on_bad_image", self.on_bad_image, ("skip", "fail"))
        if self.mask_values is not None:  # as text, which a run stores
            object.__setattr__(self, "mask_values", ",".join(map(name_value, parse_mask_values(self.mask_values))))

    @property
    def values_of_masks(self) -> tuple[int, ...] | None:
        """The value of each class that the user states, as `MaskValues` has them."""
        return None if self.mask_values is None else parse_mask_values(self.mask_values)

    def stored(self) -> dict[str, str] | None:
        """Arguments that find the data again, as text, folders with their whole paths; None for arrays."""
        if not isinstance(self.data, str | os.PathLike):
            return None
        names = ("data", "data_dir", "train_split", "eval_split", "mask_values")
        stored = {name: os.fspath(getattr(self, name)) for name in names if getattr(self, name) is not None}
        for name in ("data", "data_dir"):
            if name in stored and "://" not in stored[name] and Path(stored[name]).is_dir():
                stored[name] = str(Path(stored[name]).absolute())
        return stored


def are_comparable(labels: str | tuple[str, ...] | None, num_classes: int, class_names: Sequence[str] | None) -> bool:
    """Check that model and data both name their classes. A model's numbers are names of numbers only."""
    if not labels or not class_names:
        return False
    return labels != tuple(map(str, range(num_classes))) or not set(labels).isdisjoint(class_names)


def check_kind(data: Data, task: Task) -> None:
    """Raise a ValueError if a data set has labels of another task than a model."""
    if not task.OBJECTIVES:
        raise ValueError(NOT_TRAINED.format(task.NAME))
    if task.NAME != data.task.NAME:
        raise ValueError(
            f"{data.name} has {data.task.NAME}, and the model returns {task.NAME}. For maps a model needs a head: "
            "keras_vit.dense.segmenter(model, num_classes) or depth(model), or a recipe that names one, such as "
            "segment-folder or depth-folder; for classes of images, pass a model without such a head"
        )


def match_data(data: Data, labels: str | tuple[str, ...] | None, num_classes: int) -> Data:
    """Renumber the labels of a data set as a model's classes, of which it may have some only.

    Without names of both (`labels` None) there is nothing to compare but the number of classes. Data with classes that
    the model does not have are a ValueError.
    """
    if not labels or not are_comparable(labels, num_classes, data.class_names):
        if data.num_classes != num_classes:
            raise ValueError(
                f"The model has {num_classes} classes and {data.name} has {data.num_classes}: evaluate weights that"
                f" were trained for its classes, or load the model with num_classes={data.num_classes} and train the"
                " head"
            )
        found = list(data.class_names)
        if all(map(str.isdecimal, found)) and sorted(found, key=int) != found:
            warn(
                f"The model has no class names, and those of {data.name} are numbers in the order of text:"
                f" {', '.join(found[:3])}, ... are the classes 0, 1, 2, ... For the order of numbers, rename 2 to 02."
            )
        return data
    numbers = match_classes(labels, num_classes, data.class_names, data.name)
    if numbers == list(range(num_classes)):
        return data
    own_names = dict(zip(numbers, data.class_names, strict=True))
    class_names = [own_names.get(number, label) for number, (_, label) in enumerate(names(labels, num_classes))]
    data = dataclasses.replace(data, num_classes=num_classes, class_names=tuple(class_names))
    renumber = functools.partial(data.task.renumbered, numbers=tuple(numbers))
    train, evaluation = (split and split.with_numbers(renumber) for split in (data.train, data.evaluation))
    return dataclasses.replace(data, train=train, evaluation=evaluation)
