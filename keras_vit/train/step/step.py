"""One training step, the same on one device, many, several machines and TPUs.

Keras' `fit` clips before it reduces, repeats dropout masks on every replica and does not accumulate under
tf.distribute. Here: gradients of micro-batches are summed, then summed over replicas once, then clipped by their global
norm, then applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_vit.model.layers.fusion import compiled_by
from keras_vit.train._recipe import Recipe
from keras_vit.train.step import pieces
from keras_vit.train.step.objective import Objective
from keras_vit.train.step.optimizer import Optimizer, clip, update_variables

FIGURES = ("loss", "accuracy", "gradient_norm", "stop")  # what a call of the step returns, in this order


def make(
    recipe: Recipe,
    *,
    model: Any,
    objective: Objective,
    variables: Sequence[tf.Variable],
    optimizer: Optimizer,
    averages: Sequence[tf.Variable],
    step: tf.Variable,
    strategy: tf.distribute.Strategy,
) -> Callable[[Any, Any, Any], Any]:
    """The training step, to be called with an iterator over distributed batches.

    Args:
        recipe: batch_size, accumulation, clip_norm, ema_decay, seed, xla.
        model: what `objective` calls; made in the strategy's scope, as all variables here.
        objective: gives the loss of every image.
        variables: what is trained.
        optimizer: of those variables, in their order.
        averages: their exponential moving averages in the same order, or nothing.
        step: int64, number of steps done.
        strategy: of tf.distribute.

    Returns:
        a function of (iterator, number of steps int32, stop float32). Every replica adds its stop, so that all
        workers learn in the same step that one has been asked to stop. It gives float32 (4,), see FIGURES: loss and
        accuracy are means over the images of all steps; gradient_norm, before clipping, over the steps; stop a sum.
    """

    def gradients(batch: dict[str, Any], seed: Any) -> tuple[list[Any], Any]:
        with compiled_by(compiler):
            with tf.GradientTape() as tape:
                losses, figures = objective(model, batch, seed)
                loss = tf.reduce_sum(losses) / recipe.batch_size
            sums = tf.stack([loss, tf.reduce_sum(figures["accuracy"]) / recipe.batch_size])
            return tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO), sums

    local = accumulated(gradients, recipe.accumulation)
    # A collective cannot stand inside of XLA's program: with several replicas XLA has what one does by itself.
    several = strategy.num_replicas_in_sync > 1
    extent = compiled(recipe.xla, strategy)
    compiler = pieces.compiler() if extent == "pieces" else None
    if several and extent == "step":
        local = tf.function(local, jit_compile=True)

    def on_replica(batch: dict[str, Any], stop: Any) -> Any:
        context = tf.distribute.get_replica_context()
        now = tf.convert_to_tensor(step)
        # With several workers TensorFlow forgets how many images a batch has: it may not be the same on all.
        size = recipe.batch_size // strategy.num_replicas_in_sync
        batch = {name: tf.ensure_shape(value, (size, *value.shape[1:])) for name, value in batch.items()}
        grads, sums = local(batch, seed_of(recipe, now, context))
        # identity: what is reduced must have been computed on the replica.
        *grads, sums, stopping = context.all_reduce("SUM", [*grads, sums, tf.identity(stop)])
        norm = update(grads, now)
        return tf.stack([sums[0], sums[1], norm, stopping])

    def update(grads: list[Any], now: Any) -> Any:
        grads, norm = clip(grads, recipe.clip_norm)
        optimizer.apply(grads, now)
        averaged = zip(averages, variables if averages else [], strict=True)
        update_variables([(average, _towards(recipe), (v,)) for average, v in averaged])
        return norm

    if not several and extent == "step":
        on_replica = tf.function(on_replica, jit_compile=True)
    if not several and extent == "pieces":
        update = tf.function(update, jit_compile=True)

    @tf.function
    def steps(iterator: Any, count: Any, stop: Any) -> Any:
        total = tf.zeros(len(FIGURES))
        for _ in tf.range(count):
            figures = strategy.run(on_replica, args=(next(iterator), stop))
            total += strategy.experimental_local_results(figures)[0]
            step.assign_add(1)
        return total / tf.cast(count, tf.float32)

    return steps


def compiled(xla: bool | str, strategy: tf.distribute.Strategy) -> str:
    """What XLA compiles: the whole "step", its "pieces" between products of matrices, or "nothing"."""
    if isinstance(strategy, tf.distribute.TPUStrategy) or not xla:  # a TPU compiles everything anyway
        return "nothing"
    return "pieces" if xla == "auto" and not tf.config.list_logical_devices("GPU") else "step"


def accumulated(gradients: Callable[..., tuple[list[Any], Any]], micro_batches: int) -> Callable[..., Any]:
    """The same sums, computed over one micro-batch after the other: the batch's memory is that of one of them."""
    if micro_batches == 1:
        return gradients

    def whole(batch: dict[str, Any], seed: Any) -> tuple[list[Any], Any]:
        parts = {k: tf.reshape(v, (micro_batches, v.shape[0] // micro_batches, *v.shape[1:])) for k, v in batch.items()}

        def of(k: Any) -> tuple[list[Any], Any]:
            part = {name: value[k] for name, value in parts.items()}
            return gradients(part, tf.random.experimental.stateless_fold_in(seed, k))

        def add(k: Any, sums: Any) -> tuple[Any, Any]:
            return k + 1, tf.nest.map_structure(tf.add, sums, of(k))

        return tf.while_loop(lambda k, _: k < micro_batches, add, (tf.constant(1), of(tf.constant(0))))[1]

    return whole


def seed_of(recipe: Recipe, step: Any, context: Any) -> Any:
    """The seed of this replica in this step, int32 (2,)."""
    seed = tf.constant([recipe.seed % 2**31, 0], tf.int32)
    seed = tf.random.experimental.stateless_fold_in(seed, tf.cast(step, tf.int32))
    return tf.random.experimental.stateless_fold_in(seed, context.replica_id_in_sync_group)


def _towards(recipe: Recipe) -> Callable[[tf.Variable, Any], Any]:
    def update(average: tf.Variable, value: Any) -> Any:
        return average.assign_sub((1 - (recipe.ema_decay or 0.0)) * (average - value))

    return update
