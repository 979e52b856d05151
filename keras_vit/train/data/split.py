"""A part of a data set (what is trained on, what is held out) as a stream of examples in a given order.

An example is a dictionary:

| name | is |
|---|---|
| `position` | int64 scalar, its place in the sequence of `order.py`: the seed of its augmentation |
| `index` | int64 scalar, which example it is: the same number in every run |
| `image` | string scalar, the encoded file (JPEG, PNG ...); or uint8 (height, width, channels) |
| `label` | int64 scalar, 0 <= label < num_classes; or float32 (num_classes,), a one for each label that is true |
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tensorflow as tf

from keras_vit.train.data.order import MOST_EXAMPLES, Order, positions

Example = dict[str, tf.Tensor]


class Once(Protocol):
    """What is looked at a single time, as an evaluation does."""

    @property
    def good(self) -> int:
        """How many examples `once` gives."""

    def once(self, *, shard: int = 0, shards: int = 1) -> tf.data.Dataset:
        """See `Split`."""


@dataclass(frozen=True, kw_only=True)
class Split(abc.ABC):
    """Examples that can be read in any order.

    Args:
        name: what it is called in messages, such as "cifar10 train[:90%]".
        count: examples in an epoch; those whose image is bad are among them.
    """

    name: str
    count: int

    def __post_init__(self) -> None:
        if not 0 < self.count <= MOST_EXAMPLES:
            raise ValueError(f"{self.name} has {self.count:,} examples. Expected: 1 to {MOST_EXAMPLES:,}")

    @property
    def bad(self) -> Sequence[str]:
        """The names of the files that cannot be decoded; they are never read."""
        return ()

    @property
    def good(self) -> int:
        """How many examples `once` gives."""
        return self.count - len(self.bad)

    @abc.abstractmethod
    def examples(self, order: Order) -> tf.data.Dataset:
        """The examples of an order, one by one and endlessly; in place of a bad one the next good one."""

    @abc.abstractmethod
    def once(self, *, shard: int = 0, shards: int = 1) -> tf.data.Dataset:
        """Every example that is not bad a single time, in the order of their numbers.

        Args:
            shard: this worker's number.
            shards: how many workers there are; every one gets each `shards`-th example.
        """

    def name_of(self, index: int) -> str:
        """What to call an example in a message."""
        return f"example {index} of {self.name}"

    def first_bad(self, order: Order, *, batches: int = 1) -> str | None:
        """Looks for what made decoding fail: reads the order's first batches again, image by image.

        Returns:
            the name of the first image there that cannot be decoded; None where all can.
        """
        for example in self.examples(order).take(batches * len(order.local)):
            if example["image"].dtype == tf.string and not decodes(example["image"]):
                return self.name_of(int(example["index"]))
        return None


@dataclass(frozen=True, kw_only=True)
class RandomAccess(Split):
    """Examples that are read by number: files, records that can be looked up, arrays in memory.

    Args:
        fetch: makes, when it is first needed, what reads one example: from an int64 scalar to its image and label,
            in TensorFlow operations.
        find_bad: gives the numbers of the examples that cannot be decoded, ascending; None if none were looked for.
        naming: an example's name.
    """

    fetch: Callable[[], Callable[[tf.Tensor], Example]]
    find_bad: Callable[[], Sequence[int]] | None = None
    naming: Callable[[int], str] | None = None

    @functools.cached_property
    def _bad(self) -> np.ndarray:
        found = np.asarray([] if self.find_bad is None else self.find_bad(), np.int64)
        if len(found) == self.count:
            raise ValueError(f"None of the {self.count:,} images of {self.name} can be decoded.")
        return found

    @functools.cached_property
    def bad(self) -> Sequence[str]:
        """The names of the files that cannot be decoded; looked for when first asked."""
        return tuple(map(self.name_of, self._bad.tolist()))

    def examples(self, order: Order) -> tf.data.Dataset:
        """See `Split`."""
        stream = positions(order, self.count)
        if self.bad:
            good = self._good()
            next_good = np.searchsorted(good, np.arange(self.count)) % len(good)
            stand_in = tf.constant(good[next_good])
            stream = stream.map(lambda position, index: (position, stand_in[index]))
        return self._read(stream)

    def once(self, *, shard: int = 0, shards: int = 1) -> tf.data.Dataset:
        """See `Split`."""
        numbers = tf.data.Dataset.from_tensor_slices(self._good()[shard::shards])
        return self._read(numbers.map(lambda index: (index, index)))

    def name_of(self, index: int) -> str:
        """See `Split`."""
        return self.naming(index) if self.naming else super().name_of(index)

    def _good(self) -> np.ndarray:
        return np.setdiff1d(np.arange(self.count), self._bad, assume_unique=True)

    def _read(self, stream: tf.data.Dataset) -> tf.data.Dataset:
        fetch = self.fetch()
        return stream.map(
            lambda position, index: {"position": position, "index": index, **fetch(index)},
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )


def decodes(image: tf.Tensor | bytes) -> bool:
    """Whether an encoded image is whole, and of a kind that the operation decodes which training uses.

    Every byte of a JPEG is read, at an eighth of its size, which is more than twice as fast and finds the same damage.
    """
    try:
        return tf.io.decode_jpeg(image, channels=3, ratio=8).shape.rank == 3  # of WebP it makes a film
    except tf.errors.InvalidArgumentError:
        return False
