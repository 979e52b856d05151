"""The training loop: steps, and between them the log, evaluations and checkpoints."""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

from keras_vit.errors import Diverged
from keras_vit.train._recipe import Recipe
from keras_vit.train.loop.batches import TrainingBatches
from keras_vit.train.loop.checkpoints import Checkpoints
from keras_vit.train.loop.evaluator import Evaluator
from keras_vit.train.loop.metrics import MetricLogger
from keras_vit.train.loop.state import TrainState
from keras_vit.train.loop.stop import Stop


def train(
    state: TrainState,
    batches: TrainingBatches,
    *,
    logger: MetricLogger,
    checkpoints: Checkpoints | None,
    evaluator: Evaluator,
    stop: Stop,
) -> bool:
    """Take the steps that are left, until the last one or until a signal asks to stop.

    Args:
        state: is updated.
        batches: from the state's step on.
        logger: of metrics.
        checkpoints: None saves nothing.
        evaluator: on held-out images.
        stop: knows of signals.

    Returns:
        Whether training stopped before the last step; a checkpoint is saved then.

    Raises:
        Diverged: Loss, gradient or weights are not finite.
        ValueError: A training image cannot be decoded.
    """
    recipe, total, done = state.recipe, state.total_steps, state.steps_done
    saved_at = time.monotonic()
    while done < total:
        count = _steps_until_event(recipe, total, done)
        asked = stop.requested
        with batches.naming_bad_images(done, count):
            metrics = state.train_step(batches.iterator, tf.constant(count), tf.constant(float(asked)))
        done += count
        logger.add(count, metrics)

        is_logged = done == total or _is_due(recipe.log_steps, done)
        # Workers learn from the metrics that one was asked to stop, and all look at them after the same step.
        if is_logged or (asked and not state.has_workers):
            means = logger.log_means(done, learning_rate=state.learning_rate(done - 1))
            _check_finite(means, done, checkpoints)
            if means["stop"] and done < total:
                save_checkpoint(state, done, checkpoints, logger)
                return True
        if done == total:
            break
        with logger.paused():
            if _is_due(recipe.eval_steps, done):
                logger.log_evaluation(done, evaluator.evaluate())
            minutes = recipe.checkpoint_minutes
            is_old = is_logged and minutes is not None and time.monotonic() - saved_at > 60 * minutes
            if is_old or _is_due(recipe.checkpoint_steps, done):
                save_checkpoint(state, done, checkpoints, logger)
                saved_at = time.monotonic()
    return False


def finish(
    state: TrainState,
    *,
    logger: MetricLogger,
    checkpoints: Checkpoints | None,
    evaluator: Evaluator,
    is_logged: bool,
) -> dict[str, float]:
    """Evaluate after the last step, save a checkpoint and return the metrics.

    Args:
        state: after all steps.
        logger: of metrics.
        checkpoints: None saves nothing.
        evaluator: on held-out images.
        is_logged: whether the log has these metrics, from an earlier call of the same run.

    Raises:
        Diverged: A weight is not finite.
    """
    metrics = evaluator.evaluate()
    if not is_logged:
        logger.log_evaluation(state.total_steps, metrics)
    save_checkpoint(state, state.total_steps, checkpoints, logger)
    return metrics


def save_checkpoint(state: TrainState, done: int, checkpoints: Checkpoints | None, logger: MetricLogger) -> None:
    """Save a checkpoint after the log: what was logged up to a step is then never missing.

    Raises:
        Diverged: A weight is not finite.
    """
    if not state.is_finite():
        raise Diverged(_divergence_message(done, "a weight is not finite", checkpoints))
    if checkpoints is not None:
        logger.flush()
        checkpoints.save(done)


def _steps_until_event(recipe: Recipe, total: int, done: int) -> int:
    """Return the number of steps of the next call: up to `steps_per_call`, the next event, or the end."""
    intervals = [recipe.log_steps, recipe.checkpoint_steps, recipe.eval_steps]
    return min(recipe.steps_per_call, total - done, *(every - done % every for every in intervals if every))


def _is_due(every: int | None, done: int) -> bool:
    return every is not None and done % every == 0


def _check_finite(means: dict[str, float], done: int, checkpoints: Checkpoints | None) -> None:
    if not np.isfinite([means["loss"], means["gradient_norm"]]).all():
        problem = f"the loss is {means['loss']}, the gradient's norm {means['gradient_norm']}"
        raise Diverged(_divergence_message(done, problem, checkpoints))


def _divergence_message(done: int, problem: str, checkpoints: Checkpoints | None) -> str:
    steps = checkpoints.steps() if checkpoints else []
    kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no checkpoint from before"
    return f"Training diverged before step {done}: {problem}; {kept}. Lower learning_rate, or set clip_norm."
