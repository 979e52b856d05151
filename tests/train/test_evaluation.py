"""Evaluation against scikit-learn and NumPy, and with the embedded model."""

from __future__ import annotations

import functools
import gc
import json
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.metrics import log_loss, top_k_accuracy_score

from keras_vit import digits, zoo
from keras_vit.model.config import Preprocessing
from keras_vit.model.task import Classification
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train.evaluation import Evaluation, evaluate
from refusals import unrefused
from tiny_models import built

CLASSES = 7


def random_logits(images: int = 101, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.concatenate([np.arange(classes), random.integers(0, classes, images - classes)])
    return random.normal(size=(images, classes)).astype(np.float32) * 2, labels


def named(logits: Any, labels: Any, weights: Any = None) -> dict[str, float]:
    weights = np.ones(len(logits), np.float32) if weights is None else weights
    task = Classification(num_classes=logits.shape[1])
    return dict(zip(task.sum_names, task.sums(tf.constant(logits), labels, weights).numpy(), strict=True))


def reader(logits: np.ndarray) -> keras.Model:
    """Return a model that looks up the logits of an image by the number encoded in its first two pixels."""
    images = keras.Input((2, 2, 3))
    numbers = keras.ops.cast(keras.ops.round(images[:, 0, 0, 0] + 256 * images[:, 0, 1, 0]), "int32")
    return keras.Model(images, keras.ops.take(logits, numbers, axis=0))


def spelled(count: int) -> np.ndarray:
    images = np.zeros((count, 2, 2, 3), np.uint8)
    images[:, 0, 0, :], images[:, 0, 1, :] = (np.arange(count)[:, None] >> shift & 255 for shift in (0, 8))
    return images


@functools.cache
def digits_model(dtype: str = "float32", image_size: int = 32) -> VisionTransformer:
    return zoo.load("digits", dtype=dtype, image_size=image_size)


@functools.cache
def held_out() -> digits.Digits:
    return digits.load()


@functools.cache
def embedded() -> Evaluation:
    return evaluate(digits_model(), "digits")


AS_IT_IS = Preprocessing(mean=(0,), std=(1 / 255,))


def measured(logits: np.ndarray, targets: np.ndarray, **options: Any) -> Evaluation:
    data = {"evaluation": (spelled(len(targets)), targets), "num_classes": logits.shape[1]}
    return evaluate(reader(logits), data, preprocessing=AS_IT_IS, **options)


def test_accuracy_and_loss_are_scikit_learns_whatever_the_batch() -> None:
    logits, labels = random_logits()
    classes = range(CLASSES)
    probabilities = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True)
    for batch_size in (8, 101, 256):  # a remainder, one full batch, one padded batch
        found = measured(logits, labels, batch_size=batch_size)
        assert found.count == len(labels)
        assert found.top1 == pytest.approx(top_k_accuracy_score(labels, logits, k=1, labels=classes), abs=1e-12)
        assert found.top5 == pytest.approx(top_k_accuracy_score(labels, logits, k=5, labels=classes), abs=1e-12)
        # A float32 softmax has 7 digits, and so has the mean of 101.
        assert found.loss == pytest.approx(log_loss(labels, probabilities, labels=classes), rel=1e-6)


@pytest.mark.full
def test_the_embedded_model_tells_357_of_the_360_held_out_digits() -> None:
    found = embedded()
    assert (round(found.top1 * found.count), found.count, found.skipped, found.unlabelled) == (357, 360, 0, 0)
    assert found.top5 == 1 and 0 < found.loss < 0.1 and found.images_per_second > 0
    assert "357 of 360" in str(found) and "top-5 100.00%" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["top1"] == found.top1
    data = {"evaluation": (held_out().test_images, held_out().test_labels)}
    half = evaluate(digits_model("mixed_bfloat16"), data)  # measured in float32
    # bfloat16 has 3 digits: the loss differs in the third, and few predictions change.
    assert half.loss == pytest.approx(found.loss, abs=0.01) and abs(half.top1 - found.top1) <= 2 / 360


def test_the_logits_are_those_of_the_models_own_preprocessing() -> None:
    images, labels = held_out().test_images[:50], held_out().test_labels[:50]
    model = digits_model(image_size=40)
    found = evaluate(model, {"evaluation": (images, labels), "num_classes": 10}, batch_size=50)
    rows = np.eye(10, dtype=np.float32)[labels]
    assert found.loss == pytest.approx(
        named(model.predict_on_batch(model.preprocess(images)), rows)["loss"] / 50, rel=1e-5
    )


def test_an_image_with_several_labels_is_right_by_any_and_left_out_without_one() -> None:
    logits, _ = random_logits(40)
    labels = (np.random.default_rng(1).random(logits.shape) < 0.3).astype(np.float32)
    labels[::5] = 0
    found = measured(logits, labels, labels="real", batch_size=16)
    kept = labels.any(axis=1)
    ranking = np.argsort(-logits, axis=1)[kept]
    right = np.take_along_axis(labels[kept], ranking, axis=1)
    assert (found.count, found.unlabelled) == (kept.sum(), 40 - kept.sum())
    assert found.top1 == pytest.approx(right[:, 0].mean(), abs=1e-12)
    assert found.top5 == pytest.approx(right[:, :5].max(axis=1).mean(), abs=1e-12)
    log_probabilities = logits[kept] - np.log(np.exp(logits[kept]).sum(axis=1, keepdims=True))
    share = labels[kept] / labels[kept].sum(axis=1, keepdims=True)
    assert found.loss == pytest.approx(-(share * log_probabilities).sum(axis=1).mean(), rel=1e-5)  # float32 in both
    assert "ReaL" in str(found) and f"{found.unlabelled} without a label" in str(found)


def test_sums_of_parts_are_the_sum_of_the_whole_and_odd_logits_count_rightly() -> None:
    logits, labels = random_logits()
    rows, ten = np.eye(CLASSES, dtype=np.float32)[labels], np.eye(10, dtype=np.float32)
    parts = [named(logits[part], rows[part]) for part in (slice(0, 40), slice(40, None))]
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    means = Classification(num_classes=CLASSES).means(totals)
    assert means["loss"] == pytest.approx(named(logits, rows)["loss"] / 101, rel=1e-6)
    # What fills a batch up counts nothing, even where it is infinite.
    whole = named(logits[:5], rows[:5])
    logits[5:8] = np.float32([[np.nan], [np.inf], [-np.inf]])
    assert named(logits[:8], rows[:8], np.float32([1, 1, 1, 1, 1, 0, 0, 0])) == pytest.approx(whole)
    # A head of zeros knows one class and not all; of three classes all are in five.
    zeros = named(np.zeros((10, 10), np.float32), ten)
    few = named(np.float32([[0, 1, 2]]), np.float32([[1, 0, 0]]))
    assert [(found["top1"], found["top5"]) for found in (zeros, few)] == [(1, 5), (0, 1)]
    # A class that is never predicted changes nothing for the others.
    masked = named(np.float32([[0, 1, -np.inf]]), np.float32([[0, 1, 0]]))
    assert (masked["top1"], masked["loss"]) == (1, pytest.approx(np.log1p(np.exp(-1))))


@pytest.mark.full
def test_evaluating_twice_compiles_once_and_keeps_no_model_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    sums = Classification.sums

    def counted(*given: Any) -> Any:
        traced.append(1)
        return sums(*given)

    monkeypatch.setattr(Classification, "sums", counted)
    model = built(num_classes=10)
    first, second = (evaluate(model, "digits", batch_size=90) for _ in range(2))
    assert (first.top1, first.loss) == (second.top1, second.loss) and len(traced) == 1
    known = weakref.ref(model)
    del model
    keras.backend.clear_session()  # Keras' own bookkeeping
    gc.collect()
    assert known() is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": {"num_classes": 5}}, "The model has 5 classes and"),
    ({"model": {"num_classes": 0}}, "one without a head"),
    ({"model": {"num_classes": 10, "classifier": "unpooled"}}, "one without a head"),
    ({"labels": "ReaL"}, "labels must be"),
    ({"labels": "real"}, "has one label per image"),
    ({"batch_size": 0}, "batch_size must be"),
    ({"data": {"evaluation": (spelled(3), np.eye(10)[:3])}}, "pass labels='real'"),
    ({"data": {"train": (spelled(10), np.arange(10))}}, "no held-out split"),
    ({"data": {"evaluation": (spelled(3), np.zeros((3, 10)))}, "labels": "real"}, "3 have no label"),
]


def test_what_cannot_be_evaluated_is_said() -> None:
    def wrong(model: Any = None, data: Any = "digits", **options: Any) -> Evaluation:
        return evaluate(built(**model or {"num_classes": 10}), data, **options)

    assert not unrefused(wrong, WRONG)
    with pytest.raises(TypeError, match="keras_vit.zoo.load"):
        evaluate("ViT-B/16", "digits")
    with pytest.raises(ValueError, match="height, width, channels"):
        evaluate(keras.Sequential([keras.Input((4,)), keras.layers.Dense(10)]), "digits")
