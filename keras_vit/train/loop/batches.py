"""Training batches of a run from any step on, distributed over its replicas."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_vit.train.data import pipeline
from keras_vit.train.data.sources import Data, Order
from keras_vit.train.data.split import Split
from keras_vit.train.loop.state import TrainState


class TrainingBatches:
    """Endless batches of augmented images, which follow from the recipe's seed and the step alone.

    Args:
        data: its training images are read.
        state: its recipe and its model's config are used.
        start: number of steps done.
        strategy: of tf.distribute.

    Raises:
        ValueError: The data have no training images.
    """

    def __init__(self, data: Data, state: TrainState, *, start: int, strategy: tf.distribute.Strategy) -> None:
        self._data, self._split = data, training_split(data)
        self._recipe, self._config = state.recipe, state.model.config
        self._start, self._strategy = start, strategy

    @functools.cached_property
    def iterator(self) -> Iterator[Any]:
        """Argument of the training step. The data are first read when it is."""
        return iter(self._strategy.distribute_datasets_from_function(self._of_worker))

    def _of_worker(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """Return the batches of one worker, in pieces for its replicas."""
        local = context.num_replicas_in_sync // context.num_input_pipelines
        order = Order(
            batch=self._recipe.batch_size,
            seed=self._recipe.seed,
            start=self._start,
            replicas=context.num_replicas_in_sync,
            first_replica=context.input_pipeline_id * local,
            local_replicas=local,
        )
        return pipeline.training_batches(
            self._split,
            self._recipe,
            image_size=self._config.size,
            num_channels=self._config.num_channels,
            preprocessing=self._config.preprocessing,
            num_classes=self._data.num_classes,
            order=order,
        )

    @contextlib.contextmanager
    def naming_bad_images(self, done: int, count: int) -> Iterator[None]:
        """Name the image where TensorFlow only says that one cannot be decoded.

        Args:
            done: number of steps done before the block.
            count: number of steps that the block takes.

        Raises:
            ValueError: An image of these steps cannot be decoded.
        """
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            order = Order(batch=self._recipe.batch_size, seed=self._recipe.seed, start=done)
            bad = self._split.first_bad(order, batches=count)
            if bad is None:
                raise
            raise ValueError(f"Step {done + 1}: {bad} cannot be decoded. Repair or remove it.") from error


def training_split(data: Data) -> Split:
    """Return the training images of a data set.

    Raises:
        ValueError: There are none.
    """
    if data.train is None:
        raise ValueError(f"{data.name} has no training images")
    return data.train
