"""The loop of a training run, and what happens between its steps: log, checkpoints, evaluation, the end."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit.errors import Diverged
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train._recipe import Recipe
from keras_vit.train.data import pipeline
from keras_vit.train.data.sources import Data, Order
from keras_vit.train.loop import storage
from keras_vit.train.loop.journal import Journal
from keras_vit.train.loop.logs import Log, plot
from keras_vit.train.loop.progress import Progress
from keras_vit.train.loop.result import Result
from keras_vit.train.loop.saves import Saves
from keras_vit.train.loop.session import Session
from keras_vit.train.loop.stop import Stop
from keras_vit.train.measure.evaluation import evaluate
from keras_vit.train.step import distribute

# What a continued run may change: none of it reaches the weights.
CADENCE = ("log_steps", "checkpoint_steps", "checkpoint_minutes", "keep", "eval_steps", "steps_per_call")


class Trainer:
    """One process' part of a run.

    Args:
        recipe: how to train.
        source: the model to begin with.
        data: what to train and evaluate on.
        strategy: of tf.distribute.

    Raises:
        ValueError: without training images, or for a recipe that does not fit the model.
    """

    def __init__(self, recipe: Recipe, source: VisionTransformer, data: Data, strategy: tf.distribute.Strategy) -> None:
        if data.train is None:
            raise ValueError(f"{data.name} has no training images")
        self.recipe, self.data, self.strategy = recipe, data, strategy
        self.split = data.train
        self.chief = distribute.is_chief(strategy)
        self.alone = not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.session = Session(
            recipe,
            source,
            images=data.train.count,
            num_classes=data.num_classes,
            class_names=data.class_names,
            strategy=strategy,
        )
        # What is measured and handed out: outside of the strategy, with the averages where there are any.
        self.plain = self.session.model.rebuilt(self.session.model.config)
        self.since_save = time.monotonic()

    def result(self, out: str | None, stop: Stop, bar: Progress) -> Result:
        """Trains to the end, or until somebody asks to stop.

        Args:
            out: folder for model, log and checkpoints, None for none.
            stop: asked at every call of the training function.
            bar: to draw on.
        """
        self.saves = None if out is None else self._saves(out)
        log = Log(out) if out is not None and self.chief else None
        self.journal = Journal(log, bar, batch_size=self.recipe.batch_size)
        restored = self.saves.restore() if self.saves else None
        if log:
            log.resume(restored)
        bar.start(self.session.total, restored or 0)
        stopped = self._train(restored or 0, stop)
        self.session.copy_to(self.plain)
        metrics = {} if stopped else self._finish(out, again=restored == self.session.total)
        if log:
            log.close()
        if out is not None and not stopped and self.chief and importlib.util.find_spec("matplotlib"):  # extra `plots`
            plot(out)
        return Result(
            model=self.plain,
            recipe=self.recipe,
            metrics=metrics,
            history=self.journal.history,
            steps=int(self.session.step.numpy()),
            images_per_second=self.journal.images_per_second,
            skipped=len(self.split.bad),
            out=out if self.chief else None,
            stopped=stopped,
        )

    def _saves(self, out: str) -> Saves:
        facts = {
            "recipe": self.recipe.to_dict(),
            "model": self.session.model.config.to_dict(),
            "data": {"name": self.data.name, "count": self.split.count, "num_classes": self.data.num_classes},
        }
        may_differ = [f"recipe.{name}" for name in CADENCE]
        return Saves(
            f"{out}/checkpoints", self.session.variables, keep=self.recipe.keep, facts=facts, may_differ=may_differ
        )

    def _train(self, done: int, stop: Stop) -> bool:
        """Takes all steps from `done` on; True where it was asked to stop before the last."""
        total = self.session.total
        batches = self._batches(done) if done < total else iter(())
        while done < total:
            count = self._until_event(done)
            asked = stop.requested
            with self._naming_bad_images(done, count):
                figures = self.session.train(batches, tf.constant(count), tf.constant(float(asked)))
            done += count
            self.journal.add(count, figures)
            # Workers learn from the figures that one was asked to stop, and all look at them after the same step.
            if (asked and self.alone) or self._is_due("log_steps", done):
                stopping = self._report(done)
                if stopping and done < total:
                    self._save(done)
                    return True
            with self.journal.pause():
                self._at_events(done)
        return False

    def _report(self, done: int) -> bool:
        """Logs the steps since the last report; whether somebody was asked to stop in them."""
        rate = float(self.session.optimizer.rate(tf.constant(done - 1, tf.int64)))
        figures = self.journal.report(done, learning_rate=rate)
        if not np.isfinite(figures["loss"] + figures["gradient_norm"]):
            what = f"the loss is {figures['loss']}, the gradient's norm {figures['gradient_norm']}"
            raise Diverged(self._told(done, what))
        return figures["stop"] > 0

    @contextlib.contextmanager
    def _naming_bad_images(self, done: int, count: int) -> Iterator[None]:
        """TensorFlow says that something cannot be decoded; this says what."""
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            order = Order(batch=self.recipe.batch_size, seed=self.recipe.seed, start=done)
            bad = self.split.first_bad(order, batches=count)
            if bad is None:
                raise
            raise ValueError(f"Step {done + 1}: {bad} cannot be decoded. Mend or remove it.") from error

    def _batches(self, start: int) -> Iterator[Any]:
        config, recipe, split = self.session.model.config, self.recipe, self.split

        def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
            local = context.num_replicas_in_sync // context.num_input_pipelines
            order = Order(
                batch=recipe.batch_size,
                seed=recipe.seed,
                start=start,
                replicas=context.num_replicas_in_sync,
                first_replica=context.input_pipeline_id * local,
                local_replicas=local,
            )
            return pipeline.training_batches(
                split,
                recipe,
                image_size=config.size,
                num_channels=config.num_channels,
                preprocessing=config.preprocessing,
                num_classes=self.data.num_classes,
                order=order,
            )

        return iter(self.strategy.distribute_datasets_from_function(of_worker))

    def _until_event(self, done: int) -> int:
        """Steps of the next call: up to `steps_per_call`, to the next event, or to the end."""
        events = [getattr(self.recipe, name) for name in ("log_steps", "checkpoint_steps", "eval_steps")]
        distances = [every - done % every for every in events if every]
        return min(self.recipe.steps_per_call, self.session.total - done, *distances)

    def _is_due(self, name: str, done: int) -> bool:
        every = getattr(self.recipe, name)
        return done == self.session.total or bool(every and done % every == 0)

    def _at_events(self, done: int) -> None:
        if done == self.session.total:
            return  # the end has its own evaluation and checkpoint
        if self._is_due("eval_steps", done):
            self.session.copy_to(self.plain)
            self._log_evaluation(done, self._evaluate())
        minutes = self.recipe.checkpoint_minutes
        if self._is_due("checkpoint_steps", done) or (
            minutes and time.monotonic() - self.since_save > 60 * minutes and self._is_due("log_steps", done)
        ):
            self._save(done)

    def _told(self, done: int, what: str) -> str:
        kept = self.saves.steps() if self.saves else []
        last = f"the checkpoint of step {kept[-1]} is kept" if kept else "there is no checkpoint from before"
        return f"Training diverged before step {done}: {what}; {last}. Lower learning_rate, or set clip_norm."

    def _save(self, done: int) -> None:
        if not self.session.is_finite():
            raise Diverged(self._told(done, "a weight is no finite number"))
        if self.saves is None or not self.chief:
            return
        self.journal.settle()  # before: what belongs to a step is never missing after it
        self.saves.save(done)
        self.since_save = time.monotonic()

    def _evaluate(self) -> dict[str, float]:
        if self.data.evaluation is None or self.recipe.objective == "masked_patch" or not self.chief:
            return {}
        found = evaluate(self.plain, self.data, labels="real" if self.data.multi_label else "single")
        return {"accuracy": found.top1, "top5": found.top5, "loss": found.loss}

    def _log_evaluation(self, done: int, figures: Mapping[str, float]) -> None:
        if figures:
            self.journal.write(done, {f"evaluation_{name}": value for name, value in figures.items()})

    def _finish(self, out: str | None, *, again: bool) -> dict[str, float]:
        """Evaluates, and writes what stays; where a finished run is called again its log has the line already."""
        done = self.session.total
        metrics = self._evaluate()
        if not again:
            self._log_evaluation(done, metrics)
        self._save(done)
        if out is not None and self.chief:
            save_model(self.plain, f"{out}/model.keras")
        return metrics


def save_model(model: VisionTransformer, path: str) -> None:
    """Writes a .keras file whole or not at all, to a local path or a bucket."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "model.keras"
        keras.saving.save_model(model, local)
        storage.replace(path, local.read_bytes())
