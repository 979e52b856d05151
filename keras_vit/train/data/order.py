"""Compute the examples of a training step from the seed and the step alone, so that training can resume exactly.

A run reads an endless sequence of positions 0, 1, 2, ... Position `p` belongs to epoch `p // count`. Its example is
number `p % count` of the epoch's permutation, which depends on (seed, epoch). Batch `b` has the positions from
`b * batch` to `(b + 1) * batch`; replica `r` of `n` reads the `r`-th of its `n` equal parts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

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
    """Return the worker's endless stream of (position, index), int64 scalars; an epoch has `count` examples.

    `replace` maps the indices of a batch to those that are read in their place.
    """

    def batch_positions(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        position = number * order.batch + tf.range(order.local.start, order.local.stop, dtype=tf.int64)
        index = position % count
        if order.shuffle:
            index = _permute(index, epoch=position // count, seed=order.seed, count=count)
        return position, replace(index)

    # A batch at a time: one call per position takes three times as long.
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
