"""Reading the records of a prepared tensorflow-datasets split: in memory, by number, or as one long stream.

| kind of files | read |
|---|---|
| small enough | all in memory once, then by number |
| ArrayRecord | by number from the files |
| TFRecord | from front to back; the files' order and a shuffle buffer follow from (seed, epoch) |

A run that goes on in the middle of an epoch of the last kind reads over that epoch's records so far, without decoding
them. Preparing a large data set as ArrayRecord (`tfds build NAME --file_format=array_record`) avoids that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.train.data.order import LAST_BATCH, Order
from keras_vit.train.data.split import Example, RandomAccess, Split

Parse = Callable[[tf.Tensor, tf.Tensor], Example]
FILES_AT_ONCE = 16  # read in turns, so that one buffer holds records of many files


@dataclass(frozen=True)
class Files:
    """The files of a split, in order; the number of an example counts through them.

    Args:
        instructions: tensorflow-datasets' FileInstruction of each: filename, skip, take.
    """

    instructions: Sequence[Any]

    @property
    def count(self) -> int:
        """How many examples they hold."""
        return sum(each.take for each in self.instructions)

    def stream(self, seed: tf.Tensor | None) -> tf.data.Dataset:
        """The TFRecords, each with its number: file after file, or several files in turns as a seed orders them."""
        takes = np.array([each.take for each in self.instructions], np.int64)
        skips = np.array([each.skip for each in self.instructions], np.int64)
        columns = ([str(each.filename) for each in self.instructions], skips, takes, np.cumsum(takes) - takes)
        if seed is None:
            return tf.data.Dataset.from_tensor_slices(columns).flat_map(_records)
        chosen = tf.random.experimental.stateless_shuffle(tf.range(len(takes)), seed)
        files = tf.data.Dataset.from_tensor_slices(tuple(tf.gather(column, chosen) for column in columns))
        return files.interleave(_records, cycle_length=FILES_AT_ONCE, num_parallel_calls=tf.data.AUTOTUNE)


def _records(filename: tf.Tensor, skip: tf.Tensor, take: tf.Tensor, first: tf.Tensor) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(first, first + take)
    return tf.data.Dataset.zip(numbers, tf.data.TFRecordDataset(filename).skip(skip).take(take))


def _shuffled(stream: tf.data.Dataset, buffer: int, seeds: tuple[tf.Tensor, tf.Tensor]) -> tf.data.Dataset:
    """`stream.shuffle(buffer)` by these seeds alone: that method adds TensorFlow's global seed to them."""
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(stream),
        buffer_size=tf.constant(buffer, tf.int64),
        seed=seeds[0],
        seed2=seeds[1],  # not 0, for (0, 0) means another shuffle each time
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        reshuffle_each_iteration=False,
        output_types=[tf.int64, tf.string],
        output_shapes=[[], []],
    )
    return tf.data.experimental.from_variant(variant, stream.element_spec)


def in_memory(name: str, files: Files, parse: Parse) -> RandomAccess:
    """A split of TFRecords that is read into memory when it is first used."""

    @functools.cache
    def records() -> tf.Tensor:
        return tf.constant(np.array([record for _, record in files.stream(None).as_numpy_iterator()], object))

    def reader() -> Callable[[tf.Tensor], Example]:
        table = records()
        return lambda index: parse(index, table[index])

    return RandomAccess(name=name, count=files.count, fetch=reader)


def by_number(name: str, files: Files, parse: Parse) -> RandomAccess:
    """A split of ArrayRecords, of which any can be looked up."""

    def reader() -> Callable[[tf.Tensor], Example]:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        source = ArrayRecordDataSource(files.instructions)

        def fetch(index: tf.Tensor) -> Example:
            record = tf.numpy_function(lambda number: source[int(number)], [index], tf.string, stateful=False)
            return parse(index, tf.ensure_shape(record, ()))

        return fetch

    return RandomAccess(name=name, count=files.count, fetch=reader)


@dataclass(frozen=True, kw_only=True)
class Sequential(Split):
    """A split of TFRecords too large for memory.

    Args:
        files: that hold it.
        parse: from a number and its record to image and label.
        buffer: records that are shuffled among each other.
    """

    files: Files
    parse: Parse
    buffer: int

    def examples(self, order: Order) -> tf.data.Dataset:
        """See `Split`; the records before the order's first are read over."""
        first = order.start * order.batch
        epoch = first // self.count
        stream = tf.data.Dataset.range(epoch, LAST_BATCH).flat_map(lambda number: self._epoch(order, number))
        stream = stream.enumerate(start=epoch * self.count).skip(first - epoch * self.count)
        place = order.local
        return self._parsed(
            stream.filter(
                lambda position, _: (position % order.batch >= place.start) & (position % order.batch < place.stop)
            )
        )

    def once(self, *, shard: int = 0, shards: int = 1) -> tf.data.Dataset:
        """See `Split`."""
        stream = self.files.stream(None).filter(lambda index, _: index % shards == shard)
        return self._parsed(stream.map(lambda index, record: (index, (index, record))))

    def _epoch(self, order: Order, number: tf.Tensor) -> tf.data.Dataset:
        if not order.shuffle:
            return self.files.stream(None)
        seed = tf.constant(np.uint64(order.seed).astype(np.int64))
        return _shuffled(self.files.stream(tf.stack([seed, number])), self.buffer, (seed, number + 1))

    def _parsed(self, stream: tf.data.Dataset) -> tf.data.Dataset:
        return stream.map(
            lambda position, numbered: {
                "position": position,
                "index": numbered[0],
                **self.parse(numbered[0], numbered[1]),
            },
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
