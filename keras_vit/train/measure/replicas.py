"""Run a model on every replica and worker of a strategy, over each image of a split once."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_vit.dense.model import DenseModel
from keras_vit.model.task import Task
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train.data.dataset_files import name_bad_image
from keras_vit.train.data.order import Order
from keras_vit.train.data.pipeline import ModelInput, evaluation_batches
from keras_vit.train.data.split import Split
from keras_vit.train.step import strategies

Batch = dict[str, Any]


def choose_strategy(model: keras.Model, strategy: str | tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Return the strategy for a name; "auto" is the one that the model was created with, if there is one."""
    if not isinstance(strategy, str):
        return strategy
    values = [weight.value for weight in model.weights] if strategy == "auto" else []
    owners = [value.distribute_strategy for value in values if isinstance(value, tf.distribute.DistributedValues)]
    return owners[0] if owners else strategies.strategy(strategy)


def replicate(model: keras.Model, strategy: tf.distribute.Strategy) -> keras.Model:
    """Return the model itself if the strategy has its weights on every replica, or else a copy that has."""
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

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return evaluation_batches(
            split,
            only=only,
            shard=(context.input_pipeline_id, context.num_input_pipelines),
            multiple=context.num_replicas_in_sync // context.num_input_pipelines,
            batch_size=batch_size,
            model_input=model_input,
            task=task,
        )

    with name_bad_image(lambda: split.first_bad(Order(batch=1, shuffle=False), batches=split.count)):
        yield from strategy.distribute_datasets_from_function(of_worker)
    if split.num_skipped == split.count:
        raise ValueError(f"None of the {split.count:,} images of {split.name} can be decoded.")
    split.warn_skipped()


def sum_replicas(strategy: tf.distribute.Strategy, function: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
    """Return the compiled function from a distributed batch to the sum of function(batch) over all replicas."""
    return tf.function(lambda batch: strategy.reduce("SUM", strategy.run(function, args=(batch,)), axis=None))


def collect_images(
    strategy: tf.distribute.Strategy, function: Callable[[Batch], Sequence[Any]]
) -> Callable[[Iterable[Any]], list[np.ndarray]]:
    """Return a function from distributed batches to the arrays of function(batch) and the indices, in their order."""

    def on_replica(batch: Batch) -> list[Any]:
        context = tf.distribute.get_replica_context()
        tensors = (*function(batch), batch["index"], batch["weight"])
        # What comes with the batch itself may be on no device yet, and all_gather asks for one.
        return [context.all_gather(tf.identity(tensor), axis=0) for tensor in tensors]

    compiled = tf.function(lambda batch: strategy.run(on_replica, args=(batch,)))

    def collect(batches: Iterable[Any]) -> list[np.ndarray]:
        found = [[strategy.experimental_local_results(each)[0] for each in compiled(batch)] for batch in batches]
        *arrays, indices, weights = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.argsort(indices, kind="stable")
        order = order[weights[order] > 0]  # without the padding of the last batches
        return [array[order] for array in (*arrays, indices)]

    return collect
