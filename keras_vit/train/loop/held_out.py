"""Evaluate a run on its held-out images, and keep the best model beside the last one."""

import json
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import keras
import tensorflow as tf

from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.split import Data
from keras_vit.train.loop.checkpoints import as_os_error, read_file, remove, replace_file
from keras_vit.train.measure.evaluation import evaluate
from keras_vit.train.measure.memory import evaluation_batch
from keras_vit.train.measure.replicas import replicate
from keras_vit.train.step.state import TrainState

MODEL = "best.keras"
NAMES = {"top1": "accuracy"}  # metrics of an evaluation that have another name in training
RECORD = "best.json"  # step and metrics of best.keras
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


class HeldOut:
    """Evaluation of a run's weights, or of their moving averages, on all of its devices.

    All workers evaluate together, and one of them has a `folder` and writes its files. If the run `is_new`, files of
    one that died before its first checkpoint are removed. A continued run repeats the evaluations after its checkpoint
    with the same results, so `best.keras` may be of a later step.
    """

    def __init__(
        self, state: TrainState, data: Data, *, folder: str | None, is_new: bool, say: Callable[[str], None]
    ) -> None:
        self._state = state
        self._data = data
        self._say = say
        self._folder = folder
        replicas = state.strategy.num_replicas_in_sync
        self._batch_size = evaluation_batch(state.recipe, state.model.config, replicas=replicas)
        with state.strategy.scope():
            self._model = state.model.with_config(state.model.config)
        self.best = _read(folder) if folder is not None and not is_new else None
        if folder is not None and is_new:
            remove(f"{folder}/{RECORD}")
            remove(f"{folder}/{MODEL}")

    def evaluate(self, step: int, *, keep: bool = True) -> dict[str, float]:
        """Return the metrics after a step, {} without held-out images and labels. `keep` keeps the best model."""
        state = self._state
        if not can_evaluate(state.recipe, self._data):
            return {}
        state.copy_to(self._model)
        labels = "real" if self._data.multi_label else "single"
        found = evaluate(self._model, self._data, batch_size=self._batch_size, labels=labels, strategy=state.strategy)
        metrics = {NAMES.get(name, name): value for name, value in found.metrics.items()}
        note = ", the best so far" if keep and self._keep(step, metrics) else ""
        first = next(iter(metrics))
        text = f"held-out {first} {metrics[first]:.4f}, loss {metrics['loss']:.4f}{note}"
        self._say(f"step {step:,} of {state.total_steps:,}: {text}")
        return metrics

    def final_model(self) -> VisionTransformer:
        """Return a model outside of any strategy, with the state's moving averages, or without them its weights."""
        model = replicate(self._model, tf.distribute.get_strategy())
        self._state.copy_to(model)
        return model

    def _keep(self, step: int, metrics: dict[str, float]) -> bool:
        """Write `best.keras` if no evaluation before was as good; return whether it did."""
        if self.best and not _score(metrics) > _score(self.best.metrics):
            return False
        path = None
        if self._folder is not None:
            path, record = f"{self._folder}/{MODEL}", f"{self._folder}/{RECORD}"
            with as_os_error(f"{path} cannot be written"):
                remove(record)  # otherwise a kill would leave the record of another step
                save_model(self._model, path)
                replace_file(record, json.dumps({"step": step, **metrics}).encode() + b"\n")
        self.best = Best(step, metrics, path)
        return True


def can_evaluate(recipe: Recipe, data: Data) -> bool:
    """Return whether there are held-out images with labels, and a head for their classes."""
    return data.evaluation is not None and data.is_labelled and recipe.trains_head


def interval(state: TrainState, data: Data) -> int | None:
    """Return the number of steps from one evaluation to the next; None evaluates after the last step only."""
    recipe = state.recipe
    if recipe.eval_steps != "auto":
        return recipe.eval_steps
    if data.evaluation is None or not can_evaluate(recipe, data):
        return None
    # An image costs three times as much to train on as to evaluate: evaluations cost at most a tenth of the training.
    cheap = ceil(10 * data.evaluation.count / (3 * recipe.batch_size))
    return max(ceil(state.total_steps / EVALUATIONS), FEWEST_STEPS, cheap)


def save_model(model: VisionTransformer, path: str) -> None:
    """Write a .keras file, complete or not at all, to a local path or a bucket."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "model.keras"
        keras.saving.save_model(model, local)
        replace_file(path, local.read_bytes())


def _score(metrics: dict[str, float]) -> tuple[float, float]:
    """Return what the best model has most of: the first metric of its task, then the negative loss."""
    loss = metrics["loss"]
    return next(iter(metrics.values())), -math.inf if math.isnan(loss) else -loss


def _read(folder: str) -> Best | None:
    """Return the best evaluation of a run that is continued; warn if its files are damaged."""
    if not tf.io.gfile.exists(f"{folder}/{RECORD}"):
        return None
    try:
        record = json.loads(read_file(f"{folder}/{RECORD}"))
        step, metrics = int(record.pop("step")), {name: float(value) for name, value in record.items()}
        _score(metrics)
        if not tf.io.gfile.exists(f"{folder}/{MODEL}"):
            raise ValueError(f"there is no {MODEL}")
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = str(error)[:100] or type(error).__name__
        warnings.warn(f"{folder}/{RECORD} cannot be used ({reason}): the best model is chosen anew.", stacklevel=5)
        return None
    return Best(step, metrics, f"{folder}/{MODEL}")
