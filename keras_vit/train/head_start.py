"""Begin a training with the head of a linear probe (`head_start` of a recipe), and end it no worse.

The probe is a run of its own, in a folder inside the training's. Step 0 is evaluated too, and the result is the model
of the best evaluation. A head that is not trained is solved for once more after the last step.
"""

from __future__ import annotations

import dataclasses
import os

import tensorflow as tf

from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import prepare
from keras_vit.train._recipe import Recipe
from keras_vit.train._recipe import recipe as load_recipe
from keras_vit.train.checkpoints import FINAL_MODEL, newest, plain_path
from keras_vit.train.data.split import Data, DataRequest
from keras_vit.train.execute import Result, execute
from keras_vit.train.held_out import HeldOut, read_model
from keras_vit.train.log_files import MetricLogger
from keras_vit.train.prepare import PrintLine
from keras_vit.train.probe import Probe
from keras_vit.train.steps import Steps
from keras_vit.train.stop import Stop

PROBE = "probe"  # folder of the probe, in that of the training
# Fields of a recipe on which the head depends.
OF_PROBE = {"image_size", "config", "layers", "precision", "seed", "class_weights"}


def begin(
    recipe: Recipe,
    source: prepare.Source,
    data: Data,
    devices: tf.distribute.Strategy,
    asked: DataRequest,
    out: str | os.PathLike[str] | None,
    *,
    start: str,
    print_line: PrintLine,
    show: bool,
) -> prepare.Model | Result:
    """Run the probe whose head a training in `out` begins with; return its model, or its result if it was stopped.

    The training is checked before. One that has begun has the probe's weights in its own checkpoints: the probe is
    loaded. `start`, `print_line` and `show` are as for `execute`.
    """
    folder = None if out is None else f"{plain_path(out)}/{PROBE}"
    has_begun = out is not None and newest(f"{plain_path(out)}/checkpoints")
    if has_begun and tf.io.gfile.exists(f"{folder}/{FINAL_MODEL}"):
        return read_model(f"{folder}/{FINAL_MODEL}")
    prepare.check_run(recipe, source, data, devices)
    probe = Probe(_probe_recipe(recipe, devices), source, data, devices, print_line)
    result = execute(probe, data, asked, folder, start=start, print_line=print_line, show=show)
    return result if result.stopped else result.model


def _probe_recipe(recipe: Recipe, devices: tf.distribute.Strategy) -> Recipe:
    """Make the recipe of the probe whose head a training has."""
    probe = dataclasses.replace(load_recipe("linear-probe"), **{name: getattr(recipe, name) for name in OF_PROBE})
    replicas = devices.num_replicas_in_sync
    batch = replicas * max(1, probe.batch_size // replicas)
    return dataclasses.replace(probe, batch_size=batch, changed=(recipe.changed or frozenset()) & OF_PROBE)


class StepsFromProbe(Steps):
    """Training in steps that begins with the head of a probe, and returns the best model: never below the probe."""

    keeps_best = True

    def begin(self, logger: MetricLogger, held_out: HeldOut) -> None:
        """Evaluate the probe."""
        logger.log_evaluation(0, held_out.evaluate(0))
        super().begin(logger, held_out)

    def end(
        self, metrics: dict[str, float], logger: MetricLogger, held_out: HeldOut, stop: Stop, show: bool
    ) -> dict[str, float] | None:
        """Move a head that is not trained half of the way to one for the trained features.

        The last checkpoint has the head before it: a run that continues does this again.
        """
        state = self._state
        if state.trains_head:
            return metrics
        self._print_line("the head becomes the mean of itself and of a head for the trained features")
        recipe = dataclasses.replace(_probe_recipe(self.recipe, self.strategy), layers=1, config={})  # as the model is
        images = dataclasses.replace(self._data, evaluation=None)
        probe = Probe(recipe, held_out.copy_model(), images, self.strategy, lambda _: None)
        if probe.run(None, stop, show=show).stopped:
            return None
        head = state.model.get_layer("head")
        with self.strategy.scope():
            pairs = zip(head.get_weights(), probe.model.get_layer("head").get_weights(), strict=True)
            head.set_weights([(first + second) / 2 for first, second in pairs])
        metrics = held_out.evaluate(state.total_steps)
        logger.log_evaluation(state.total_steps, metrics)
        return metrics

    def choose_model(self, metrics: dict[str, float], held_out: HeldOut) -> tuple[VisionTransformer, dict[str, float]]:
        """Choose the model of the best evaluation. The last has `metrics`."""
        best = held_out.best
        if not metrics or not best or best.metrics == metrics:
            return super().choose_model(metrics, held_out)
        self._print_line(f"the result is the model of step {best.step:,}, the best on the held-out images")
        return held_out.best_model(), best.metrics
