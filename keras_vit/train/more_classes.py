"""Add classes and images to a finished linear probe, without the images that it was trained on.

With the features of more images the equations of the probe are solved again: the head is that of a probe of all images,
at the same strength of the regularisation for each image.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit._util.progress import print_line, track
from keras_vit._util.text import abbreviated, warn
from keras_vit.model.labels import loose_name
from keras_vit.model.task import Classification
from keras_vit.model.vision_transformer import HEADS, VisionTransformer
from keras_vit.train import strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train.checkpoints import FINAL_MODEL, RUN_FILES, make_folder, plain_path
from keras_vit.train.data.pipeline import ModelInput
from keras_vit.train.data.sources import open_data
from keras_vit.train.data.split import Data, check_kind
from keras_vit.train.evaluation import distribute_batches, replicate
from keras_vit.train.execute import Result
from keras_vit.train.few_shots import feature_collector
from keras_vit.train.held_out import save_model
from keras_vit.train.least_squares import Fold
from keras_vit.train.probe import LAYER
from keras_vit.train.solved_probe import SolvedProbe, describe
from keras_vit.zoo.pretrained import load_any, resolve

SAME = 1e-6  # largest squared distance of the features of one image in two batches, as a share of their squares


def add_classes(
    run: str | os.PathLike[str],
    data: Any = None,
    *,
    out: str | os.PathLike[str] | None = None,
    without: Sequence[str] = (),
    strategy: str | tf.distribute.Strategy = "auto",
    data_dir: str | os.PathLike[str] | None = None,
    train_split: str | None = None,
    eval_split: str | None = None,
    on_bad_image: str = "skip",
    progress: bool = True,
) -> Result:
    """Add classes, or images of known classes, to a finished linear probe; its own images are not needed.

    The weights are those of a probe of all images at the same strength of the regularisation and the same temperature,
    within rounding. Classes are matched by their names; new ones come after the old ones.

    Args:
        run: folder of a linear probe, which stays as it is, or of an earlier result of this function.
        data: images with one class each, as for `train.run`; one class is enough. None adds no images.
        out: folder for the new model, to which more can be added; None writes no files.
        without: names of classes to take out, with their images. A probe of more than 2,000 images (and more than the
            width of its features) keeps sums over all classes, from which none can be taken.
        strategy: name as for `train.strategy`, or its result.
        data_dir: folder of tensorflow-datasets' prepared data; None is its default.
        train_split: part to add, as for `train.run`.
        eval_split: part to evaluate on.
        on_bad_image: "skip" leaves out files that cannot be decoded; "fail" raises an error.
        progress: whether to write to standard error what is added.

    Returns:
        The result. Its metrics are accuracies in [0, 1] on the held-out images of both runs: "old_classes_before" and
        "old_classes" of the old classes that are kept, by the earlier model and by the new one, and "new_classes";
        without images of them they are not there.

    Raises:
        FileNotFoundError: the folder is not of a linear probe, or of one that kept nothing.
        FileExistsError: `out` has files of a run.
        CheckpointError: the model in the folder is not the one that was solved for, or a file is damaged.
        ValueError: an argument is not valid, a new class has no training image, or may be another spelling of one of
            the run.

    Example:
        >>> import tempfile
        >>> from keras_vit import digits
        >>> seen, folder, recipe = digits.load(), tempfile.mkdtemp(), keras_vit.train.recipe("linear-probe", layers=1)
        >>> images, labels = seen.train_images[:100], seen.train_labels[:100]
        >>> first = {"train": (images[labels < 9], labels[labels < 9])}
        >>> _ = keras_vit.train.run(recipe, model="digits", data=first, out=folder, progress=False)
        >>> nine = {"train": (images[labels == 9], 0 * labels[labels == 9]), "class_names": ["9"]}
        >>> keras_vit.train.add_classes(folder, nine, progress=False).model.config.num_classes
        10
    """
    strategies.check_backend()
    folder, destination = plain_path(run), None if out is None else plain_path(out)
    if destination is not None:
        _check_new_folder(destination)
    probe = SolvedProbe.read(folder)
    model: Any = load_any(resolve(f"{folder}/{FINAL_MODEL}"), dtype="float32")
    probe.check(model, folder)
    options = {"data_dir": data_dir, "train_split": train_split, "eval_split": eval_split}
    opened = None if data is None else open_data(data, on_bad_image=on_bad_image, **options)
    old, found = probe.class_names, opened.class_names if opened else ()
    _check_spelling(old, found)
    names = (*old, *(name for name in found if name not in old))
    if isinstance(data, Mapping) and "class_names" not in data and len(names) > len(old):
        raise ValueError(f"Arrays with new classes need class_names. Received: numbers, of a run of {abbreviated(old)}")
    kept = _kept_classes(probe, names, found, without)

    # Features of the new images
    recipe = Recipe.from_dict(dict(probe.facts["recipe"]))
    model, start = model.with_config(model.config, dtype=recipe.precision), time.monotonic()
    devices = strategies.strategy(strategy) if isinstance(strategy, str) else strategy
    numbers = np.array([names.index(name) for name in found], np.int64)
    new, held_out = ((x, numbers[y]) for x, y in _features(model, opened, recipe, devices, show=progress))
    speed = (len(new[1]) + len(held_out[1])) / (time.monotonic() - start)
    if missing := [names[number] for number in range(len(old), len(names)) if number not in new[1]]:
        raise ValueError(
            f"A new class needs a training image; these have none: {abbreviated(missing)}. If all are held out, "
            "train_split='all' (--train-split all) trains on them"
        )

    _warn_known(probe, new)

    # The head, and its comparison with the one before
    features, labels = (np.concatenate(pair) for pair in zip(probe.held_out, held_out, strict=True))
    before = _is_right(model, features, labels)[np.isin(labels, kept)]
    solved, head = probe.extended(new, held_out, names, kept)
    config = model.config.replace(num_classes=len(kept), labels=solved.class_names)
    model = model.with_config(config, dtype=recipe.precision, fresh=HEADS)
    model.get_layer("head").set_weights(head)
    now, is_old = _is_right(model, *solved.held_out), kept[solved.held_out[1]] < len(old)
    groups = {"old_classes_before": before[is_old], "old_classes": now[is_old], "new_classes": now[~is_old]}
    if progress:
        added = f"{len(new[1]):,} images added, new classes: {abbreviated(names[len(old) :]) or 'none'}"
        removed = f", taken out: {abbreviated(without)}" if without else ""
        counts = f"{is_old.sum():,} images of old classes, {(~is_old).sum():,} of new ones"
        print_line(f"{added}{removed}; {len(kept):,} classes. Held out: {counts}. The temperature is as before")
    if destination is not None:
        make_folder(destination)
        save_model(model, f"{destination}/{FINAL_MODEL}")
        dataclasses.replace(solved, facts=describe(model, probe.facts["recipe"])).write(destination)
    return Result(
        model=model,
        recipe=recipe,
        metrics={name: float(np.mean(right)) for name, right in groups.items() if len(right)},
        history=[],
        steps=1,
        images_per_second=speed,
        skipped=opened.training_split().num_skipped if opened else 0,
        unread=len(opened.training_split().unread) if opened else 0,
        out=destination,
        stopped=False,
        temperature=1 / probe.scale,
    )


def _check_new_folder(folder: str) -> None:
    """Raise a FileExistsError for a folder with files of a run, which would be replaced."""
    if found := [name for name in (*RUN_FILES, "checkpoints") if tf.io.gfile.exists(f"{folder}/{name}")]:
        raise FileExistsError(
            errno.EEXIST,
            f"The folder has {', '.join(found)} of another run. The new model needs its own folder: choose another "
            "than",
            folder,
        )


def _check_spelling(old: Sequence[str], found: Sequence[str]) -> None:
    """Raise a ValueError for a new class that may be another spelling of a class of the run."""
    known = {loose_name(name): name for name in old}
    if unclear := [(name, known[loose_name(name)]) for name in found if name not in old and loose_name(name) in known]:
        new, name = unclear[0]
        raise ValueError(
            f"The run has a class {name!r}. If {new!r} is the same, rename the folder; if not, to a name that differs "
            f"in more than case, '_' and '-'. Received: {len(unclear)} such names"
        )


def _warn_known(probe: SolvedProbe, new: Fold) -> None:
    """Warn of images whose features the run has already: they would count twice."""
    if "features" not in probe.equations or not len(new[1]):  # sums tell nothing of single images
        return
    known, found = (rows.astype(np.float64) for rows in (probe.equations["features"], new[0]))
    squares = [np.square(rows).sum(axis=1) for rows in (found, known)]
    nearest = (squares[0][:, None] + squares[1] - 2 * found @ known.T).min(axis=1)
    if count := int((nearest <= SAME * squares[0]).sum()):
        warn(f"{count:,} of {len(found):,} images to add are in the run already, and count twice: leave them out")


def _kept_classes(
    probe: SolvedProbe, names: tuple[str, ...], found: Sequence[str], without: Sequence[str]
) -> np.ndarray:
    """Numbers among `names` of all classes except those to take out."""
    if not (found or without):
        raise ValueError("Give data to add, or classes to take out. Received: neither")
    if isinstance(without, str) or not set(without) <= set(probe.class_names) - set(found):
        raise ValueError(
            f"without must be a list of classes of the run that the data do not have: {abbreviated(probe.class_names)}."
            f" Received: {without!r:.200}"
        )
    if without and "sums" in probe.equations:
        raise ValueError(
            "The run has kept sums over the images of all classes, from which no class can be taken out: train a probe "
            f"of the others. Received: without={list(without)!r:.200}"
        )
    kept = np.array([number for number, name in enumerate(names) if name not in without], np.int64)
    if len(kept) < 2:
        raise ValueError(f"A probe needs at least two classes. Received: {len(kept)} that are left")
    return kept


def _features(
    model: VisionTransformer, data: Data | None, recipe: Recipe, devices: tf.distribute.Strategy, *, show: bool
) -> list[Fold]:
    """Features and labels of the training images and of the held-out ones."""
    folds = [(np.zeros((0, model.config.feature_size), np.float32), np.zeros(0, np.int64))] * 2
    if data is None:
        return folds
    check_kind(data, Classification(num_classes=0))
    if data.multi_label or strategies.has_workers(devices):
        raise ValueError(f"Images with one class each are added, on one machine. Received: {data.name}")
    collect = feature_collector(replicate(model, devices), LAYER, devices)
    size, model_input = max(1, recipe.batch_size // devices.num_replicas_in_sync), ModelInput.from_model(model)
    for number, split in enumerate((data.training_split(), data.evaluation)):
        if split is not None:
            batches = distribute_batches(split, devices, batch_size=size, model_input=model_input, task=data.task)
            total = ceil(split.count / (size * devices.num_replicas_in_sync))
            features, labels, _ = collect(track(batches, "Computing features", total=total, show=show))
            folds[number] = features, labels
    return folds


def _is_right(model: VisionTransformer, features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether the head gives each image its class."""
    kernel, bias = model.get_layer("head").get_weights()
    return np.asarray((features @ kernel + bias).argmax(axis=1) == labels)
