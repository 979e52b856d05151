"""A task says all that the package knows about a model's output; another task is another object."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import train
from keras_vit.dense.map_tasks import Segmentation
from keras_vit.model import task
from keras_vit.model.task import Classification
from keras_vit.train.data.sources import open_data
from keras_vit.train.data.split import match_data
from keras_vit.train.objective import supervised
from tiny_models import VARIANTS, built, prepared, tiny

NUM_CLASSES = 4


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
    wrapping: Any = SimpleNamespace(task=Distilled(model.task, 2.0), config=model.config)
    recipe = train.recipe("digits")
    own, metrics = supervised(recipe, model).losses(model, batch, seed)
    wrapped, same_metrics = supervised(recipe, wrapping).losses(model, batch, seed)
    np.testing.assert_allclose(wrapped, own + 2.0, rtol=1e-6)
    np.testing.assert_array_equal(metrics["accuracy"], same_metrics["accuracy"])
    assert Distilled(model.task, 2.0).outputs == model.task.outputs


def test_maps_of_a_data_set_get_the_numbers_of_the_models_classes() -> None:
    images, maps = np.zeros((2, 2, 2, 3), np.uint8), np.array([[[0, 1], [2, 255]]] * 2)
    data = open_data({"train": (images, maps), "class_names": ["a", "b", "c"]})
    assert data.task == Segmentation(num_classes=3, labels=("a", "b", "c"))
    matched = match_data(data, ("c", "d", "a", "b"), 4).training_split()
    labels = [example["label"] for example in matched.iterate_once()]
    np.testing.assert_array_equal(labels, [[[2, 3], [0, 255]]] * 2)
    with pytest.raises(ValueError, match="train labels"):
        open_data({"train": (images, [0.5, 1])})
    with pytest.raises(ValueError, match="255 for pixels that do not count"):
        open_data({"train": (images, maps), "num_classes": 2})
