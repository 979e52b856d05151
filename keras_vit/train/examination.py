"""Examine a classifier image by image: accuracy of each class, confusions, and the worst mistakes, as HTML and JSON."""

from __future__ import annotations

import collections
import csv
import dataclasses
import errno
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit._util import html
from keras_vit._util.checks import is_count
from keras_vit._util.files import check_results, writing_result
from keras_vit.model.calibration import Calibration
from keras_vit.model.config import Preprocessing
from keras_vit.model.labels import distinct
from keras_vit.model.task import Classification
from keras_vit.train import strategies
from keras_vit.train.data import sources
from keras_vit.train.data.pipeline import ModelInput, decode
from keras_vit.train.data.split import Split
from keras_vit.train.evaluation import (
    Evaluation,
    as_keras_model,
    balanced_accuracy,
    choose_strategy,
    measure,
    open_held_out,
)

WORST = 24  # mistakes on a contact sheet
MATRIX_CLASSES = 30  # that a page shows as a matrix; of more it lists the most frequent confusions
PICTURE_SIDE = 192  # pixels of the longer side
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # starts of cells that a spreadsheet runs


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The predictions of a classifier for every image of a split, as `examine` returns them.

    Args:
        data: name of the data set and the split.
        classes: names of the model's classes; a name that several have is followed by the number of the class.
        images: names of the images.
        labels: int64 (images,), the right classes.
        predicted: int64 (images,), the predicted ones.
        probabilities: float32 (images, 2), 0..1, of the predicted class and of the right one.
        split: the images themselves.
        indices: int64 (images,), their numbers in the split.
        evaluation: the metrics of the same images, as `evaluate` returns them.
        preprocessing: of the model, by which the pictures of `write` are scaled.

    Example:
        >>> from keras_vit import digits
        >>> data, model = digits.load(), keras_vit.zoo.load("digits")
        >>> found = keras_vit.train.examine(model, {"evaluation": (data.test_images, data.test_labels)})
        >>> found.confusion.shape, int(found.confusion.sum()), found.accuracy
        ((10, 10), 360, 0.9916666666666667)
        >>> found.by_class()[0]["class"], found.confusions()[0]["images"], len(found.mistakes())
        ('zero', 1, 3)
        >>> found.to_dict()["images"]
        360
        >>> sorted(path.name for path in found.write("examined"))
        ['examination.html', 'examination.json']
    """

    data: str
    classes: Sequence[str]
    images: Sequence[str]
    labels: np.ndarray
    predicted: np.ndarray
    probabilities: np.ndarray
    split: Split
    indices: np.ndarray
    evaluation: Evaluation
    preprocessing: Preprocessing

    @property
    def accuracy(self) -> float:
        """Share of the images whose predicted class is right, 0..1."""
        return float(np.mean(self.labels == self.predicted))

    @property
    def confusion(self) -> np.ndarray:
        """Numbers of images, int64 (classes, classes): a row for each right class, a column for each predicted one.

        For 21,843 classes this takes 3.8 GB; `confusions` lists the pairs that occur.
        """
        return self._matrix(np.arange(len(self.classes)))

    def mistakes(self, most: int | None = None) -> list[dict[str, Any]]:
        """List the wrongly classified images, those with the least probability of the right class first.

        Args:
            most: number of mistakes to return, from 0; None returns all.

        Raises:
            ValueError: `most` is something else.
        """
        if most is not None and not is_count(most, least=0):
            raise ValueError(f"most must be an integer >= 0, or None. Received: {most!r:.200}")
        return [self._row(place) for place in self._worst(most)]

    def by_class(self) -> list[dict[str, Any]]:
        """List the classes that occur: number of images, share that is right, and commonest mistake."""
        totals = collections.Counter(self.labels.tolist())
        right = collections.Counter(self.labels[self.labels == self.predicted].tolist())
        commonest = {label: predicted for label, predicted, _ in reversed(self._confusions())}
        return [
            {
                "class": self.classes[number],
                "images": totals[number],
                "accuracy": right[number] / totals[number],
                "mistaken_for": self.classes[commonest[number]] if number in commonest else None,
            }
            for number in sorted(totals)
        ]

    def confusions(self) -> list[dict[str, Any]]:
        """List the pairs of a right class and another that was predicted, the most frequent first."""
        return [
            {"class": self.classes[label], "predicted": self.classes[predicted], "images": count}
            for label, predicted, count in self._confusions()
        ]

    def _matrix(self, classes: np.ndarray) -> np.ndarray:
        """Count the images of these classes, all that occur among them, as `confusion` does."""
        matrix = np.zeros((len(classes),) * 2, np.int64)
        np.add.at(matrix, tuple(np.searchsorted(classes, (self.labels, self.predicted))), 1)
        return matrix

    def _confusions(self) -> list[tuple[int, int, int]]:
        """Count each pair of a right class and another that was predicted, the most frequent first."""
        wrong = self.labels != self.predicted
        pairs = collections.Counter(zip(self.labels[wrong].tolist(), self.predicted[wrong].tolist(), strict=True))
        return [(*pair, count) for pair, count in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))]

    def to_dict(self) -> dict[str, Any]:
        """Convert the results to a dictionary that JSON can hold."""
        return {
            "data": self.data,
            "images": len(self.labels),
            "accuracy": self.accuracy,
            "balanced_accuracy": balanced_accuracy(self.labels, self.predicted),
            "calibration": dataclasses.asdict(self._calibration),
            "classes": self.by_class(),
            "confusions": self.confusions(),
            "mistakes": self.mistakes(),
        }

    def write(self, folder: str | os.PathLike[str], *, predictions: bool = False) -> list[Path]:
        """Write `examination.html`, `examination.json` and, if asked, `predictions.csv`; return the paths.

        Args:
            folder: created if it does not exist; files of an earlier examination are replaced.
            predictions: whether to write a row for each image. A text that a spreadsheet would take for a formula, such
                as a name that begins with "=", gets an apostrophe in front.

        Raises:
            FileExistsError: there are files of these names that `write` has not written.
            NotADirectoryError: `folder` is a file.
        """
        paths = result_paths(folder, predictions=predictions)
        contents = [self._page(), json.dumps(self.to_dict(), indent=2) + "\n"]
        if predictions:
            table = io.StringIO()
            writer = csv.DictWriter(table, self._row(0))
            writer.writeheader()
            writer.writerows({k: _cell(v) for k, v in self._row(place).items()} for place in range(len(self.labels)))
            contents.append(table.getvalue())
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, contents, strict=True):
            with writing_result(path) as file:
                file.write(text.encode())
        return paths

    @property
    def _calibration(self) -> Calibration:
        assert self.evaluation.calibration
        return self.evaluation.calibration

    def _worst(self, most: int | None) -> np.ndarray:
        wrong = np.flatnonzero(self.labels != self.predicted)
        return wrong[np.argsort(self.probabilities[wrong, 1], kind="stable")][:most]

    def _row(self, place: int) -> dict[str, Any]:
        return {
            "image": self.images[place],
            "class": self.classes[self.labels[place]],
            "predicted": self.classes[self.predicted[place]],
            "probability": float(self.probabilities[place, 0]),
            "probability_of_class": float(self.probabilities[place, 1]),
        }

    def _page(self) -> str:
        worst = self._worst(WORST)
        wanted, pictures = self.indices[worst], {}
        for example in self.split.iterate_once(only=wanted) if len(worst) else ():
            picture = _as_picture(np.asarray(decode(example["image"], self.preprocessing)))
            pictures[int(example["index"])] = html.data_uri(html.thumbnail(picture, PICTURE_SIDE))
        used = np.union1d(self.labels, self.predicted)
        is_shown = len(used) <= MATRIX_CLASSES
        environment = html.environment()
        return environment.get_template("examination.html").render(
            examined=self,
            calibration=self._calibration,
            worst=[(self._row(place), pictures[index]) for place, index in zip(worst, wanted.tolist(), strict=True)],
            names=[self.classes[number] for number in used.tolist()] if is_shown else [],
            matrix=self._matrix(used).tolist() if is_shown else [],
            confusions=[tuple(row.values()) for row in self.confusions()[:MATRIX_CLASSES]],
        )

    def _repr_html_(self) -> str:
        """Table of the classes for notebooks."""
        rows = {row["class"]: f"{row['accuracy']:.2%} of {row['images']:,}" for row in self.by_class()}
        return html.facts(str(self), rows)

    def __str__(self) -> str:
        right = int(np.sum(self.labels == self.predicted))
        return f"{self.data}: {right:,} of {len(self.labels):,} images are right ({self.accuracy:.2%})"


def _cell(value: Any) -> Any:
    """Put an apostrophe in front of a text that a spreadsheet would run as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) else value


def result_paths(folder: str | os.PathLike[str], *, predictions: bool) -> list[Path]:
    """List the files that `Examination.write` writes, or raise an error if they cannot be written."""
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "The examination needs a folder, and this is a file", str(target))
    paths = [target / name for name in ("examination.html", "examination.json", "predictions.csv")]
    paths = paths if predictions else paths[:2]
    if target.is_dir():
        check_results(paths)
    return paths


def _as_picture(pixels: np.ndarray) -> np.ndarray:
    """Convert pixels of any number of channels to bytes: the first three channels, or of fewer the first."""
    shown = pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., 0]
    return shown.astype(np.uint8)


def examine(
    model: keras.Model,
    data: str | os.PathLike[str] | Mapping[str, Any] | sources.Data,
    *,
    split: str | None = None,
    batch_size: int = 64,
    strategy: str | tf.distribute.Strategy = "auto",
    data_dir: str | os.PathLike[str] | None = None,
    on_bad_image: str = "skip",
    progress: bool = False,
) -> Examination:
    """Classify every image of a split, and compare the predictions with the labels one by one.

    Args:
        model: a classifier, as for `evaluate`.
        data: as for `evaluate`, with one class for each image.
        split: as for `evaluate`.
        batch_size: images per call on each device.
        strategy: as for `evaluate`; several workers are not supported.
        data_dir: folder of tensorflow-datasets' prepared data; None is its default.
        on_bad_image: "skip" leaves out files that cannot be decoded; "fail" raises an error.
        progress: whether to draw a progress bar.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: as for `evaluate`; or images have several labels, or maps.

    Example:
        >>> from keras_vit import digits
        >>> data, model = digits.load(), keras_vit.zoo.load("digits")
        >>> found = keras_vit.train.examine(model, {"evaluation": (data.test_images, data.test_labels)})
        >>> print(found)
        arrays, evaluation: 357 of 360 images are right (99.17%)
        >>> [(row["class"], row["predicted"]) for row in found.mistakes(1)]
        [('nine', 'four')]
    """
    model = as_keras_model(model)
    request = sources.DataRequest(data=data, data_dir=data_dir, eval_split=split, on_bad_image=on_bad_image)
    opened, _, task, _ = open_held_out(model, request)
    if type(task) is not Classification or opened.multi_label:
        raise ValueError(f"examine needs one class for each image, and no maps. Received: {opened.name}")
    devices = choose_strategy(model, strategy)
    if strategies.has_workers(devices):
        raise ValueError("examine runs on one machine. Received: a strategy of several workers")
    request = sources.DataRequest(data=opened)
    found = measure(model, request, batch_size=batch_size, strategy=devices, progress=progress, keeps_outputs=True)
    assert found.output is not None and found.targets is not None
    held_out, indices, logits, labels = found.split, found.indices, found.output, found.targets.argmax(axis=1)
    shares, predicted = task.exported_output("probabilities", logits), logits.argmax(axis=1)
    chosen = np.stack([predicted, labels], axis=1)
    return Examination(
        data=f"{opened.name}, {opened.eval_split}" if opened.eval_split else opened.name,
        classes=distinct(task.class_names() or [str(number) for number in range(task.num_classes)]),
        images=[held_out.name_of(int(index)) for index in indices],
        labels=labels,
        predicted=predicted,
        probabilities=np.take_along_axis(shares, chosen, axis=1),
        split=held_out,
        indices=indices,
        evaluation=found.evaluation,
        preprocessing=ModelInput.from_model(model).preprocessing,
    )
