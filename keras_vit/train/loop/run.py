"""Run a whole training: build the parts, restore them, train, evaluate, write the model."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_vit._util.progress import counter
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.sources import Data, open_data
from keras_vit.train.loop import prepare, storage
from keras_vit.train.loop.checkpoints import Checkpoints, exclusive
from keras_vit.train.loop.log_files import Log, plot
from keras_vit.train.loop.metrics import MetricLogger
from keras_vit.train.loop.steps import TrainingSteps, training_split
from keras_vit.train.loop.stop import Stop
from keras_vit.train.loop.training import train
from keras_vit.train.measure.evaluation import evaluate
from keras_vit.train.step import strategies
from keras_vit.train.step.state import TrainState

# Fields that a continued run may change: they do not influence the weights.
CHANGEABLE_FIELDS = ("log_steps", "checkpoint_steps", "checkpoint_minutes", "keep", "eval_steps", "steps_per_call")


@dataclass(frozen=True)
class Result:
    """Result of a training run.

    Args:
        model: with the final weights or their moving averages, outside of any strategy; after masked_patch the encoder.
        recipe: the recipe that was used.
        metrics: results of the last evaluation: "accuracy" and "top5" in [0, 1], "loss"; empty without held-out images.
        history: lines that this process logged: dicts with "step" and metrics.
        steps: number of steps done, those before a restart included.
        images_per_second: training speed, in this process.
        skipped: number of training images that were left out because they cannot be decoded.
        unread: number of other files and folders in the class folders of a folder, which are not read.
        out: folder with the model, log and checkpoints; None if none was given, or another worker writes.
        stopped: whether a signal ended the run early; the same call continues it.

    Example:
        >>> import dataclasses
        >>> [field.name for field in dataclasses.fields(keras_vit.train.Result)][:3]
        ['model', 'recipe', 'metrics']
    """

    model: VisionTransformer
    recipe: Recipe
    metrics: dict[str, float]
    history: list[dict[str, float]]
    steps: int
    images_per_second: float
    skipped: int
    unread: int
    out: str | None
    stopped: bool


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
    """Train a model by a recipe; with the `out` of a run that was stopped or killed, continue that run.

    A continued run ends with the same weights, bit for bit, as one that was not interrupted.

    Args:
        recipe: such as `train.recipe("finetune", steps=500)`.
        model: a name of the zoo, a checkpoint, a config (random weights) or a model, which is not changed.
        data: a data set of tensorflow-datasets, a folder of folders of images, a folder of prepared records, or
            {"train": (images, labels), "evaluation": (images, labels)}: uint8 (n, height, width, channels), and
            integers (n,) or zeros and ones (n, classes).
        out: folder for model, log and checkpoints; None writes no files.
        weights: initial weights for a model's name: a tag of its card, a path or a URL.
        strategy: name as for `train.strategy`, or its result.
        data_dir: where tensorflow-datasets keeps prepared data; None for its default folder.
        train_split: part to train on: a split such as "train[:90%]", the name of a sub-folder, or "all" of a folder.
        eval_split: part to evaluate on, in the same form.
        on_bad_image: "skip" leaves out, and counts, files of a folder that cannot be decoded; "fail" raises an error.
        progress: whether to show a progress bar on a terminal.

    Raises:
        ValueError: An argument is not valid; before the first step.
        Diverged: Loss or weights are not finite; earlier checkpoints are kept.
        CheckpointError: `out` holds a run with another recipe, model or data, or only damaged checkpoints.

    Example:
        >>> config = keras_vit.ViTConfig.from_name("Ti/8", image_size=16, num_layers=1, hidden_size=12)
        >>> recipe = keras_vit.train.recipe("digits", steps=1, batch_size=8, optimizer="sgd", xla=False)
        >>> images, labels = np.zeros((8, 16, 16, 3), "uint8"), np.arange(8)
        >>> result = keras_vit.train.run(recipe, model=config, data={"train": (images, labels)}, progress=False)
        >>> result.steps, result.stopped
        (1, False)
    """
    devices = strategies.strategy(strategy) if isinstance(strategy, str) else strategy
    recipe, chosen = prepare.choose_model(recipe, model, weights)
    _check_devices(recipe, devices)
    dataset = open_data(
        data, data_dir=data_dir, train_split=train_split, eval_split=eval_split, on_bad_image=on_bad_image
    )
    split = training_split(dataset)

    source = prepare.load_model(recipe, chosen)
    recipe, dataset = prepare.match_head(recipe, source.config, dataset)
    with devices.scope():
        adapted = prepare.adapt_model(recipe, source, num_classes=dataset.num_classes, class_names=dataset.class_names)
        state = TrainState(recipe, adapted, total_steps=recipe.resolved_steps(split.count))
    final = adapted.rebuilt(adapted.config)  # outside of the strategy
    is_chief = strategies.is_chief(devices)
    evaluate_final = functools.partial(_evaluate, state, final, dataset if is_chief else None)
    folder = None if out is None else storage.make_folder(out)

    with contextlib.ExitStack() as stack:
        if folder is not None and is_chief:
            stack.enter_context(exclusive(folder))
        stop = stack.enter_context(Stop())
        checkpoints = None if folder is None else _open_checkpoints(folder, state, dataset, is_chief=is_chief)
        restored = checkpoints.restore() if checkpoints else None
        start, total = restored or 0, state.total_steps
        log = Log(folder, last_step=restored) if folder is not None and is_chief else None
        bar = stack.enter_context(counter("Training", total=total, done=start, show=progress and is_chief))
        logger = MetricLogger(log, bar, batch_size=recipe.batch_size)

        if start < total:
            steps = TrainingSteps(state, dataset, strategy=devices)
            metrics = train(state, steps, logger=logger, checkpoints=checkpoints, evaluate=evaluate_final, stop=stop)
        else:  # the log of a finished run has these metrics already
            metrics = evaluate_final()
        state.copy_to(final)
        if log:
            log.close()
        if folder is not None and is_chief and metrics is not None:
            _save_model(final, f"{folder}/model.keras")
            if importlib.util.find_spec("matplotlib"):  # the extra `plots`
                plot(folder)

    return Result(
        model=final,
        recipe=recipe,
        metrics=metrics or {},
        history=logger.history,
        steps=int(state.step.numpy()),
        images_per_second=logger.images_per_second,
        skipped=len(split.bad),
        unread=len(split.unread),
        out=folder if is_chief else None,
        stopped=metrics is None,
    )


def _check_devices(recipe: Recipe, strategy: tf.distribute.Strategy) -> None:
    """Raise a ValueError for settings that these devices cannot train with."""
    replicas = strategy.num_replicas_in_sync
    if recipe.batch_size % (replicas * recipe.accumulation):
        raise ValueError(
            f"batch_size must be a multiple of replicas x accumulation = {replicas} x {recipe.accumulation}. "
            f"Received: {recipe.batch_size}"
        )
    is_bfloat16 = recipe.momentum_dtype == "bfloat16"
    if is_bfloat16 and strategies.has_workers(strategy) and not tf.config.list_logical_devices("GPU"):
        raise ValueError(
            "TensorFlow cannot send bfloat16 variables between workers without GPUs: set momentum_dtype='float32'. "
            f"Received: {recipe.momentum_dtype!r}"
        )


def _open_checkpoints(folder: str, state: TrainState, data: Data, *, is_chief: bool) -> Checkpoints:
    facts = {
        "recipe": state.recipe.to_dict(),
        "model": state.model.config.to_dict(),
        "data": {"name": data.name, "count": training_split(data).count, "num_classes": data.num_classes},
    }
    return Checkpoints(
        f"{folder}/checkpoints",
        state.variables,
        keep=state.recipe.keep,
        facts=facts,
        may_differ=[f"recipe.{name}" for name in CHANGEABLE_FIELDS],
        may_be_added=["model.labels"],  # earlier versions did not always keep the class names
        writes=is_chief,
    )


def _evaluate(state: TrainState, model: VisionTransformer, data: Data | None) -> dict[str, float]:
    """Copy the state's weights into a model and evaluate it, if there are held-out images with labels."""
    state.copy_to(model)
    if data is None or data.evaluation is None or state.recipe.objective == "masked_patch":
        return {}
    found = evaluate(model, data, labels="real" if data.multi_label else "single")
    return {"accuracy": found.top1, "top5": found.top5, "loss": found.loss}


def _save_model(model: VisionTransformer, path: str) -> None:
    """Write a .keras file, complete or not at all, to a local path or a bucket."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "model.keras"
        keras.saving.save_model(model, local)
        storage.replace(path, local.read_bytes())
