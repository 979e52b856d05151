"""The training loop: steps, lines of the log, evaluations, checkpoints, until the last step or a signal."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import tensorflow as tf

from keras_vit._util.progress import print_line
from keras_vit.errors import DivergedError as DivergedError
from keras_vit.train import strategies
from keras_vit.train.checkpoints import Checkpoints
from keras_vit.train.data.pipeline import ModelInput, training_batches
from keras_vit.train.data.split import Data, Order
from keras_vit.train.held_out import HeldOut
from keras_vit.train.log_files import MetricLogger
from keras_vit.train.step import INTERRUPTED, Interrupt, TrainState, is_whole, make_train_step
from keras_vit.train.stop import Stop, describe_wait, start_thread, wait_for

UPDATE_SECONDS = 5.0  # that the second Ctrl-C waits for the end of a step that changes the weights
FEWEST_LOG_LINES = 20  # lines of the log that a short run has at least, unless the user states log_steps


def train(
    state: TrainState,
    data: Data,
    *,
    logger: MetricLogger,
    checkpoints: Checkpoints | None,
    held_out: HeldOut,
    stop: Stop,
) -> dict[str, float] | None:
    """Train until the last step or a signal, save a checkpoint, and return the last metrics on held-out images.

    Returns None after a signal; a second Ctrl-C is raised when the last whole step is saved. Raises DivergedError if
    loss, gradient or weights are not finite.
    """
    recipe, total, done = state.recipe, state.total_steps, int(state.step.numpy())
    log_steps = recipe.log_steps
    if not recipe.is_stated("log_steps"):
        log_steps = min(log_steps, math.ceil(total / FEWEST_LOG_LINES))
    # Numbers of steps; None: after the last one.
    every = {"log": log_steps, "save": recipe.checkpoint_steps, "evaluate": held_out.interval}
    during = functools.partial(stop.during, saves=checkpoints is not None)
    save = functools.partial(save_checkpoint, state, checkpoints, logger, stop)
    steps = TrainingSteps(state, data)
    evaluation: dict[str, float] = {}
    saved_at = time.monotonic()
    with _saving_last_step(state, steps, save, has_folder=checkpoints is not None):
        while done < total:
            # No call goes beyond a step after which something else is to be done.
            count = min(recipe.steps_per_call, total - done, *(n - done % n for n in every.values() if n))
            is_asked = stop.requested and not strategies.has_workers(state.strategy)
            metrics = None if is_asked else steps.take(count, stop, saves=checkpoints is not None)
            if metrics is None:
                break
            done += count
            logger.add(count, metrics)
            due = {name for name, n in every.items() if done == total or (n is not None and done % n == 0)}
            # The metrics tell all workers that one was asked to stop, and all read them after the same step.
            if "log" in due and _log(state, logger, checkpoints)["stop"] and done < total:
                break
            with logger.paused():
                if "evaluate" in due:
                    logger.show("evaluating")
                    _check_weights(state, checkpoints)
                    with during("this evaluation"):
                        evaluation = held_out.evaluate(done)
                    logger.log_evaluation(done, evaluation)
                minutes = recipe.checkpoint_minutes
                is_old = "log" in due and minutes is not None and time.monotonic() - saved_at > 60 * minutes
                if "save" in due or is_old:
                    with during("this checkpoint"):
                        save()
                    saved_at = time.monotonic()
        if done < total:  # stopped
            if logger.pending:
                _log(state, logger, checkpoints)
            save()
    return evaluation if done == total else None


@contextlib.contextmanager
def _saving_last_step(
    state: TrainState, steps: TrainingSteps, save: Callable[[], None], *, has_folder: bool
) -> Iterator[None]:
    """Save the last whole step before a second Ctrl-C ends the block."""
    try:
        yield
    except KeyboardInterrupt:
        if has_folder and steps.finish_or_abandon():
            save()
            print_line(f"Step {int(state.step.numpy()):,} is saved: the same command resumes the run.")
        raise


class TrainingSteps:
    """Training steps that update `state`, which was created in the strategy's scope; its step is the first to take.

    The batches depend on nothing but the recipe's seed and the number of the step.
    """

    def __init__(self, state: TrainState, data: Data) -> None:
        recipe, strategy, split, first = state.recipe, state.strategy, data.training_split(), int(state.step.numpy())
        model_input = ModelInput.from_model(state.model)._replace(image_size=state.objective.view_size)

        def make_worker_batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
            local = context.num_replicas_in_sync // context.num_input_pipelines
            order = Order(
                batch=recipe.batch_size,
                seed=recipe.seed,
                start=first,
                replicas=context.num_replicas_in_sync,
                first_replica=context.input_pipeline_id * local,
                local_replicas=local,
            )
            return training_batches(split, recipe, model_input=model_input, task=data.task, order=order)

        self._state = state
        self._split = split
        self._batches = iter(strategy.distribute_datasets_from_function(make_worker_batches))
        self._train_step = make_train_step(state, strategy)
        self._parts = 1 if is_whole(recipe, strategy) else int(recipe.accumulation)
        self._running: futures.Future[Any] | None = None  # the newest call
        self._has_compiled = False
        self._seconds: float | None = None  # of a step

    def take(self, count: int, stop: Stop, *, saves: bool) -> Any:
        """Take `count` steps and return their metrics. A ValueError names an image that is lost.

        Returns None if a request to stop came between micro-batches: then nothing has changed. `saves` is for the
        message of a stop.
        """
        state, recipe = self._state, self._state.recipe
        # Several steps in one call could end between the updates of one.
        parts = self._parts if count == 1 else 1
        end_step = functools.partial(state.interrupt.assign, Interrupt.BEFORE_MICRO_BATCH)
        on_request = end_step if parts != 1 else lambda: None
        order = Order(batch=recipe.batch_size, seed=recipe.seed, start=int(state.step.numpy()))
        start = time.monotonic()
        with (
            stop.during(self._describe_wait(parts, count), saves=saves, on_request=on_request),
            self._split.naming_bad_image(order, batches=count),
        ):
            if state.updating is not None:
                state.updating.assign(0)
            try:
                arguments = self._batches, tf.constant(count), tf.constant(float(stop.requested))
                self._running = start_thread(self._train_step, *arguments)
                metrics = wait_for(self._running)
            except tf.errors.OpError as error:
                if INTERRUPTED not in str(error):
                    raise
                return None
        self._seconds = (time.monotonic() - start) / count if self._has_compiled else None
        self._has_compiled = True
        return metrics

    def finish_or_abandon(self) -> bool:
        """Keep a running step from updating the weights; return whether they are, and stay, those of a whole step."""
        state, running = self._state, self._running
        state.interrupt.assign(Interrupt.BEFORE_UPDATE)
        if running and not running.done() and (state.updating is None or state.updating.numpy()):
            futures.wait([running], timeout=UPDATE_SECONDS)
            return running.done()
        return True

    def _describe_wait(self, parts: int, count: int) -> str:
        """Describe the part of a step that a stopped run finishes first, and its time."""
        part = f"this micro-batch, one of {parts}" if parts != 1 else "this step" if count == 1 else f"{count} steps"
        return describe_wait(part, None if self._seconds is None else self._seconds * count / parts)


def _log(state: TrainState, logger: MetricLogger, checkpoints: Checkpoints | None) -> dict[str, float]:
    """Log the means of the steps since the last line; raise a DivergedError if they are not finite."""
    done = int(state.step.numpy())
    means = logger.log_means(done, learning_rate=float(state.optimizer.rate(tf.constant(done - 1, tf.int64))))
    loss, norm = means["loss"], means["gradient_norm"]
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise _diverged(state, f"the loss is {loss}, the gradient's norm {norm}", checkpoints)
    return means


def _check_weights(state: TrainState, checkpoints: Checkpoints | None) -> None:
    if not state.is_finite():
        raise _diverged(state, "a weight is not finite", checkpoints)


def _diverged(state: TrainState, problem: str, checkpoints: Checkpoints | None) -> DivergedError:
    steps = checkpoints.steps() if checkpoints else []
    kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no earlier checkpoint"
    return DivergedError(
        f"Training diverged before step {int(state.step.numpy())}: {problem}; {kept}. Lower learning_rate, or set "
        "clip_norm."
    )


def save_checkpoint(state: TrainState, checkpoints: Checkpoints | None, logger: MetricLogger, stop: Stop) -> None:
    """Flush the log, then save a checkpoint: no logged line is missing after a restart."""
    _check_weights(state, checkpoints)
    if checkpoints is not None:
        with stop.held():
            logger.flush()
            checkpoints.save(int(state.step.numpy()))
