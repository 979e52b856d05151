"""The training loop: steps, logs, checkpoints, evaluation on held-out images, and the best model."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_vit._util.progress import print_line
from keras_vit._util.text import warn
from keras_vit.errors import DivergedError as DivergedError
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train.checkpoints import (
    BEST_MODEL,
    BEST_RECORD,
    Checkpoints,
    as_os_error,
    read_file,
    remove,
    replace_file,
)
from keras_vit.train.data.pipeline import ModelInput, training_batches
from keras_vit.train.data.split import Data, Order
from keras_vit.train.evaluation import evaluate, replicate
from keras_vit.train.log_files import MetricLogger
from keras_vit.train.planner import evaluation_batch
from keras_vit.train.step import TrainState, is_whole, make_train_step

TRAINING_NAMES = {"top1": "accuracy"}  # metrics of an evaluation that have another name in training
# `eval_steps="auto"`: evaluations in a run, and the fewest steps between them.
EVALUATIONS, FEWEST_STEPS = 10, 10
Answer = TypeVar("Answer")
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
    stop.saves = checkpoints is not None
    steps = TrainingSteps(state, data)
    recipe, total = state.recipe, state.total_steps
    has_workers = strategies.has_workers(state.strategy)
    log_steps = recipe.log_steps
    if not recipe.is_stated("log_steps"):
        log_steps = min(log_steps, math.ceil(total / FEWEST_LOG_LINES))
    intervals = (log_steps, recipe.checkpoint_steps, interval(state, data))
    done = int(state.step.numpy())
    saved_at = time.monotonic()
    with _saving_last_step(steps, state, logger=logger, checkpoints=checkpoints, stop=stop):
        while True:
            count = min(recipe.steps_per_call, total - done, *(n - done % n for n in intervals if n))
            metrics = None if stop.requested and not has_workers else steps.take(done, count, stop)
            if metrics is None:
                if logger.pending:
                    _log(state, done, logger, checkpoints)
                save_checkpoint(state, done, checkpoints, logger, stop)
                return None
            done += count
            logger.add(count, metrics)
            is_last = done == total
            is_logged, is_saved, is_evaluated = (is_last or (n is not None and done % n == 0) for n in intervals)

            # The metrics tell all workers that one was asked to stop, and all read them after the same step.
            if is_logged and _log(state, done, logger, checkpoints)["stop"] and not is_last:
                save_checkpoint(state, done, checkpoints, logger, stop)
                return None

            with logger.paused():
                if is_evaluated:
                    stop.until = "this evaluation"
                    logger.show("evaluating")
                    _check_finite(state.is_finite(), done, "a weight is not finite", checkpoints)
                    evaluation = held_out.evaluate(done)
                    logger.log_evaluation(done, evaluation)
                minutes = recipe.checkpoint_minutes
                is_old = is_logged and minutes is not None and time.monotonic() - saved_at > 60 * minutes
                if is_saved or is_old:
                    stop.until = "this checkpoint"
                    save_checkpoint(state, done, checkpoints, logger, stop)
                    saved_at = time.monotonic()
            if is_last:
                return evaluation


@contextlib.contextmanager
def _saving_last_step(
    steps: TrainingSteps, state: TrainState, *, logger: MetricLogger, checkpoints: Checkpoints | None, stop: Stop
) -> Iterator[None]:
    """Save the last whole step before a second Ctrl-C ends the block."""
    try:
        yield
    except KeyboardInterrupt:
        if checkpoints and steps.settle():
            done = int(state.step.numpy())
            save_checkpoint(state, done, checkpoints, logger, stop)
            print_line(f"Step {done:,} is saved: the same command resumes the run.")
        raise


def interval(state: TrainState, data: Data) -> int | None:
    """Number of steps from one evaluation to the next; None evaluates after the last step only."""
    recipe = state.recipe
    if recipe.eval_steps != "auto":
        return recipe.eval_steps
    if data.evaluation is None or cannot_evaluate(recipe, data):
        return None
    # An image costs three times as much to train on as to evaluate: evaluations cost at most a tenth of the training.
    cheap = ceil(10 * data.evaluation.count / (3 * recipe.batch_size))
    return max(ceil(state.total_steps / EVALUATIONS), FEWEST_STEPS, cheap)


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

    def take(self, done: int, count: int, stop: Stop) -> Any:
        """Take `count` steps after the first `done`; return their metrics. A ValueError names an image that is lost.

        Returns None if a request to stop came between micro-batches: then nothing has changed.
        """
        # Several steps in one call could end between the updates of one.
        parts = self._parts if count == 1 else 1
        stop.until = self._describe_wait(parts, count)
        if parts != 1:
            stop.on_request = lambda: self._state.interrupt.assign(1)
        arguments = self._batches, tf.constant(count), tf.constant(float(stop.requested))
        if self._state.updating is not None:
            self._state.updating.assign(0)
        start = time.monotonic()
        order = Order(batch=self._state.recipe.batch_size, seed=self._state.recipe.seed, start=done)
        with self._split.naming_bad_image(order, batches=count):
            try:
                self._running = start_thread(self._train_step, *arguments)
                metrics = wait_for(self._running)
            except tf.errors.OpError:
                if not self._state.interrupt.numpy():
                    raise
                return None
            finally:
                stop.on_request = lambda: None
        self._seconds = (time.monotonic() - start) / count if self._has_compiled else None
        self._has_compiled = True
        return metrics

    def settle(self) -> bool:
        """Keep a running step from updating the weights; return whether they are, and stay, those of a whole step."""
        state, running = self._state, self._running
        state.interrupt.assign(2)
        if running and not running.done() and (state.updating is None or state.updating.numpy()):
            futures.wait([running], timeout=UPDATE_SECONDS)
            return running.done()
        return True

    def _describe_wait(self, parts: int, count: int) -> str:
        """Describe the part of a step that a stopped run finishes first, and its time."""
        part = f"this micro-batch, one of {parts}" if parts != 1 else "this step" if count == 1 else f"{count} steps"
        return describe_wait(part, None if self._seconds is None else self._seconds * count / parts)


def describe_wait(part: str, seconds: float | None) -> str:
    """Describe what a stopped run finishes first, and its time if that is known."""
    if seconds is None:
        return f"{part} (the first: how long it takes is not known yet)"
    return f"{part} (about {max(1, seconds):.0f} s at most)"


def in_thread(function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Call a function in another thread: meanwhile this one handles signals, which TensorFlow would delay."""
    return wait_for(start_thread(function, *arguments))


def start_thread(function: Callable[..., Answer], *arguments: Any) -> futures.Future[Answer]:
    """Call a function in another thread."""
    future: futures.Future[Answer] = futures.Future()

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised below
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()  # a daemon, so that a second Ctrl-C does not wait for it
    return future


def wait_for(future: futures.Future[Answer]) -> Answer:
    """Wait for the answer of a thread, and handle signals meanwhile."""
    # A signal does not end the wait if it comes just before it or to another thread: then the next round handles it.
    while not futures.wait([future], timeout=0.1).done:
        pass
    return future.result()


class Stop(contextlib.AbstractContextManager["Stop"]):
    """Context in which SIGTERM and the first Ctrl-C (SIGINT) set `requested`, and a line says when the loop ends.

    The second Ctrl-C raises KeyboardInterrupt, but inside of `held` at its end. Only the main thread can handle
    signals; in others nothing changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self.until = "this step"  # the work that is finished first, and its time
        self.saves = True  # whether a checkpoint is saved then
        self.on_request: Callable[[], None] = lambda: None
        self._interrupts = 0
        self._is_held = False
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python, and cannot be passed back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Finish a block that saves a checkpoint before a second Ctrl-C ends the run; a third ends it at once."""
        self._is_held, before = True, self._interrupts
        try:
            yield
        finally:
            self._is_held = False
        if self._interrupts > max(before, 1):
            raise KeyboardInterrupt

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts > 1 + self._is_held:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested = True
            saved, kept = (", then saving a checkpoint", ", with the last whole step saved") if self.saves else ("", "")
            again = f" Ctrl-C again ends at once{kept}." if number == signal.SIGINT else ""
            with contextlib.suppress(RuntimeError):  # the signal came while a line was printed
                print_line(f"Stopping after {self.until}{saved}.{again}")
            self.on_request()


def _log(state: TrainState, done: int, logger: MetricLogger, checkpoints: Checkpoints | None) -> dict[str, float]:
    """Log the means of the steps since the last line; raise a DivergedError if they are not finite."""
    rate = float(state.optimizer.rate(tf.constant(done - 1, tf.int64)))
    means = logger.log_means(done, learning_rate=rate)
    loss, norm = means["loss"], means["gradient_norm"]
    problem = f"the loss is {loss}, the gradient's norm {norm}"
    _check_finite(math.isfinite(loss) and math.isfinite(norm), done, problem, checkpoints)
    return means


def _check_finite(is_finite: bool, done: int, problem: str, checkpoints: Checkpoints | None) -> None:
    if not is_finite:
        steps = checkpoints.steps() if checkpoints else []
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no earlier checkpoint"
        raise DivergedError(
            f"Training diverged before step {done}: {problem}; {kept}. Lower learning_rate, or set clip_norm."
        )


def save_checkpoint(
    state: TrainState, done: int, checkpoints: Checkpoints | None, logger: MetricLogger, stop: Stop
) -> None:
    """Flush the log, then save a checkpoint: no logged line is missing after a restart."""
    _check_finite(state.is_finite(), done, "a weight is not finite", checkpoints)
    if checkpoints is not None:
        with stop.held():
            logger.flush()
            checkpoints.save(done)


@dataclass(frozen=True)
class Best:
    """The evaluation of a run with the highest accuracy, and among equals with the lowest loss.

    Args:
        step: number of steps done.
        metrics: "accuracy" and "top5" in [0, 1], "loss".
        path: the .keras file with the weights of this step; None if the run writes no files.

    Example:
        >>> keras_vit.train.Best(step=20, metrics={"accuracy": 0.5, "loss": 1.0}, path="runs/x/best.keras").step
        20
    """

    step: int
    metrics: dict[str, float]
    path: str | None


class HeldOut:
    """Evaluation of a run's weights, or of their moving averages, on all of its devices.

    All workers evaluate together, and one of them has a `folder` and writes its files. If the run `is_new`, files of
    one that died before its first checkpoint are removed. A continued run repeats the evaluations after its checkpoint
    with the same results, so `best.keras` may be of a later step.
    """

    def __init__(
        self, state: TrainState, data: Data, *, folder: str | None, is_new: bool, print_line: Callable[[str], None]
    ) -> None:
        self._state = state
        self._data = data
        self._print_line = print_line
        self._folder = folder
        replicas = state.strategy.num_replicas_in_sync
        self._batch_size = evaluation_batch(state.recipe, state.model.config, replicas=replicas)
        with state.strategy.scope():
            self._model = state.model.with_config(state.model.config)
        self.best = _read_best(folder) if folder is not None and not is_new else None
        self._best_weights: list[np.ndarray] = []  # of a run without a folder
        if folder is not None and is_new:
            remove(f"{folder}/{BEST_RECORD}")
            remove(f"{folder}/{BEST_MODEL}")

    def evaluate(self, step: int, *, keep: bool = True) -> dict[str, float]:
        """Measure the weights after a step, {} without held-out images and labels. `keep` keeps the best model."""
        state = self._state
        if cannot_evaluate(state.recipe, self._data):
            return {}
        state.copy_to(self._model)
        labels = "real" if self._data.multi_label else "single"
        result = evaluate(self._model, self._data, batch_size=self._batch_size, labels=labels, strategy=state.strategy)
        metrics = {TRAINING_NAMES.get(name, name): value for name, value in result.metrics.items()}
        note = ", the best so far" if keep and self._keep(step, metrics) else ""
        first = next(iter(metrics))
        text = f"held-out {first} {metrics[first]:.4f}, loss {metrics['loss']:.4f}{note}"
        self._print_line(f"step {step:,} of {state.total_steps:,}: {text}")
        return metrics

    def copy_model(self) -> VisionTransformer:
        """Copy the moving averages, or without them the weights, to a model outside of any strategy."""
        model = replicate(self._model, tf.distribute.get_strategy())
        self._state.copy_to(model)
        return model

    def final_model(self, metrics: dict[str, float] | None) -> tuple[VisionTransformer, dict[str, float]]:
        """Return the result, a model outside of any strategy, and its metrics.

        It has the moving averages, or without them the weights, of the last step, whose `metrics` these are; None for a
        run that was stopped. One that began with a probe ends with its best evaluation: never below the probe.
        """
        model, best = self.copy_model(), self.best
        if not metrics or not best or self._state.recipe.head_start != "probe" or best.metrics == metrics:
            return model, metrics or {}
        self._print_line(f"the result is the model of step {best.step:,}, the best on the held-out images")
        if best.path is not None:
            with tempfile.TemporaryDirectory() as folder:
                local = Path(folder) / BEST_MODEL
                local.write_bytes(read_file(best.path))
                self._best_weights = keras.saving.load_model(local, compile=False).get_weights()
        model.set_weights(self._best_weights)
        return model, best.metrics

    def _keep(self, step: int, metrics: dict[str, float]) -> bool:
        """Write `best.keras` if no evaluation before was as good; return whether it did."""
        if self.best and not rank(metrics) > rank(self.best.metrics):
            return False
        path = None
        if self._folder is not None:
            path, record = f"{self._folder}/{BEST_MODEL}", f"{self._folder}/{BEST_RECORD}"
            with as_os_error(f"{path} cannot be written"):
                remove(record)  # otherwise a kill would leave the record of another step
                save_model(self._model, path)
                replace_file(record, json.dumps({"step": step, **metrics}).encode() + b"\n")
        elif self._state.recipe.head_start == "probe":
            self._best_weights = self._model.get_weights()
        self.best = Best(step, metrics, path)
        return True


def cannot_evaluate(recipe: Recipe, data: Data) -> str | None:
    """Reason why a run has nothing to evaluate on, and what to do, or None."""
    if not recipe.trains_head:
        return "the result has no head. Train one on it, with linear-probe and labelled images"
    if not data.is_labelled:
        return "the images have no labels. Evaluate the result on labelled ones: keras-vit evaluate"
    if data.evaluation is None:
        return "no images are held out. Add a folder val/ beside train/, name a split (eval_split), or pass arrays"
    return None


def rank(metrics: dict[str, float]) -> tuple[float, float]:
    """Rank of an evaluation: by the first metric of its task, then by the lower loss."""
    loss = metrics["loss"]
    return next(iter(metrics.values())), -math.inf if math.isnan(loss) else -loss


def _read_best(folder: str) -> Best | None:
    """Read the best evaluation of a run that is continued; warn if its files are damaged."""
    if not tf.io.gfile.exists(f"{folder}/{BEST_RECORD}"):
        return None
    try:
        record = json.loads(read_file(f"{folder}/{BEST_RECORD}"))
        step, metrics = int(record.pop("step")), {name: float(value) for name, value in record.items()}
        rank(metrics)
        if not tf.io.gfile.exists(f"{folder}/{BEST_MODEL}"):
            raise ValueError(f"there is no {BEST_MODEL}")
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = str(error)[:100] or type(error).__name__
        warn(f"{folder}/{BEST_RECORD} cannot be used ({reason}): the best model is chosen anew.")
        return None
    return Best(step, metrics, f"{folder}/{BEST_MODEL}")


def save_model(model: VisionTransformer, path: str) -> None:
    """Write a .keras file, complete or not at all, to a local path or a bucket."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "model.keras"
        keras.saving.save_model(model, local)
        replace_file(path, local.read_bytes())
