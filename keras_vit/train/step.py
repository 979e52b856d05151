"""The training step: state, loss, gradients, sums over replicas, update.

Gradients of micro-batches are summed, summed over replicas, clipped by their global norm, then applied. Keras' `fit`
clips before the sum, repeats dropout masks on every replica, and does not accumulate under tf.distribute.
"""

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from keras_vit.model.layers.runtime import Compiler, fuse_with
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train.objective import Batch, Objective
from keras_vit.train.optimizer import (
    Optimizer,
    clip,
    enable_lora,
    is_of_head,
    trained_variables,
    update_variables,
)

# Gradients in the order of the variables; float32 (n,), loss and metrics as shares of the whole batch's means.
Gradients: TypeAlias = tuple[list[Any], Any]
INTERRUPTED = "The step was interrupted"


class Interrupt(enum.IntEnum):
    """Where a running step ends with an error, because the run is to stop."""

    NOWHERE = 0
    BEFORE_MICRO_BATCH = 1  # the next one
    BEFORE_UPDATE = 2


class TrainState:
    """Everything that changes during training. Create it in the strategy's scope, like the model."""

    def __init__(self, recipe: Recipe, model: VisionTransformer, objective: Objective, *, total_steps: int) -> None:
        self.recipe = recipe
        self.model = model
        self.objective = objective
        self.total_steps = total_steps
        enable_lora(recipe, self.model)
        trained = trained_variables(recipe, objective.network)
        self.trained = [v.value for v in trained]
        self.trains_head = any(map(is_of_head, trained))
        self.optimizer = Optimizer(
            recipe,
            self.trained,
            [v.path for v in trained],
            total_steps=total_steps,
            warmup=recipe.resolved_warmup(total_steps),
            num_layers=model.config.num_layers,
        )
        self.averages = {  # path of a trained variable -> its moving average
            v.path: tf.Variable(tf.convert_to_tensor(v.value), trainable=False, dtype=v.value.dtype)
            for v in (trained if recipe.ema_decay else ())
        }
        self.strategy = tf.distribute.get_strategy()
        self.step = tf.Variable(  # number of steps done
            0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, name="step"
        )
        self.interrupt = tf.Variable(  # an Interrupt
            0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, name="interrupt"
        )
        # 1 while a step updates the other variables; None if that cannot be told.
        has_replicas = tf.distribute.has_strategy() or is_whole(recipe, self.strategy)
        self.updating = None if has_replicas else tf.Variable(0, dtype=tf.int64, trainable=False, name="updating")

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """All variables of a checkpoint, by name."""
        return {
            "step": self.step,
            **{f"weights/{v.path}": v.value for v in self.objective.network.weights},
            **{f"optimizer/{name}": slot for name, slot in self.optimizer.slots.items()},
            **{f"average/{name}": average for name, average in self.averages.items()},
        }

    def is_finite(self) -> bool:
        """Whether every number that a checkpoint would hold is finite."""
        return all(bool(tf.reduce_all(tf.math.is_finite(v))) for v in self.variables.values() if v.dtype.is_floating)

    def copy_to(self, model: VisionTransformer) -> None:
        """Copy the moving averages, or without them the weights, into a model of the same config, without LoRA."""
        values = {v.path: tf.convert_to_tensor(self.averages.get(v.path, v.value)) for v in self.model.weights}
        for layer in self.model._flatten_layers():
            if getattr(layer, "lora_enabled", False):
                update = values.pop(layer.lora_kernel_a.path) @ values.pop(layer.lora_kernel_b.path)
                values[layer._kernel.path] += layer.lora_alpha / layer.lora_rank * update
        for target, value in zip(model.weights, values.values(), strict=True):
            target.assign(value.numpy())


def make_train_step(state: TrainState, strategy: tf.distribute.Strategy) -> Callable[[Any, Any, Any], Any]:
    """Compile the training step of a state that was created in the strategy's scope.

    The returned function takes an iterator over distributed batches, a number of steps (int32) and a request to stop
    (float32, 0 or 1). It returns what `metric_names` lists, float32: means over all steps, gradient_norm before
    clipping. "stop" is the sum of all replicas' requests, so that every worker learns of them after the same step.
    """
    replicas = strategy.num_replicas_in_sync
    scope = jit_scope(state.recipe.xla, strategy)
    compiler = piece_compiler() if scope == "pieces" else None
    micro_batches = int(state.recipe.accumulation)

    def gradients(batch: Batch, seed: Any) -> Gradients:
        compute = functools.partial(_gradients, state, compiler)
        zeros = [tf.zeros_like(v) for v in state.trained], tf.zeros(1 + len(state.objective.metrics))
        return accumulate(compute, batch, seed, count=micro_batches, zeros=zeros, interrupt=state.interrupt)

    if scope == "step" and replicas > 1:  # a collective operation cannot be part of an XLA program
        gradients = tf.function(gradients, jit_compile=True, autograph=False)
    apply: Callable[[list[Any], Any], Any] = functools.partial(_apply, state)
    if scope == "pieces" and replicas == 1:
        apply = tf.function(apply, jit_compile=True, autograph=False)
    replica_step = functools.partial(_replica_step, state, replicas, gradients, apply)
    if scope == "step" and replicas == 1:
        replica_step = tf.function(replica_step, jit_compile=True, autograph=False)

    @tf.function
    def train_step(iterator: Any, count: Any, stop: Any) -> Any:
        total = tf.zeros(len(metric_names(state.objective.metrics)))
        for _ in tf.range(count):
            metrics = strategy.run(replica_step, args=(next(iterator), stop))
            total += strategy.experimental_local_results(metrics)[0]
            with tf.control_dependencies([total]):  # a step that was interrupted does not count
                state.step.assign_add(1)
        return total / tf.cast(count, tf.float32)

    return train_step


@tf.autograph.experimental.do_not_convert  # it has no loop, and is traced faster
def _replica_step(
    state: TrainState,
    replicas: int,
    local_gradients: Callable[[Batch, Any], Gradients],
    apply: Callable[..., Any],
    batch: Batch,
    stop: Any,
) -> Any:
    """Take one step on one replica: compute the gradients, sum them over the replicas, apply them."""
    context = tf.distribute.get_replica_context()
    step = tf.convert_to_tensor(state.step)
    # With several workers TensorFlow does not know the static batch size, because it could differ between them.
    size = state.recipe.batch_size // replicas
    batch = {name: tf.ensure_shape(value, (size, *value.shape[1:])) for name, value in batch.items()}
    gradients, sums = local_gradients(batch, replica_seed(state.recipe, step, context.replica_id_in_sync_group))
    # tf.identity, because all_reduce needs tensors that were computed on the replica.
    *gradients, sums, stop = context.all_reduce("SUM", [*gradients, sums, tf.identity(stop)])
    with _update_begins(state, gradients):
        norm = apply(gradients, step)
    return tf.stack([*tf.unstack(sums), norm, stop])


@contextlib.contextmanager
def _update_begins(state: TrainState, gradients: list[Any]) -> Iterator[None]:
    """Mark the update as begun, then abort the step if it was interrupted; in this order.

    So whoever interrupts it, and then reads that no update has begun, knows that none will.
    """
    if state.updating is None:
        yield
        return
    with tf.control_dependencies(gradients):
        updating = state.updating.assign(1)
    with tf.control_dependencies([updating]):
        is_allowed = tf.debugging.Assert(tf.less(state.interrupt, Interrupt.BEFORE_UPDATE), [INTERRUPTED])
    with tf.control_dependencies([is_allowed]):
        yield


def replica_seed(recipe: Recipe, step: Any, replica: Any) -> Any:
    """Seed of a replica in a step, int32 (2,). Both are counted from 0."""
    seed = tf.constant([recipe.seed % 2**31, 0], tf.int32)
    seed = tf.random.experimental.stateless_fold_in(seed, tf.cast(step, tf.int32))
    return tf.random.experimental.stateless_fold_in(seed, replica)


def accumulate(
    gradients: Callable[[Batch, Any], Gradients],
    batch: Batch,
    seed: Any,
    *,
    count: int,
    zeros: Gradients,
    interrupt: Any = Interrupt.NOWHERE,
) -> Gradients:
    """Sum the gradients of `count` micro-batches, one at a time in memory; `count` divides the number of images.

    `zeros` have the shapes and dtypes of what `gradients` returns. Outside of XLA, a variable `interrupt` that is no
    longer 0 before a micro-batch ends the step with an error.
    """
    if count == 1:
        return gradients(batch, seed)
    split = {name: tf.reshape(x, (count, x.shape[0] // count, *x.shape[1:])) for name, x in batch.items()}

    def micro_batch_gradients(k: Any) -> Gradients:
        return gradients({name: x[k] for name, x in split.items()}, tf.random.experimental.stateless_fold_in(seed, k))

    def add(k: Any, sums: Gradients) -> tuple[Any, Gradients]:
        is_allowed = tf.debugging.Assert(tf.equal(interrupt, Interrupt.NOWHERE), [INTERRUPTED])
        with tf.control_dependencies([is_allowed]):
            number = tf.identity(k)
        return k + 1, tf.nest.map_structure(tf.add, sums, micro_batch_gradients(number))

    # One at a time, or TensorFlow computes several micro-batches at once, each with its own activations.
    return tf.while_loop(lambda k, _: k < count, add, (tf.constant(0), zeros), parallel_iterations=1)[1]


def _gradients(state: TrainState, compiler: Compiler | None, batch: Batch, seed: Any) -> Gradients:
    """Compute the gradients of one micro-batch's share of the loss."""
    with fuse_with(compiler):
        with tf.GradientTape() as tape:
            losses, metrics = state.objective.losses(state.objective.network, batch, seed)
            loss = tf.reduce_sum(losses) / state.recipe.batch_size
        means = [tf.reduce_sum(metrics[name]) / state.recipe.batch_size for name in state.objective.metrics]
        sums = tf.stack([loss, *means])
        zero = tf.UnconnectedGradients.ZERO
        return tape.gradient(loss, state.trained, unconnected_gradients=zero), sums


def _apply(state: TrainState, gradients: list[Any], step: Any) -> Any:
    """Clip the gradients, update variables and averages; return the global norm before clipping."""
    gradients, norm = clip(gradients, state.recipe.clip_norm)
    state.optimizer.apply(gradients, step)
    if decay := state.recipe.ema_decay:
        pairs = zip(state.averages.values(), state.trained, strict=True)
        update_variables([(average, functools.partial(_move_average, 1 - decay), (value,)) for average, value in pairs])
    return norm


def _move_average(share: float, average: tf.Variable, value: Any) -> Any:
    return average.assign_sub(share * (average - value))


def metric_names(metrics: Sequence[str]) -> tuple[str, ...]:
    """Names of the values that a call of the training step returns, in order; `metrics` are the task's."""
    return ("loss", *metrics, "gradient_norm", "stop")


def is_whole(recipe: Recipe, strategy: tf.distribute.Strategy) -> bool:
    """Whether no step can end early: programs of XLA or of a TPU are one piece, and workers end after the same step."""
    is_program = jit_scope(recipe.xla, strategy) == "step" or isinstance(strategy, tf.distribute.TPUStrategy)
    return is_program or strategies.has_workers(strategy)


def jit_scope(xla: bool | str, strategy: tf.distribute.Strategy) -> Literal["step", "pieces", "nothing"]:
    """Part that XLA compiles by a recipe's `xla`: the step, the pieces between matrix products, or nothing."""
    if isinstance(strategy, tf.distribute.TPUStrategy) or not xla:  # a TPU compiles everything anyway
        return "nothing"
    return "pieces" if xla == "auto" and not tf.config.list_logical_devices("GPU") else "step"


def piece_compiler() -> Compiler:
    """Make a function that compiles a function of tensors and its gradient, once for the same settings.

    Only the inputs of the function are kept for gradient(upstream, *tensors), with keeps_first=False without the first;
    without a gradient it is computed again.
    """

    @functools.cache
    def compiled(
        function: Callable[..., Any],
        *,
        gradient: Callable[..., Any] | None = None,
        keeps_first: bool = True,
        **settings: Any,
    ) -> Callable[..., Any]:
        bound = functools.partial(function, **settings)

        def recomputed(upstream: Any, *tensors: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                output = bound(*tensors)
            return tape.gradient(output, tensors, upstream)

        forward = tf.function(bound, jit_compile=True, autograph=False)
        backward = tf.function(
            functools.partial(gradient, **settings) if gradient else recomputed, jit_compile=True, autograph=False
        )

        @tf.custom_gradient
        def with_gradient(*tensors: Any) -> Any:
            kept = tensors if keeps_first else tensors[1:]
            return forward(*tensors), lambda upstream: backward(upstream, *kept)

        return with_gradient

    return compiled
