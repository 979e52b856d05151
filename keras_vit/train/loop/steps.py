"""Run the compiled training step on the batches of a data set."""

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_vit.train.data.dataset_files import name_bad_image
from keras_vit.train.data.pipeline import ModelInput, training_batches
from keras_vit.train.data.sources import Data, Order
from keras_vit.train.data.split import Split
from keras_vit.train.step import strategies
from keras_vit.train.step.state import TrainState
from keras_vit.train.step.train_step import make_train_step


class TrainingSteps:
    """Training steps that update `state`, which was created in the strategy's scope; its step is the first to take.

    The batches depend on nothing but the recipe's seed and the number of the step.
    """

    def __init__(self, state: TrainState, data: Data, *, strategy: tf.distribute.Strategy) -> None:
        self._recipe = state.recipe
        self._model_input = ModelInput.from_model(state.model)
        self._split = training_split(data)
        self._task = data.task
        self._start = int(state.step.numpy())
        self._strategy = strategy
        self.has_workers = strategies.has_workers(strategy)
        self._train_step = make_train_step(state, strategy)

    def take(self, done: int, count: int, *, stop: bool) -> Any:
        """Take `count` steps after the first `done`; return their metrics. A ValueError names an image that is lost."""
        order = Order(batch=self._recipe.batch_size, seed=self._recipe.seed, start=done)
        with name_bad_image(lambda: self._split.first_bad(order, batches=count)):
            return self._train_step(self._batches, tf.constant(count), tf.constant(float(stop)))

    @functools.cached_property
    def _batches(self) -> Iterator[Any]:
        return iter(self._strategy.distribute_datasets_from_function(self._batches_of_worker))

    def _batches_of_worker(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        local = context.num_replicas_in_sync // context.num_input_pipelines
        order = Order(
            batch=self._recipe.batch_size,
            seed=self._recipe.seed,
            start=self._start,
            replicas=context.num_replicas_in_sync,
            first_replica=context.input_pipeline_id * local,
            local_replicas=local,
        )
        return training_batches(self._split, self._recipe, model_input=self._model_input, task=self._task, order=order)


def training_split(data: Data) -> Split:
    """Return the training images of a data set, or raise a ValueError."""
    if data.train is None:
        raise ValueError(f"{data.name} has no training images")
    return data.train
