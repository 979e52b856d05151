"""Evaluations during a run, on held-out images, and the best model among them."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_vit._util.text import warn
from keras_vit.model.calibration import fit_temperature
from keras_vit.model.task import Classification
from keras_vit.model.vision_transformer import HEADS, VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.checkpoints import BEST_MODEL, BEST_RECORD, as_os_error, read_file, remove, replace_file
from keras_vit.train.data.split import Data, DataRequest
from keras_vit.train.evaluation import Measured, balanced_accuracy, measure, replicate
from keras_vit.train.memory import evaluation_batch
from keras_vit.train.step import TrainState

TRAINING_NAMES = {"top1": "accuracy"}  # metrics of an evaluation that have another name in training
# `eval_steps="auto"`: evaluations in a run, and the fewest steps between them.
EVALUATIONS, FEWEST_STEPS = 10, 10


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


@dataclass(frozen=True)
class Outcome:
    """The model and the metrics of a run, as the fields of a `Result` of the same names."""

    model: VisionTransformer
    metrics: dict[str, float]
    history: list[dict[str, float]]
    steps: int
    images_per_second: float
    stopped: bool
    best: Best | None = None
    temperature: float | None = None


class HeldOut:
    """Evaluation of a run's weights, or of their moving averages, on all of its devices.

    `temperature` is the one by which the head of the last evaluated model was divided, None without one. The weights
    that are trained keep theirs.

    All workers evaluate together, and one of them has a `folder` and writes its files. If the run `is_new`, files of
    one that died before its first checkpoint are removed. A continued run repeats the evaluations after its checkpoint
    with the same results, so `best.keras` may be of a later step. Without a folder, `best_model` needs `keeps_weights`.
    """

    def __init__(
        self,
        state: TrainState,
        data: Data,
        *,
        folder: str | None,
        is_new: bool,
        keeps_weights: bool = False,
        print_line: Callable[[str], None],
    ) -> None:
        self.interval = evaluation_interval(state.recipe, data, state.total_steps)
        self._state = state
        self._data = data
        self._print_line = print_line
        self._folder = folder
        replicas = state.strategy.num_replicas_in_sync
        self._batch_size = evaluation_batch(state.recipe, state.model.config, replicas=replicas)
        with state.strategy.scope():
            self._model = state.model.with_config(state.model.config)
        self.best = _read_best(folder) if folder is not None and not is_new else None
        self.temperature: float | None = None
        self._best_temperature: float | None = None
        self._keeps_weights = keeps_weights
        self._best_weights: list[np.ndarray] = []
        if folder is not None and is_new:
            remove(f"{folder}/{BEST_RECORD}")
            remove(f"{folder}/{BEST_MODEL}")

    def evaluate(self, step: int, *, keep: bool = True) -> dict[str, float]:
        """Measure the weights after a step, {} without held-out images and labels. `keep` keeps the best model."""
        state = self._state
        if cannot_evaluate(state.recipe, self._data):
            return {}
        state.copy_to(self._model)
        is_softmax = self._data.multi_label and state.recipe.probabilities == "softmax"
        labels = "real" if is_softmax else None  # None: as the head says
        measured = measure(
            self._model,
            DataRequest(data=self._data),
            batch_size=self._batch_size,
            labels=labels,
            strategy=state.strategy,
            keeps_outputs=can_calibrate(state.recipe, self._data) or state.recipe.class_weights is not None,
        )
        self.temperature, means = None, measured.evaluation.metrics
        if can_calibrate(state.recipe, self._data):
            self.temperature, means = calibrate(self._model, measured)
        metrics = {TRAINING_NAMES.get(name, name): value for name, value in means.items()}
        if state.recipe.class_weights is not None and measured.output is not None and measured.targets is not None:
            labels_and_best = measured.targets.argmax(axis=1), measured.output.argmax(axis=1)
            metrics["balanced_accuracy"] = balanced_accuracy(*labels_and_best)
        note = ", the best so far" if keep and self._keep(step, metrics) else ""
        first = next(iter(metrics))
        text = f"held-out {first} {metrics[first]:.4f}, loss {metrics['loss']:.4f}{note}"
        self._print_line(f"step {step:,} of {state.total_steps:,}: {text}")
        return metrics

    def copy_model(self) -> VisionTransformer:
        """Copy the moving averages, or without them the weights, to a model outside of any strategy."""
        model = self._copy()
        self._state.copy_to(model)
        return model

    def evaluated_model(self) -> VisionTransformer:
        """Copy the model as it was evaluated last, with its temperature, to a model outside of any strategy."""
        model = self._copy()
        model.set_weights(self._model.get_weights())
        return model

    def _copy(self) -> VisionTransformer:
        return replicate(self._model, tf.distribute.get_strategy())

    def best_model(self) -> VisionTransformer:
        """Copy the weights of the best evaluation to a model outside of any strategy."""
        assert self.best
        model = self._copy()
        self.temperature = self._best_temperature
        if self.best.path is None:
            model.set_weights(self._best_weights)
            return model
        model.set_weights(read_model(self.best.path).get_weights())
        return model

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
        elif self._keeps_weights:
            self._best_weights = self._model.get_weights()
        self.best = Best(step, metrics, path)
        self._best_temperature = self.temperature
        return True


def evaluation_interval(recipe: Recipe, data: Data, total_steps: int) -> int | None:
    """Number of steps from one evaluation to the next; None evaluates after the last step only."""
    if recipe.eval_steps != "auto":
        return recipe.eval_steps
    if data.evaluation is None or cannot_evaluate(recipe, data):
        return None
    # An image costs three times as much to train on as to evaluate: evaluations cost at most a tenth of the training.
    cheap = ceil(10 * data.evaluation.count / (3 * recipe.batch_size))
    return max(ceil(total_steps / EVALUATIONS), FEWEST_STEPS, cheap)


def cannot_evaluate(recipe: Recipe, data: Data) -> str | None:
    """Reason why a run has nothing to evaluate on, and what to do, or None."""
    if not recipe.trains_head:
        return "the result has no head. Train one on it, with linear-probe and labelled images"
    if not data.is_labelled:
        return "the images have no labels. Evaluate the result on labelled ones: keras-vit evaluate"
    if data.evaluation is None:
        return "no images are held out. Add a folder val/ beside train/, name a split (eval_split), or pass arrays"
    return None


def can_calibrate(recipe: Recipe, data: Data) -> bool:
    """Whether a temperature is fitted: to the one class that each image has, of a softmax."""
    has_classes = type(data.task) is Classification and not data.multi_label
    return recipe.calibrate and recipe.probabilities == "softmax" and has_classes


def calibrate(model: VisionTransformer, measured: Measured) -> tuple[float | None, Mapping[str, float]]:
    """Divide a model's head by the temperature that suits its outputs, if they were kept; return it and the metrics."""
    logits, targets, task = measured.output, measured.targets, measured.task
    temperature = None
    if logits is not None and targets is not None:
        temperature = fit_temperature(logits, targets.argmax(axis=1))
    if logits is None or temperature is None:
        return None, measured.evaluation.metrics
    for layer in (layer for layer in model.layers if layer.name in HEADS):
        layer.set_weights([weight / temperature for weight in layer.get_weights()])
    sums = task.sums(tf.constant(logits / temperature), tf.constant(targets), tf.ones(len(logits)))
    return temperature, task.means(dict(zip(task.sum_names, sums.numpy().tolist(), strict=True)))


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


def read_model(path: str) -> VisionTransformer:
    """Read a .keras file that `save_model` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "model.keras"
        local.write_bytes(read_file(path))
        model: VisionTransformer = keras.saving.load_model(local, compile=False)
    return model


def save_model(model: VisionTransformer, path: str) -> None:
    """Write a .keras file, complete or not at all, to a local path or a bucket."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "model.keras"
        keras.saving.save_model(model, local)
        replace_file(path, local.read_bytes())
