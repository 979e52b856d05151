"""Calibration error, coverage and temperature, against scikit-learn and SciPy, and in every file of a trained model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss

from html_document import Document
from keras_vit import digits, export, train, zoo
from keras_vit.model.calibration import BINS, fit_temperature

SEEN = digits.load()
NAMES = [f"digit {number}" for number in range(10)]


def drawn(images: int, classes: int, factor: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw labels with the probabilities of logits, and return these logits times a factor."""
    random = np.random.default_rng(seed)
    truth = 2 * random.normal(size=(images, classes))
    labels = np.array([random.choice(classes, p=softmax(row)) for row in truth])
    return (factor * truth).astype(np.float32), labels


def loss(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    scaled = log_softmax(logits.astype(np.float64) / temperature, axis=1)
    return -float(scaled[np.arange(len(labels)), labels].mean())


def best_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    found = minimize_scalar(
        lambda log: loss(logits, labels, np.exp(log)), bounds=(-8, 8), method="bounded", options={"xatol": 1e-9}
    )
    return float(np.exp(found.x))


@pytest.mark.parametrize(("images", "classes", "factor"), [(200, 10, 1), (200, 10, 8), (200, 10, 0.05), (30, 3, 2)])
def test_the_temperature_is_scipys(images: int, classes: int, factor: float) -> None:
    logits, labels = drawn(images, classes, factor)
    found = fit_temperature(logits, labels)
    # A minimum is flat: SciPy finds its place to about the root of float64's precision.
    assert found == pytest.approx(best_temperature(logits, labels), rel=1e-6)
    never = np.full((images, 1), -np.inf, np.float32)  # a class that is never predicted changes nothing
    assert fit_temperature(np.concatenate([logits, never], axis=1), labels) == pytest.approx(found, rel=1e-9)


def test_there_is_no_temperature_where_none_is_the_best() -> None:
    one_hot, labels = np.eye(4, dtype=np.float32), np.arange(4)
    for logits in (one_hot, -one_hot, 0 * one_hot):  # all right, all wrong, nothing known
        assert fit_temperature(logits, labels) is None
    impossible = np.float32([[0, -np.inf], [1, 0]])
    assert fit_temperature(impossible, np.array([1, 0])) is None
    assert fit_temperature(one_hot[:0], labels[:0]) is None


def test_error_and_coverage_are_those_of_scikit_learn_and_numpy() -> None:
    logits, labels = drawn(700, 5, 3)
    chances = softmax(logits.astype(np.float64), axis=1).max(axis=1)
    right = logits.argmax(axis=1) == labels
    found = train.Calibration.measure(chances, right)
    assert found
    accuracy, probability = calibration_curve(right, chances, n_bins=BINS)
    counts = np.histogram(chances, np.linspace(0, 1, BINS + 1))[0]
    counts = counts[counts > 0]
    assert found.error == pytest.approx(np.sum(counts * np.abs(accuracy - probability)) / len(labels))
    assert [each["images"] for each in found.bins] == counts.tolist()
    assert [each["accuracy"] for each in found.bins] == pytest.approx(accuracy)
    assert [each["probability"] for each in found.bins] == pytest.approx(probability)
    for row in found.coverage:
        answered = chances >= row["threshold"]
        assert (row["answered"], row["right"]) == (answered.mean(), pytest.approx(right[answered].mean()))
    alone = train.Calibration.measure(np.array([0.0, 1.0]), np.array([1, 0]))  # both ends are in a bin
    assert alone and (alone.error, alone.coverage[1]) == (1, {"threshold": 0.5, "answered": 0.5, "right": 0})
    rare = train.Calibration.measure(np.array([0.3]), np.array([True]))
    assert rare and rare.coverage[1]["right"] is None and "at least 0.50" in str(rare)
    assert train.Calibration.measure(np.zeros(0), np.zeros(0)) is None


def noisy() -> tuple[np.ndarray, np.ndarray]:
    """Digits that the embedded model often gets wrong."""
    noise = np.random.default_rng(0).normal(0, 110, SEEN.test_images.shape)
    return np.clip(SEEN.test_images + noise, 0, 255).astype(np.uint8), SEEN.test_labels


@pytest.mark.full
def test_evaluate_and_the_page_of_examine_say_both(tmp_path: Path) -> None:
    images, labels = noisy()
    model = zoo.load("digits")
    found = train.evaluate(model, {"evaluation": (images, labels)})
    logits = model.predict(model.preprocess(images), verbose=0)
    chances, right = softmax(logits, axis=1).max(axis=1), logits.argmax(axis=1) == labels
    wanted = train.Calibration.measure(chances, right)
    # Batches of other sizes round other probabilities, which may pass a threshold: one image of 360.
    assert found.calibration and wanted and found.calibration.error == pytest.approx(wanted.error, abs=1 / 360)
    assert found.calibration.error > 0.2
    lines = str(found).splitlines()
    assert lines[1] == f"expected calibration error {found.calibration.error:.4f}"
    assert lines[3].split() == ["at", "least", "0.00", "100.00%", f"{found.top1:.2%}"]
    assert found.to_dict()["calibration"] == dataclasses.asdict(found.calibration)
    examined = train.examine(model, {"evaluation": (images, labels)})
    assert examined.evaluation.calibration == found.calibration and examined.evaluation.metrics == found.metrics
    page, results = examined.write(tmp_path)
    assert json.loads(results.read_text())["calibration"] == dataclasses.asdict(found.calibration)
    document = Document(page.read_text(encoding="utf-8"))
    (drawing,) = (each for each in document.all("svg") if "largest probability" in each["aria-label"])
    assert drawing and len(document.all("circle")) == len(document.all("rect")) == len(found.calibration.bins)
    assert f"{found.calibration.coverage[4]['answered']:.1%}" in document.text


def recipe(**changes: Any) -> train.Recipe:
    fixed = {"batch_size": 32, "image_size": None, "xla": False, "learning_rate": 0.02, "steps": 4, "eval_steps": 2}
    return train.recipe("finetune-digits", **fixed | changes)


def data() -> dict[str, Any]:
    train_images, train_labels = SEEN.train_images[:64], SEEN.train_labels[:64]
    return {"train": (train_images, train_labels), "evaluation": noisy(), "class_names": NAMES}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, train.Result]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        calibrate: train.run(
            recipe(calibrate=calibrate), model="digits", data=data(), out=folder / str(calibrate), progress=False
        )
        for calibrate in (True, False)
    }


def outputs(model: Any) -> np.ndarray:
    return np.asarray(model.predict(model.preprocess(noisy()[0]), verbose=0))


def test_a_trained_model_has_the_best_temperature_on_its_held_out_images(results: dict[bool, train.Result]) -> None:
    raw, own = (outputs(results[calibrate].model) for calibrate in (False, True))
    labels = noisy()[1]
    temperature = results[True].temperature
    assert results[False].temperature is None and temperature
    assert temperature == pytest.approx(best_temperature(raw, labels), rel=1e-4)  # logits of other batches
    assert abs(np.log(temperature)) > 0.1  # of the test: it changes something
    np.testing.assert_allclose(own, raw / temperature, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(own.argmax(axis=1), raw.argmax(axis=1))
    assert best_temperature(own, labels) == pytest.approx(1, rel=1e-4)
    for name in ("accuracy", "top5"):
        assert results[True].metrics[name] == results[False].metrics[name]
    assert results[True].metrics["loss"] == pytest.approx(log_loss(labels, softmax(own, axis=1)), rel=1e-5)
    assert results[True].metrics["loss"] < results[False].metrics["loss"]
    assert f"temperature: {temperature:.3g}" in repr(results[True])
    # The weights of all other layers are those of training.
    for one, other in zip(results[True].model.weights, results[False].model.weights, strict=True):
        if not one.path.startswith("head/"):
            np.testing.assert_array_equal(one, other)


@pytest.mark.full
def test_every_file_keeps_the_temperature(results: dict[bool, train.Result], tmp_path: Path) -> None:
    result = results[True]
    assert result.out and result.best
    images = noisy()[0][:5]
    wanted = softmax(outputs(result.model)[:5], axis=1)
    model = keras.saving.load_model(Path(result.out, "model.keras"))
    np.testing.assert_allclose(softmax(outputs(model)[:5], axis=1), wanted, atol=1e-6)
    best = outputs(keras.saving.load_model(Path(result.out, "best.keras")))
    assert best_temperature(best, noisy()[1]) == pytest.approx(1, rel=1e-4)
    assert log_loss(noisy()[1], softmax(best, axis=1)) == pytest.approx(result.best.metrics["loss"], rel=1e-5)
    file = tmp_path / "m.tflite"
    export.tflite(result.model, file, quantize="none", output="probabilities", verify=images)
    run = Interpreter(str(file)).get_signature_runner()
    received = np.concatenate([run(image=image[None])["probabilities"] for image in model.preprocess(images)])
    np.testing.assert_allclose(received, wanted, atol=1e-5)
    export.saved_model(result.model, tmp_path / "served")
    served = tf.saved_model.load(tmp_path / "served").signatures["serving_default"]
    (name,) = served.structured_input_signature[1]
    encoded = tf.constant([tf.io.encode_png(image).numpy() for image in images])
    np.testing.assert_allclose(served(**{name: encoded})["probabilities"], wanted, atol=1e-5)


@pytest.mark.full
def test_a_continued_run_has_the_same_and_a_probe_has_its_own(
    results: dict[bool, train.Result], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:

        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr("keras_vit.train.held_out.HeldOut.evaluate", interrupt)
        train.run(recipe(), model="digits", data=data(), out=out, progress=False)
    continued = train.run(recipe(), model="digits", data=data(), out=out, progress=False)
    assert (continued.temperature, continued.metrics) == (results[True].temperature, results[True].metrics)
    for one, other in zip(continued.model.weights, results[True].model.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    probe = train.run("linear-probe", model="digits", data=data(), progress=False)
    assert probe.temperature and probe.temperature < 1 and "temperature" in repr(probe)
