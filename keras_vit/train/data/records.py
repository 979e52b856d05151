"""Read the records of a prepared tensorflow-datasets split.

ArrayRecord files are read by index; TFRecord files all at once if they are small enough for memory, otherwise from
front to back, where (seed, epoch) determines the order of the files and the shuffle buffer. A run that resumes within
such an epoch skips the records it has already used, without decoding them. To avoid that, prepare large data sets as
ArrayRecord (`tfds build NAME --file_format=array_record`).
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit._util.text import error_reason
from keras_vit._util.tfrecords import count_records
from keras_vit.train.data.dataset_files import READ_ERRORS
from keras_vit.train.data.order import MAX_BATCHES, Order
from keras_vit.train.data.split import LABELS_AT_ONCE, Example, Indices, RandomAccess, Split

Parse = Callable[[tf.Tensor, tf.Tensor], Example]  # from the index and the record of an example
PREPARE_AGAIN = "Prepare the data set again"
INTERLEAVED_FILES = 16  # so that one shuffle buffer holds records of many files


class RecordFiles:
    """The files of a split in order; the index of an example counts through all of them.

    `instructions` are tensorflow-datasets' FileInstruction for each file: filename, skip, take.
    """

    def __init__(self, instructions: Sequence[Any]) -> None:
        self.instructions = instructions
        self._takes = np.array([each.take for each in instructions], np.int64)
        self.count = int(self._takes.sum())  # examples in all files

    def stream(self, seed: tf.Tensor | None) -> tf.data.Dataset:
        """Return (index, TFRecord) of every example: file after file, or interleaved in an order given by a seed."""
        names, skips = [str(each.filename) for each in self.instructions], [each.skip for each in self.instructions]
        columns = (names, np.array(skips, np.int64), self._takes, np.cumsum(self._takes) - self._takes)
        if seed is None:
            return tf.data.Dataset.from_tensor_slices(columns).flat_map(_read_file)
        order = tf.random.experimental.stateless_shuffle(tf.range(len(names)), seed)
        files = tf.data.Dataset.from_tensor_slices(tuple(tf.gather(column, order) for column in columns))
        return files.interleave(_read_file, cycle_length=INTERLEAVED_FILES, num_parallel_calls=tf.data.AUTOTUNE)

    def check(self, parse: Parse) -> None:
        """Read all examples of TFRecords; raise a ValueError that names the first damaged file."""
        for each in self.instructions:
            _check_file(os.fsencode(each.filename), each.skip + each.take)
        index = 0
        try:
            for _ in self.stream(None).map(parse):
                index += 1
        except READ_ERRORS as error:
            raise ValueError(self.damage(index, error)) from error

    def damage(self, index: int, error: Exception) -> str:
        """Return the message about an example that cannot be read."""
        number = int(np.searchsorted(np.cumsum(self._takes), index, side="right"))
        filename = str(self.instructions[number].filename)
        reason = error_reason(getattr(error, "message", None) or str(error))
        return f"{filename!r}: example {index} of the split cannot be read: {reason}. {PREPARE_AGAIN}"


def _read_file(filename: tf.Tensor, skip: tf.Tensor, take: tf.Tensor, first: tf.Tensor) -> tf.data.Dataset:
    indices = tf.data.Dataset.range(first, first + take)
    filename = tf.numpy_function(_check_file, [filename, skip + take], tf.string, stateful=False)
    filename = tf.ensure_shape(filename, ())
    return tf.data.Dataset.zip(indices, tf.data.TFRecordDataset(filename).skip(skip).take(take))


def _check_file(filename: bytes, least: int) -> bytes:
    """Raise a ValueError if a file of TFRecords is cut off or has fewer records than `least`; return its name."""
    path = os.fsdecode(filename)
    try:
        count, problem = count_records(path)
    except (OSError, tf.errors.OpError) as error:
        raise ValueError(f"{path!r} cannot be read: {error_reason(str(error))}. {PREPARE_AGAIN}") from None
    if problem is None and count < least:
        problem = f"{path!r} has {count:,} records, and not {least:,} as the data set states"
    if problem:
        raise ValueError(f"{problem}. {PREPARE_AGAIN}")
    return filename


def in_memory_split(name: str, files: RecordFiles, parse: Parse) -> RandomAccess:
    """Return a split of TFRecords that is read into memory on first use."""

    @functools.cache
    def load_records() -> tf.Tensor:
        return tf.constant(np.array([record for _, record in files.stream(None).as_numpy_iterator()], object))

    def make_reader() -> Callable[[tf.Tensor], Example]:
        records = load_records()
        return lambda index: parse(index, records[index])

    return RandomAccess(name=name, count=files.count, make_reader=make_reader, check=lambda: files.check(parse))


def array_record_split(name: str, files: RecordFiles, parse: Parse) -> RandomAccess:
    """Return a split of ArrayRecords, which are read by index."""

    def make_reader() -> Callable[[tf.Tensor], Example]:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        source = ArrayRecordDataSource(files.instructions)

        def read_record(number: np.int64) -> bytes:
            try:
                return bytes(source[int(number)])
            except RuntimeError as error:
                raise ValueError(files.damage(int(number), error)) from None

        def read(index: tf.Tensor) -> Example:
            record = tf.numpy_function(read_record, [index], tf.string, stateful=False)
            return parse(index, tf.ensure_shape(record, ()))

        return read

    return RandomAccess(name=name, count=files.count, make_reader=make_reader)


@dataclass(frozen=True, kw_only=True)
class RecordStream(Split):
    """A split of TFRecords too large for memory."""

    files: RecordFiles
    parse: Parse
    buffer: int  # number of records in the shuffle buffer

    def examples(self, order: Order) -> tf.data.Dataset:
        """See `Split`; records before the order's first are read and skipped."""
        first = order.start * order.batch
        epoch = first // self.count
        stream = tf.data.Dataset.range(epoch, MAX_BATCHES).flat_map(lambda number: self._epoch(order, number))
        stream = stream.enumerate(start=epoch * self.count).skip(first - epoch * self.count)

        def is_local(position: tf.Tensor, _: Any) -> tf.Tensor:
            place = position % order.batch
            return (place >= order.local.start) & (place < order.local.stop)

        return self._parse_all(stream.filter(is_local))

    def iterate_once(self, *, only: Indices | None = None, shard: int = 0, shards: int = 1) -> tf.data.Dataset:
        """See `Split`."""
        stream = self.files.stream(None)
        if only is None:
            stream = stream.filter(lambda index, _: index % shards == shard)
        else:
            is_chosen = np.zeros(self.count, bool)
            is_chosen[np.unique(only)[shard::shards]] = True
            mask = tf.constant(is_chosen)
            stream = stream.filter(lambda index, _: mask[index])
        return self._parse_all(stream.map(lambda index, record: (index, (index, record))))

    def labels(self) -> np.ndarray:
        """See `Split`."""
        stream = self.iterate_once().map(lambda example: example["label"]).batch(LABELS_AT_ONCE)
        return np.concatenate(list(stream.as_numpy_iterator()))

    def _epoch(self, order: Order, number: tf.Tensor) -> tf.data.Dataset:
        if not order.shuffle:
            return self.files.stream(None)
        seed = tf.constant(np.uint64(order.seed).astype(np.int64))
        stream = self.files.stream(tf.stack([seed, number]))
        variant = tf.raw_ops.ShuffleDatasetV3(  # `stream.shuffle` adds TensorFlow's global seed
            input_dataset=tf.data.experimental.to_variant(stream),
            buffer_size=tf.constant(self.buffer, tf.int64),
            seed=seed,
            seed2=number + 1,  # never 0, because (0, 0) would mean a random shuffle
            seed_generator=tf.raw_ops.DummySeedGenerator(),
            reshuffle_each_iteration=False,
            output_types=[tf.int64, tf.string],
            output_shapes=[[], []],
        )
        return tf.data.experimental.from_variant(variant, stream.element_spec)

    def _parse_all(self, stream: tf.data.Dataset) -> tf.data.Dataset:
        def parse(position: tf.Tensor, indexed: tuple[tf.Tensor, tf.Tensor]) -> Example:
            index, record = indexed
            return {"position": position, "index": index, **self.renumbered(self.parse(index, record))}

        return stream.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
