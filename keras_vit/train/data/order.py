"""Which examples a step takes: a function of seed and step alone, so that stopping and going on changes nothing.

A run reads an endless sequence of positions 0, 1, 2, ... Position `p` belongs to epoch `p // count`, and the example
there is image number `p % count` of that epoch's permutation, which follows from (seed, epoch). Batch `b` of a step
holds the positions `b * batch` to `(b + 1) * batch`; replica `r` of `n` has the `r`-th of `n` equal pieces of it.
Nothing is kept between steps, and no worker needs to know what another one reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

# The permutation is of 32-bit numbers (tensorflow/core/kernels/random_index_shuffle.cc); beyond, it repeats itself.
MOST_EXAMPLES = 2**31 - 1
LAST_BATCH = 2**40  # more than anyone trains, and times a batch still an int64


@dataclass(frozen=True, kw_only=True)
class Order:
    """The part of the endless sequence that one worker reads.

    Args:
        batch: examples a step on all replicas together.
        seed: of the permutations, 0 to 2**64 - 1.
        start: the batch to begin with: as many as have been trained on.
        replicas: on all workers together; they divide the batch.
        first_replica: the number of this worker's first replica.
        local_replicas: how many replicas this worker has.
        shuffle: False is the order of the examples' numbers, in every epoch.

    Raises:
        ValueError: for replicas that do not divide the batch, or a number out of its range.
    """

    batch: int
    seed: int = 0
    start: int = 0
    replicas: int = 1
    first_replica: int = 0
    local_replicas: int = 1
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.batch < 1 or self.replicas < 1 or self.batch % self.replicas:
            raise ValueError(
                "Every replica takes the same share of a batch. Expected: a batch size that is a multiple of the"
                f" number of replicas. Received: batch {self.batch}, replicas {self.replicas}"
            )
        if not (0 <= self.first_replica < self.first_replica + self.local_replicas <= self.replicas):
            raise ValueError(
                f"Expected replicas among 0..{self.replicas - 1}, at least one."
                f" Received: first_replica {self.first_replica}, local_replicas {self.local_replicas}"
            )
        if not (0 <= self.start < LAST_BATCH and 0 <= self.seed < 2**64):
            raise ValueError(
                f"Expected: start from 0 to 2**40 - 1, seed from 0 to 2**64 - 1. Received: {self.start=}, {self.seed=}"
            )

    @property
    def replica_batch(self) -> int:
        """Examples a step on one replica."""
        return self.batch // self.replicas

    @property
    def local(self) -> range:
        """Where in a batch this worker's examples are."""
        first = self.first_replica * self.replica_batch
        return range(first, first + self.local_replicas * self.replica_batch)


def positions(order: Order, count: int) -> tf.data.Dataset:
    """This worker's positions, and the number of the example at each.

    Args:
        order: which positions.
        count: examples in an epoch, 1 to 2**31 - 1.

    Returns:
        an endless dataset of (position, index), int64 scalars; 0 <= index < count.
    """

    def of_batch(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        position = number * order.batch + tf.range(order.local.start, order.local.stop, dtype=tf.int64)
        index = position % count
        if order.shuffle:
            index = _permuted(index, epoch=position // count, seed=order.seed, count=count)
        return position, index

    # A batch at a time: calling this for every single position takes three times as long.
    return tf.data.Dataset.range(order.start, LAST_BATCH).map(of_batch).unbatch()


def _permuted(index: tf.Tensor, *, epoch: tf.Tensor, seed: int, count: int) -> tf.Tensor:
    """Each index's place in the permutation of its own epoch; vectors."""
    words = (seed % 2**32, seed >> 32)  # the operation takes the low 32 bits of each number of its seed
    low, high = (tf.fill(tf.shape(epoch), tf.constant(word, tf.int64)) for word in words)
    # tf.random.experimental.index_shuffle, which takes two numbers as a seed, does not take a seed for each index.
    return tf.raw_ops.RandomIndexShuffle(
        index=index, seed=tf.stack([low, high, epoch], axis=1), max_index=tf.constant(count - 1, tf.int64), rounds=4
    )
