"""Find a linear head in closed form: compute the features of every image once, then solve for the head.

The features, or with many images their sums, are variables of the run's checkpoints, so that a run that was stopped or
killed computes the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit._util.progress import counter
from keras_vit._util.text import image_rate
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import count_model, cpu_seconds, say_time
from keras_vit.model.task import Classification
from keras_vit.model.vision_transformer import VisionTransformer, hash_weights
from keras_vit.train import prepare, strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train.checkpoints import Checkpoints
from keras_vit.train.data.pipeline import ModelInput
from keras_vit.train.data.split import Data
from keras_vit.train.evaluation import balanced_accuracy, distribute_batches, replicate
from keras_vit.train.few_shots import feature_collector
from keras_vit.train.held_out import TRAINING_NAMES, Outcome
from keras_vit.train.label_check import TWO_CLASSES, class_weights
from keras_vit.train.least_squares import (
    ADDED,
    MOST_FOLDED,
    Columns,
    Kept,
    Regressions,
    Summed,
    cross_validate,
    draw_held_out,
)
from keras_vit.train.log_files import Log
from keras_vit.train.prepare import PrintLine
from keras_vit.train.solved_probe import SolvedProbe, describe
from keras_vit.train.stop import Stop, describe_wait, in_thread

# What a message adds.
INSTEAD = ". Without one: optimizer='sgd' (linear-probe), or head_start='zeros', freeze=[] and a larger learning_rate"
LAYER = "pre_logits"  # the head's input
# Fields that a probe reads, and those that the commands change for every recipe.
USED_FIELDS = {"optimizer", "linear_probe", "layers", "batch_size", "image_size", "config", "precision", "seed"}
USED_FIELDS |= {"checkpoint_minutes", "keep", "start", "accumulation", "reset_head", "class_weights"}


class Probe:
    """The state of a probe in memory: a model with a head of zeros, and what is known of its features."""

    has_curves = False  # a line of its log is a choice, not a step

    def __init__(
        self, recipe: Recipe, model: Any, data: Data, devices: tf.distribute.Strategy, print_line: PrintLine
    ) -> None:
        _check(recipe, data, devices)
        source = prepare.check_task(recipe, prepare.load_model(recipe, model), data)
        if not isinstance(source, VisionTransformer):
            raise ValueError(f"A linear probe needs a VisionTransformer{INSTEAD}. Received: {source.name!r}, of maps")
        if source.config.distilled:
            raise ValueError(f"A model with two heads has no single linear probe{INSTEAD}. Received: distilled")
        recipe = recipe.replace(reset_head=True)
        self.recipe = prepare.fit_size(recipe, model, source.config, data, print_line=print_line)
        self.model: VisionTransformer = prepare.adapt_model(
            self.recipe, source, num_classes=data.num_classes, class_names=data.class_names
        )
        self.strategy = devices
        self._data, self._print_line = data, print_line
        self._weights = class_weights(recipe, data)
        self._splits = [split for split in (data.training_split(), data.evaluation) if split is not None]
        self.total = sum(split.count for split in self._splits)
        width, classes, count = self.model.config.feature_size, data.num_classes, self._splits[0].count
        is_kept = np.ones(self.total, bool)
        self._sums: dict[str, tf.Variable] = {}
        if count > max(width, MOST_FOLDED):  # their features are summed, but for those that choose
            is_kept[:count] = False
            is_kept[draw_held_out(self._splits[0].labels(), recipe.seed)] = True
            empty = Summed.empty(width, classes)
            self._sums = {
                name: tf.Variable(value, trainable=False)
                for name, value in (("products", empty.products), ("sums", empty.sums))
            }
        self._kept = np.flatnonzero(is_kept)  # images whose features are kept
        self._features = tf.Variable(tf.zeros((len(self._kept), width)), trainable=False)
        self._done = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """All variables of a checkpoint, by name."""
        return {"done": self._done, "features": self._features, **self._sums}

    def facts(self) -> dict[str, Any]:
        """Facts of a checkpoint: the weights that the features depend on, because those of two models must not mix."""
        weights = (weight for weight in self.model.weights if not weight.path.startswith("head/"))
        return {"weights": hash_weights(weights)[:16]}

    def accept_other_data(self, checkpoints: Checkpoints) -> str:
        """Begin again, because the features are of other images; return this in words."""
        for variable in (self._done, *self._sums.values()):
            variable.assign(tf.zeros_like(variable))
        checkpoints.clear()
        return "all features are computed again"

    def run(self, checkpoints: Checkpoints | None, stop: Stop, *, show: bool) -> Outcome:
        """Compute the features that are missing and fit the head."""
        folder = checkpoints.run_folder if checkpoints else None
        log = Log(folder) if folder is not None else None
        if done := int(self._done.numpy()):
            self._print_line(f"{folder} continues after {done:,} of {self.total:,} images.")
        try:
            speed = self.compute(checkpoints, stop, show=show)
        except KeyboardInterrupt:  # the second Ctrl-C
            if checkpoints:
                with stop.held():
                    checkpoints.save(int(self._done.numpy()))
            raise
        metrics, history, temperature = ({}, [], None) if speed is None else self.fit(folder)
        if log:
            for line in history:
                log.write(**line)
            log.close()
        is_stopped = speed is None
        steps = int(not is_stopped)
        return Outcome(self.model, metrics, history, steps, speed or 0.0, is_stopped, temperature=temperature)

    def compute(self, checkpoints: Checkpoints | None, stop: Stop, *, show: bool) -> float | None:
        """Compute the features that are missing; return the images per second, or None after a request to stop."""
        collect = feature_collector(replicate(self.model, self.strategy), LAYER, self.strategy)
        start = saved_at = time.monotonic()
        first = done = end = int(self._done.numpy())
        waiting: list[list[np.ndarray]] = []  # features, labels and rows of images after the first `done`
        part = f"this batch of {self.recipe.batch_size} images"
        seconds: float | None = None  # of a batch
        guess = None
        if strategies.is_cpu():
            guess = cpu_seconds(self.recipe.batch_size * count_model(self.model).flops)
            if show:
                say_time(self.model, self.total - done, "--image-size")
        saves = checkpoints is not None
        minutes = self.recipe.checkpoint_minutes
        with (
            counter("Computing features", total=self.total, done=done, show=show) as advance,
            stop.during("reading the next images", saves=saves),
        ):
            for offset, batch in self._batches(done):
                before = end
                if batch is not None and stop.requested:
                    if checkpoints:
                        with stop.held():
                            checkpoints.save(done)
                    return None
                if batch is None:  # the end of a split, whose last images may have been left out
                    end = offset
                else:
                    began = time.monotonic()
                    with stop.during(describe_wait(part, seconds, guess=guess), saves=saves):
                        features, labels, indices = in_thread(collect, [batch])
                    seconds = time.monotonic() - began
                    waiting.append([features, labels, offset + indices])
                    end = offset + int(indices.max(initial=before - offset - 1)) + 1
                advance(end - before, image_rate((end - first) / (time.monotonic() - start)))
                # Sums are added up in the same blocks whenever the run was stopped: they are the same to the bit.
                if not self._sums or batch is None or end - done >= ADDED:
                    with stop.held():
                        self._keep(waiting)
                        done = end
                        self._done.assign(done)
                    waiting = []
                is_old = minutes is not None and time.monotonic() - saved_at > 60 * minutes
                if checkpoints and (stop.requested or is_old or done == self.total):
                    with stop.held():
                        checkpoints.save(done)
                    saved_at = time.monotonic()
                if stop.requested and done < self.total:
                    return None
        return (end - first) / (time.monotonic() - start)

    def _keep(self, waiting: list[list[np.ndarray]]) -> None:
        """Keep the features of some images, or add them up."""
        if not waiting:
            return
        features, labels, images = (np.concatenate(values) for values in zip(*waiting, strict=True))
        places = np.searchsorted(self._kept, images)
        is_kept = np.isin(images, self._kept)
        self._features.scatter_update(tf.IndexedSlices(features[is_kept], places[is_kept]))
        if self._sums and not is_kept.all():
            part = Summed.empty(features.shape[1], self._data.num_classes, self._weights)
            part.add(features[~is_kept], labels[~is_kept])
            self._sums["products"].assign_add(part.products)
            self._sums["sums"].assign_add(part.sums)

    def _batches(self, done: int) -> Iterator[tuple[int, Any]]:
        """Yield the batches of the images after the first `done`, each with the row of its split's first image.

        After the last batch of a split comes None, with the row after the split.
        """
        offset = 0
        for split in self._splits:
            if done < offset + split.count:
                batches = distribute_batches(
                    split,
                    self.strategy,
                    only=np.arange(max(0, done - offset), split.count),
                    batch_size=self.recipe.batch_size // self.strategy.num_replicas_in_sync,
                    model_input=ModelInput.from_model(self.model),
                    task=self._data.task,
                )
                yield from ((offset, batch) for batch in batches)
                yield offset + split.count, None
            offset += split.count

    def fit(self, folder: str | None) -> tuple[dict[str, float], list[dict[str, Any]], float]:
        """Set the head; return its metrics on held-out images ({} without any), the log's lines, the temperature.

        The folder gets what the head was solved from.
        """
        regressions, held_out, held_out_labels = self._regressions()
        config = self.model.config
        columns = {blocks: block_columns(config, blocks) for blocks in _numbers_of_blocks(self.recipe, config)}
        candidates = cross_validate(regressions, columns)
        best = min(candidates, key=lambda candidate: candidate.loss)
        blocks = "block" if best.blocks == 1 else f"{best.blocks} blocks"
        words = f"of the last {blocks}, " if len(columns) > 1 else ""
        self._print_line(
            f"features {words}regularisation {best.strength:g} for each image: accuracy {best.accuracy:.4f} on "
            "training images that the fits had not seen"
        )
        kernel, bias = regressions.head(columns[best.blocks], best.strength * regressions.count)
        if best.blocks != config.num_read_blocks:
            self.model = self.model.with_config(prepare.read_blocks(config, best.blocks))
        head, task = self.model.get_layer("head"), self.model.task
        head.set_weights([best.scale * kernel, best.scale * bias])
        if folder is not None and self._weights is None:  # the weights of classes would change with their images
            SolvedProbe(
                regressions.equations(columns[best.blocks]),
                (held_out[:, columns[best.blocks]], held_out_labels),
                self._data.class_names,
                best.strength,
                best.scale,
                describe(self.model, self.recipe.to_dict()),
            ).write(folder)
        history: list[dict[str, Any]] = [
            {"step": number, **{f"fold_{name}": value for name, value in candidate._asdict().items()}}
            for number, candidate in enumerate(candidates, 1)
        ]
        if not len(held_out):
            return {}, history, 1 / best.scale
        logits = held_out[:, columns[best.blocks]] @ np.asarray(head.kernel) + np.asarray(head.bias)
        targets = task.targets(tf.constant(held_out_labels))
        sums = task.sums(logits, targets, np.ones(len(held_out), np.float32))
        means = task.means(dict(zip(task.sum_names, sums.numpy().tolist(), strict=True)))
        metrics = {TRAINING_NAMES.get(name, name): value for name, value in means.items()}
        if self._weights is not None:
            metrics["balanced_accuracy"] = balanced_accuracy(held_out_labels, logits.argmax(axis=1))
        history.append({"step": len(candidates), **{f"evaluation_{name}": value for name, value in metrics.items()}})
        return metrics, history, 1 / best.scale

    def _check_classes(self, kept: np.ndarray) -> None:
        """Raise a ValueError if images that cannot be read leave fewer than two classes; `kept` are counts."""
        summed = self._sums["sums"].numpy()[:, -1] if self._sums else 0
        found = [self._data.class_names[number] for number in np.flatnonzero(kept + summed)]
        if len(found) < 2:
            split = self._splits[0]
            reason = f" {split.num_skipped:,} of {split.count:,} images cannot be read." if split.num_skipped else ""
            raise ValueError(f"{self._data.name}: {TWO_CLASSES}.{reason} Received: images of {found or 'no class'}")

    def _regressions(self) -> tuple[Regressions, np.ndarray, np.ndarray]:
        """Regressions on the training images; the features and labels of the held-out ones."""
        features, classes, count = self._features.numpy(), self._data.num_classes, self._splits[0].count
        parts = []
        for split, offset in zip(self._splits, (0, count), strict=False):
            own = (self._kept >= offset) & (self._kept < offset + split.count)
            images = self._kept[own] - offset
            split.expect(self.model.config.num_channels, self.model.config.preprocessing)
            # A run that continues does not know yet which images the earlier process left out.
            used = np.array([split.is_readable(image) for image in images.tolist()], bool)
            parts.append((features[own][used], split.labels()[images[used]]))
        (train, labels), (held_out, held_out_labels) = [*parts, (features[:0], np.zeros(0, np.int64))][:2]
        if len(labels) < 2:
            raise ValueError(f"A probe needs at least 2 training images. Received: {len(labels)} in {self._data.name}")
        self._check_classes(np.bincount(labels, minlength=classes))
        if not self._sums:
            kept = Kept(train, labels, num_classes=classes, seed=self.recipe.seed, class_weights=self._weights)
            return kept, held_out, held_out_labels
        products, sums = (self._sums[name].numpy() for name in ("products", "sums"))
        summed = Summed(products, sums, held_out=(train, labels), class_weights=self._weights)
        return summed, held_out, held_out_labels


def block_columns(config: ViTConfig, blocks: int) -> Columns:
    """Columns of a model's feature that the feature of fewer blocks has."""
    fewer = prepare.read_blocks(config, blocks).feature_parts
    return np.flatnonzero(np.repeat([part in fewer for part in config.feature_parts], config.hidden_size))


def _numbers_of_blocks(recipe: Recipe, config: ViTConfig) -> list[int]:
    """Numbers of last blocks that are tried: the own feature, or one block and as many as the model reads."""
    return [config.num_read_blocks] if recipe.layers == 1 else sorted({1, config.num_read_blocks})


def _check(recipe: Recipe, data: Data, devices: tf.distribute.Strategy) -> None:
    """Raise a ValueError for fields that a probe would ignore, and for data and devices that it does not take."""
    ignored = sorted((recipe.changed or set()) - USED_FIELDS)
    if ignored:
        raise ValueError(
            f"optimizer='least_squares' computes each image once and solves for the head: it has no use for {ignored}. "
            "Leave them out, or train the head in steps with optimizer=sgd (--set optimizer=sgd)"
        )
    if data.multi_label or type(data.task) is not Classification:
        raise ValueError(f"A linear probe needs one class for each image{INSTEAD}. Received: {data.name}")
    if strategies.has_workers(devices):
        raise ValueError(f"A linear probe runs on one machine{INSTEAD}. Received: several")
    if recipe.batch_size % devices.num_replicas_in_sync:
        raise ValueError(
            f"batch_size must be a multiple of the {devices.num_replicas_in_sync} replicas. "
            f"Received: {recipe.batch_size}"
        )
