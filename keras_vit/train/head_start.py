"""Begin a training with the head of a linear probe (`head_start` of a recipe), and end it no worse.

The probe is a run of its own, in a folder inside the training's. Step 0 is evaluated too, and the result is the model
of the best evaluation. A head that is not trained is solved for once more after the last step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import prepare
from keras_vit.train._recipe import Recipe
from keras_vit.train._recipe import recipe as load_recipe
from keras_vit.train.checkpoints import FINAL_MODEL, newest
from keras_vit.train.data.split import Data
from keras_vit.train.held_out import HeldOut
from keras_vit.train.probe import Probe
from keras_vit.train.step import TrainState
from keras_vit.train.stop import Stop

PROBE = "probe"  # folder of the probe, in that of the training
# Fields of a recipe on which the head depends.
OF_PROBE = {"image_size", "config", "layers", "precision", "seed", "class_weights"}


def probe_recipe(recipe: Recipe, devices: tf.distribute.Strategy) -> Recipe:
    """Make the recipe of the probe whose head a training has."""
    probe = dataclasses.replace(load_recipe("linear-probe"), **{name: getattr(recipe, name) for name in OF_PROBE})
    replicas = devices.num_replicas_in_sync
    batch = replicas * max(1, probe.batch_size // replicas)
    return dataclasses.replace(probe, batch_size=batch, changed=(recipe.changed or frozenset()) & OF_PROBE)


def finished_probe(recipe: Recipe, out: str | None, folder: str | None) -> prepare.Model | None:
    """Load the probe in `folder` if the training in `out` has begun: it has its weights in its own checkpoints."""
    if folder is None or not newest(f"{out}/checkpoints") or not tf.io.gfile.exists(f"{folder}/{FINAL_MODEL}"):
        return None
    return prepare.load_model(recipe, prepare.choose_model(recipe, folder))


def solve_again(state: TrainState, data: Data, held_out: HeldOut, stop: Stop, *, show: bool) -> dict[str, float] | None:
    """Move a solved head half of the way to one for the trained features; evaluate it, or return None if stopped.

    The last checkpoint has the head before it: a run that continues does this again.
    """
    recipe = dataclasses.replace(probe_recipe(state.recipe, state.strategy), layers=1, config={})  # as the model is
    images = dataclasses.replace(data, evaluation=None)
    probe = Probe(recipe, held_out.copy_model(), images, state.strategy, lambda _: None)
    if probe.run(None, stop, print_line=lambda _: None, show=show).stopped:
        return None
    head = state.model.get_layer("head")
    with state.strategy.scope():
        pairs = zip(head.get_weights(), probe.model.get_layer("head").get_weights(), strict=True)
        head.set_weights([(first + second) / 2 for first, second in pairs])
    return held_out.evaluate(state.total_steps)


def best_model(
    held_out: HeldOut, metrics: dict[str, float], print_line: Callable[[str], None]
) -> tuple[VisionTransformer, dict[str, float]]:
    """Return the model of the best evaluation and its metrics: never below the probe. The last has `metrics`."""
    best = held_out.best
    if not metrics or not best or best.metrics == metrics:
        return held_out.evaluated_model() if metrics else held_out.copy_model(), metrics
    print_line(f"the result is the model of step {best.step:,}, the best on the held-out images")
    return held_out.best_model(), best.metrics
