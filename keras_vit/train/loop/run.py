"""A whole training run: data in, model out, and on the way everything that lets it be stopped at any moment."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import tensorflow as tf

from keras_vit.errors import Diverged
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.sources import open_data
from keras_vit.train.loop import prepare, storage
from keras_vit.train.loop.progress import Progress
from keras_vit.train.loop.result import Result
from keras_vit.train.loop.saves import exclusive
from keras_vit.train.loop.stop import Stop
from keras_vit.train.loop.trainer import Trainer
from keras_vit.train.step import distribute

__all__ = ["Diverged", "Result", "run"]


def run(
    recipe: Recipe,
    *,
    model: str | os.PathLike[str] | ViTConfig | VisionTransformer,
    data: Any = "digits",
    out: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    strategy: str | tf.distribute.Strategy = "auto",
    data_dir: str | os.PathLike[str] | None = None,
    train_split: str | None = None,
    eval_split: str | None = None,
    on_bad_image: str = "skip",
    progress: bool = True,
) -> Result:
    """Trains a model by a recipe. Called again with the same `out` it goes on where it was stopped or killed, exactly.

    Args:
        recipe: `train.recipe("finetune", steps=500)`.
        model: a name of the zoo, a checkpoint, a config (random weights) or a model, which is left as it is.
        data: a data set of tensorflow-datasets, a folder of folders of images, a folder of prepared records, or
            {"train": (images, labels), "evaluation": (images, labels)} of uint8 arrays.
        out: folder for model, log and checkpoints; None keeps nothing.
        weights: for a name: what to begin with, a tag of its card, a path or URL.
        strategy: as `train.strategy` takes, or what it gave.
        data_dir: where tensorflow-datasets keeps what it prepared; None is its own folder.
        train_split: the part to train on: a split such as "train[:90%]", or a folder's name.
        eval_split: the part to evaluate on, likewise.
        on_bad_image: "skip" leaves out, and counts, files of a folder that cannot be decoded; "fail" is an error.
        progress: whether to show a progress bar.

    Raises:
        ValueError: for anything that does not fit, before the first step.
        Diverged: the loss or a weight is not finite; checkpoints from before are kept.
        CheckpointError: `out` holds a run of another recipe, model or data, or nothing but damaged checkpoints.
    """
    chosen = distribute.strategy(strategy) if isinstance(strategy, str) else strategy
    recipe = recipe.for_model(model) if isinstance(model, str) else recipe
    _check(recipe, chosen)
    opened = open_data(
        data, data_dir=data_dir, train_split=train_split, eval_split=eval_split, on_bad_image=on_bad_image
    )
    source = prepare.opened(recipe, model, weights=weights)
    trainer = Trainer(recipe, source, opened, chosen)
    folder = None if out is None else storage.made_folder(out)
    with contextlib.ExitStack() as stack:
        if folder is not None and trainer.chief:
            stack.enter_context(exclusive(folder))
        stop = stack.enter_context(Stop())
        bar = stack.enter_context(Progress(show=progress and trainer.chief))
        return trainer.result(folder, stop, bar)


def _check(recipe: Recipe, strategy: tf.distribute.Strategy) -> None:
    """What of a recipe depends on the devices."""
    replicas = strategy.num_replicas_in_sync
    if recipe.batch_size % (replicas * recipe.accumulation):
        raise ValueError(
            f"batch_size must be a multiple of replicas x accumulation = {replicas} x {recipe.accumulation}. "
            f"Received: {recipe.batch_size}"
        )
    workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if workers and recipe.momentum_dtype == "bfloat16" and not tf.config.list_logical_devices("GPU"):
        raise ValueError(
            "TensorFlow cannot send bfloat16 variables between workers without GPUs: set momentum_dtype='float32'. "
            f"Received: {recipe.momentum_dtype!r}"
        )
