"""A task says all that the package knows about a model's output; another task is another object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import export
from keras_vit.model import task
from keras_vit.model.task import Classification
from keras_vit.train.data.sources import open_data
from keras_vit.train.data.split import match_data
from keras_vit.train.step.objective import supervised
from tiny_models import VARIANTS, built, prepared, tiny

NUM_CLASSES = 4


@dataclass(frozen=True, kw_only=True)
class Segmentation(Classification):
    """Classify every pixel: logits (batch, height, width, classes); pixels labelled 255 do not count."""

    LABELS = "maps (n, height, width)"
    sum_names = ("pixels", "right", "loss", "count", "unlabelled")

    @staticmethod
    def read_labels(labels: np.ndarray) -> np.ndarray | None:
        return labels.astype(np.int32) if labels.ndim == 3 else None

    @staticmethod
    def count_classes(labels: np.ndarray) -> int:
        return int(labels[labels != 255].max()) + 1

    def check_labels(self, split: str, labels: np.ndarray) -> None:
        if (unknown := labels[(labels >= self.num_classes) & (labels != 255)]).size:
            raise ValueError(f"{split} labels are not classes. Received: {unknown[0]}")

    def renumbered(self, label: Any, numbers: Sequence[int]) -> Any:
        return tf.where(label == 255, label, tf.gather(tf.constant(numbers, label.dtype), label % 255))

    def targets(self, labels: Any) -> Any:
        return labels

    def losses(self, output: Any, targets: Any, *, kind: str, label_smoothing: float = 0.0) -> Any:
        counted = tf.cast(targets != 255, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.where(targets == 255, 0, targets), output)
        return tf.math.divide_no_nan(tf.reduce_sum(losses * counted, (1, 2)), tf.reduce_sum(counted, (1, 2))), {}


@dataclass(frozen=True)
class Distilled:
    """Wrap a task: the teacher's share of the loss is added to it."""

    student: task.Task
    penalty: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.student, name)

    def losses(self, output: Any, targets: Any, **how: Any) -> Any:
        losses, metrics = self.student.losses(output, targets, **how)
        return losses + self.penalty, metrics


def mapper() -> keras.Model:
    """Return a model from an image to a map of logits, with a task of its own."""
    image = keras.Input((6, 8, 3))
    model = keras.Model(image, keras.layers.Conv2D(NUM_CLASSES, 3, padding="same")(image))
    model.task = Segmentation(num_classes=NUM_CLASSES)
    return model


def test_a_model_knows_its_task() -> None:
    expected = {
        "token": (("logits", "probabilities"), True),
        "headless": (("features",), True),
        "unpooled": (("logits", "probabilities"), False),
    }
    tasks = {kind: task.from_config(tiny(**VARIANTS.get(kind, {}))) for kind in expected}
    assert {kind: (each.outputs, each.is_pooled) for kind, each in tasks.items()} == expected


def test_any_keras_model_has_a_task() -> None:
    image = keras.Input((2, 2, 3))
    flat = keras.layers.Flatten()(image)
    assert task.of_model(keras.Model(image, flat)) == Classification(num_classes=12)
    assert not task.of_model(keras.Model(image, image)).is_pooled
    assert task.of_model(mapper()) == Segmentation(num_classes=NUM_CLASSES)
    own = built(num_layers=1)
    assert task.of_model(own) == own.task


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_losses_are_those_of_their_definitions(kind: str) -> None:
    random = np.random.default_rng(0)
    logits, targets = random.normal(size=(2, 6, NUM_CLASSES)).astype(np.float32)
    targets = np.abs(targets) / np.abs(targets).sum(axis=1, keepdims=True)
    losses, metrics = Classification(num_classes=NUM_CLASSES).losses(logits, targets, kind=kind, label_smoothing=0.1)
    smooth = 0.9 * targets + 0.1 / NUM_CLASSES
    if kind == "softmax":
        expected = -(smooth * np.log(task.softmax(logits))).sum(axis=1)
    else:
        p = 1 / (1 + np.exp(-logits))
        expected = -(smooth * np.log(p) + (1 - smooth) * np.log(1 - p)).sum(axis=1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(metrics["accuracy"], logits.argmax(axis=1) == targets.argmax(axis=1))


def test_a_task_may_wrap_another() -> None:
    model, batch = built(num_layers=1), {}
    batch["image"] = prepared(model.config)
    batch["label"] = model.task.targets(tf.constant([1] * len(batch["image"])))
    seed = tf.constant([1, 2])
    own, metrics = supervised(model.task, "softmax")(model, batch, seed)
    wrapped, same_metrics = supervised(Distilled(model.task, 2.0), "softmax")(model, batch, seed)
    np.testing.assert_allclose(wrapped, own + 2.0, rtol=1e-6)
    np.testing.assert_array_equal(metrics["accuracy"], same_metrics["accuracy"])
    assert Distilled(model.task, 2.0).outputs == model.task.outputs


def test_a_map_is_trained_with_its_own_loss() -> None:
    model, images = mapper(), np.random.default_rng(0).normal(size=(2, 6, 8, 3)).astype(np.float32)
    labels = np.zeros((2, 6, 8), np.int32)
    labels[:, :, 4:] = 255
    batch = {"image": images, "label": model.task.targets(labels)}
    losses, _ = supervised(model.task, "softmax")(model, batch, tf.constant([1, 2]))
    shares = task.softmax(model.predict_on_batch(images))[:, :, :4, 0]
    np.testing.assert_allclose(losses, -np.log(shares).mean(axis=(1, 2)), rtol=1e-5)


def test_a_data_set_has_the_task_of_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "KINDS", (Classification, Segmentation))
    images, maps = np.zeros((2, 2, 2, 3), np.uint8), np.array([[[0, 1], [2, 255]]] * 2)
    data = open_data({"train": (images, maps), "class_names": ["a", "b", "c"]})
    assert data.task == Segmentation(num_classes=3, labels=("a", "b", "c"))
    [label, _] = [
        example["label"] for example in match_data(data, ("c", "d", "a", "b"), 4).training_split().iterate_once()
    ]
    np.testing.assert_array_equal(label, [[2, 3], [0, 255]])
    assert open_data({"train": (images, [0, 1])}).task == Classification(num_classes=2, labels=("0", "1"))
    with pytest.raises(ValueError, match=r"train labels.*or maps \(n, height, width\)"):
        open_data({"train": (images, [0.5, 1])})
    with pytest.raises(ValueError, match="train labels are not classes. Received: 2"):
        open_data({"train": (images, maps), "num_classes": 2})


@pytest.mark.parametrize("suffix", [".tflite", ""])
def test_a_map_is_exported_and_compared_pixel_by_pixel(suffix: str, tmp_path: Path) -> None:
    model, path = mapper(), tmp_path / f"map{suffix}"
    if suffix:
        model.export(tmp_path / "saved", verbose=False)
        path.write_bytes(tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "saved")).convert())
    else:
        model.export(path, verbose=False)
    assert export.verify(model, path).agreement == 1.0
    [kernel, bias] = model.get_weights()
    model.set_weights([kernel, bias + np.float32([1e3, 0, 0, 0])])
    with pytest.raises(export.VerificationError, match=r"same best class \d"):
        export.verify(model, path)
