"""Build the state of a training run on its devices, with micro-batches that fit into their memory."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_vit._util.checks import is_count
from keras_vit._util.text import byte_size
from keras_vit.dense.model import DenseModel
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.sources import Data
from keras_vit.train.loop import checkpoints, prepare, storage
from keras_vit.train.loop.teachers import Teacher, check_student
from keras_vit.train.measure import memory
from keras_vit.train.step import strategies
from keras_vit.train.step.state import TrainState
from keras_vit.zoo.pretrained import Choice

Say = Callable[[str], None]


def build_state(
    recipe: Recipe,
    model: Choice | ViTConfig | VisionTransformer | DenseModel,
    data: Data,
    devices: tf.distribute.Strategy,
    *,
    teacher: Teacher | None = None,
    out: str | os.PathLike[str] | None,
    say: Say,
) -> tuple[TrainState, Data]:
    """Load the model and create what changes during training; return it, and the data with a kept head's class numbers.

    No file is written. A run in the folder `out` keeps its number of micro-batches. `say` prints a line.
    """
    _check_devices(recipe, devices)
    source = prepare.check_task(recipe, prepare.load_model(recipe, model), data)
    recipe = prepare.fit_size(recipe, model, source.config, data, say=say)
    recipe = prepare.fit_length(recipe, data, replicas=devices.num_replicas_in_sync, say=say)
    total = recipe.resolved_steps(data.training_split().count)
    recipe, data = prepare.match_head(recipe, source.task, data)
    with devices.scope():
        adapted = prepare.adapt_model(recipe, source, num_classes=data.num_classes, class_names=data.class_names)
        placed = teacher.placed(recipe) if teacher else None
        if placed:
            check_student(adapted, placed, recipe)
        configs = (adapted.config, placed.config if placed else None)
        recipe = _fit_memory(recipe, configs, devices, out=out, total=total, say=say)
        state = TrainState(recipe, adapted, total_steps=total, teacher=placed, has_labels=data.is_labelled)
    _report_length(recipe, total, say)
    return state, data


def _check_devices(recipe: Recipe, strategy: tf.distribute.Strategy) -> None:
    """Raise a ValueError for settings that these devices cannot train with."""
    replicas = strategy.num_replicas_in_sync
    number = 1 if recipe.accumulation == "auto" else recipe.accumulation
    if recipe.batch_size % (replicas * number):
        raise ValueError(
            f"batch_size must be a multiple of replicas x accumulation = {replicas} x {number}. "
            f"Received: {recipe.batch_size}"
        )
    is_bfloat16 = recipe.momentum_dtype == "bfloat16"
    if is_bfloat16 and strategies.has_workers(strategy) and not tf.config.list_logical_devices("GPU"):
        raise ValueError(
            "TensorFlow cannot send bfloat16 variables between workers without GPUs: set momentum_dtype='float32'. "
            f"Received: {recipe.momentum_dtype!r:.200}"
        )


def _fit_memory(
    recipe: Recipe,
    configs: tuple[ViTConfig, ViTConfig | None],
    devices: tf.distribute.Strategy,
    *,
    out: str | os.PathLike[str] | None,
    total: int,
    say: Say,
) -> Recipe:
    """Return the recipe with a number of micro-batches, after a check that they fit; `configs`: model and teacher."""
    found = checkpoints.newest(f"{storage.plain_path(out)}/checkpoints") if out is not None else None
    replicas, room = devices.num_replicas_in_sync, memory.device_memory(strategies.local_replicas(devices))
    is_auto = recipe.accumulation == "auto"
    if is_auto:
        saved = found[1]["facts"].get("recipe") if found else None
        number: Any = saved.get("accumulation") if isinstance(saved, dict) else None
        if not is_count(number, least=1) or recipe.batch_size % (replicas * number):
            number = memory.fewest_micro_batches(recipe, *configs, replicas=replicas, memory=room)
        recipe = recipe.replace(accumulation=strategies.largest(number, devices))
    if found and found[1]["step"] >= total:
        return recipe  # the run is finished: nothing has to fit
    planned = memory.plan_step(recipe, *configs, replicas=replicas)
    memory.check_memory(recipe, planned, memory=room)
    if is_auto and planned.micro_batch * replicas < recipe.batch_size:
        of = f" of {byte_size(room)}" if room is not None else ""
        each = f" on each of {replicas} devices" if replicas > 1 else ""
        say(
            f"batch {recipe.batch_size:,} is computed as {recipe.accumulation} micro-batches of {planned.micro_batch}"
            f"{each}: {byte_size(planned.total)}{of}"
        )
    return recipe


def _report_length(recipe: Recipe, total: int, say: Say) -> None:
    """Say that a short run has a short warm-up; warn of a moving average that is longer than the run."""
    stated, changes = (recipe.origin.stated, recipe.origin.changes) if recipe.origin else ({}, {})
    own = stated.get("warmup_steps")
    if own and recipe.warmup_steps != own and not changes.keys() & {"warmup_steps", "warmup_fraction"}:
        say(f"warm-up: {recipe.resolved_warmup(total):,} of {total:,} steps; the longer recipe has {own:,}")
    share = recipe.ema_decay**total if recipe.ema_decay else 0.0
    if share > 0.1:
        warnings.warn(
            f"keras_vit: with ema_decay={recipe.ema_decay} the average after {total:,} steps is {share:.0%} the "
            f"starting weights. For this length set ema_decay={0.01 ** (1 / total):.4g} or lower.",
            stacklevel=4,
        )
