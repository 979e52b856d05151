"""A result says what it was trained for: probabilities, loss and metrics of a head of sigmoids, in every file of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from sklearn.metrics import average_precision_score, log_loss

from keras_vit import digits, export, train
from keras_vit.errors import CheckpointError
from keras_vit.model.config import Preprocessing
from keras_vit.model.task import average_precision
from keras_vit.train.evaluation import Evaluation, evaluate

NAMES = ["odd", "large", "seven"]
SEEN = digits.load()


def rows(numbers: np.ndarray) -> np.ndarray:
    return np.stack([numbers % 2, numbers > 4, numbers == 7], axis=1).astype(np.int64)


def data(classes: int = 3) -> dict[str, Any]:
    images, targets = SEEN.test_images[:200], rows(SEEN.test_labels[:200])[:, :classes]
    train_targets = rows(SEEN.train_labels[:64])[:, :classes]
    return {
        "train": (SEEN.train_images[:64], train_targets),
        "evaluation": (images, targets),
        "class_names": NAMES[:classes],
    }


def recipe(**changes: Any) -> train.Recipe:
    fixed = {"batch_size": 32, "image_size": None, "xla": False, "learning_rate": 0.05}
    return train.recipe("finetune-digits", **fixed, **{"steps": 4, "objective": "sigmoid"} | changes)


def probabilities(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Iterator[train.Result]:
    out = tmp_path_factory.mktemp("sigmoid") / "run"
    yield train.run(recipe(eval_steps=2), model="digits", data=data(), out=out, progress=False)


def expected(logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return the metrics by scikit-learn, from logits in float32: hence the tolerances of 1e-6."""
    chances = probabilities(logits)
    return {
        "mean_average_precision": average_precision_score(targets, chances),
        "accuracy": np.mean((chances > 0.5) == targets),
        "loss": sum(log_loss(targets[:, k], chances[:, k], labels=[0, 1]) for k in range(targets.shape[1])),
    }


def test_the_figures_of_a_run_are_those_of_its_objective_over_all_images(result: train.Result) -> None:
    images, targets = data()["evaluation"]
    assert not targets.any(axis=1).all()  # images without a label count
    logits = result.model.predict(result.model.preprocess(images), verbose=0)
    wanted = expected(logits, targets)
    assert result.metrics == pytest.approx(wanted, rel=1e-6)
    assert list(result.metrics)[0] == "mean_average_precision"  # which chooses the best model
    again = train.evaluate(result.model, {"evaluation": data()["evaluation"], "class_names": NAMES})
    assert (again.metrics, again.labels) == (pytest.approx(wanted, rel=1e-6), "several")
    assert (again.count, again.unlabelled, again.mean_average_precision) == (200, 0, again.metrics[list(wanted)[0]])
    assert [*again.by_class] == NAMES
    each = [again.by_class[name]["average_precision"] for name in NAMES]
    assert each == pytest.approx(average_precision_score(targets, logits, average=None), rel=1e-6)


@pytest.mark.full
def test_every_file_of_a_run_says_sigmoid(result: train.Result, tmp_path: Path) -> None:
    assert result.out
    images = SEEN.test_images[:5]
    wanted = probabilities(result.model.predict(result.model.preprocess(images), verbose=0))
    best = json.loads(Path(result.out, "best.json").read_text())
    for name in ("model.keras", "best.keras"):
        model = keras.saving.load_model(Path(result.out, name))
        assert model.config.probabilities == "sigmoid"
        measured = train.evaluate(model, {"evaluation": data()["evaluation"], "class_names": NAMES})
        assert name == "model.keras" or {"step": best["step"], **measured.metrics} == pytest.approx(best, rel=1e-6)
    found = result.model.classify(images, top=3)
    by_name = np.array([[dict((label, p) for _, label, p in each)[name] for name in NAMES] for each in found])
    np.testing.assert_allclose(by_name, wanted, atol=1e-6)
    # Weights are float32 in both files: rounding of another order of operations.
    file = tmp_path / "m.tflite"
    export.tflite(result.model, file, quantize="none", output="probabilities", verify=images)
    interpreter = Interpreter(str(file))
    run = interpreter.get_signature_runner()
    size = run.get_input_details()["image"]["shape"][1:3]
    prepared = result.model.preprocess(images)
    assert tuple(size) == prepared.shape[1:3]
    received = np.concatenate([run(image=image[None])["probabilities"] for image in prepared])
    np.testing.assert_allclose(received, wanted, atol=1e-5)
    export.saved_model(result.model, tmp_path / "served")
    served = tf.saved_model.load(tmp_path / "served").signatures["serving_default"]
    encoded = tf.constant([tf.io.encode_png(image).numpy() for image in images])
    (name,) = served.structured_input_signature[1]
    np.testing.assert_allclose(served(**{name: encoded})["probabilities"], wanted, atol=1e-5)


@pytest.mark.full
def test_a_continued_run_says_sigmoid_and_one_of_softmax_says_softmax(tmp_path: Path, result: train.Result) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:

        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr("keras_vit.train.held_out.HeldOut.evaluate", interrupt)
        train.run(recipe(eval_steps=2), model="digits", data=data(), out=out, progress=False)
    continued = train.run(recipe(eval_steps=2), model="digits", data=data(), out=out, progress=False)
    assert continued.model.config.probabilities == "sigmoid"
    assert continued.metrics == result.metrics
    with pytest.raises(CheckpointError, match="objective"):
        train.run(recipe(objective="softmax"), model="digits", data=data(), out=out, progress=False)
    single = {"train": (SEEN.train_images[:64], SEEN.train_labels[:64]), "class_names": [f"d{k}" for k in range(10)]}
    other = train.run(recipe(objective="softmax", steps=1), model=continued.model, data=single, progress=False)
    assert other.model.config.probabilities == "softmax"
    with pytest.raises(ValueError, match="config must not have probabilities"):
        recipe(config={"probabilities": "softmax"})


AS_IT_IS = Preprocessing(mean=(0,), std=(1 / 255,))


def measured(logits: np.ndarray, targets: np.ndarray, **options: Any) -> Evaluation:
    """Evaluate a model of sigmoids that looks logits up by the number in the first two pixels of an image."""
    images = keras.Input((2, 2, 3))
    numbers = keras.ops.cast(keras.ops.round(images[:, 0, 0, 0] + 256 * images[:, 0, 1, 0]), "int32")
    model: Any = keras.Model(images, keras.ops.take(logits, numbers, axis=0))
    from keras_vit.model.task import Classification

    model.task = Classification(num_classes=logits.shape[1], probabilities="sigmoid")
    pixels = np.zeros((len(targets), 2, 2, 3), np.uint8)
    pixels[:, 0, 0, :], pixels[:, 0, 1, :] = (np.arange(len(targets))[:, None] >> shift & 255 for shift in (0, 8))
    held_out = {"evaluation": (pixels, targets), "num_classes": logits.shape[1]}
    return evaluate(model, held_out, preprocessing=AS_IT_IS, **options)


def test_one_label_an_image_has_the_loss_of_sigmoids_too() -> None:
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(101, 5)).astype(np.float32), random.integers(0, 5, 101)
    found = measured(logits, labels)
    chances = probabilities(logits)
    one_hot = np.eye(5)[labels]
    bce = -(one_hot * np.log(chances) + (1 - one_hot) * np.log(1 - chances)).sum(axis=1).mean()
    assert (found.labels, found.loss) == ("single", pytest.approx(bce, rel=1e-6))
    assert found.top1 == pytest.approx(np.mean(logits.argmax(axis=1) == labels))


def test_real_labels_of_sigmoids_leave_images_out_of_the_accuracy_alone() -> None:
    random = np.random.default_rng(0)
    logits, targets = random.normal(size=(40, 6)).astype(np.float32), (random.random((40, 6)) < 0.3).astype(np.int64)
    targets[::5] = 0
    kept = targets.any(axis=1)
    found = measured(logits, targets, labels="real", batch_size=16)
    best = np.take_along_axis(targets, logits.argmax(axis=1)[:, None], axis=1)[:, 0]
    assert (found.count, found.unlabelled, found.top1) == (kept.sum(), (~kept).sum(), best[kept].mean())
    assert found.loss == pytest.approx(expected(logits, targets)["loss"], rel=1e-6)


def test_odd_scores_and_classes_without_images() -> None:
    random = np.random.default_rng(0)
    scores, targets = random.integers(0, 4, 50).astype(np.float32), random.integers(0, 2, 50)  # many ties
    assert average_precision(scores, targets) == pytest.approx(average_precision_score(targets, scores))
    assert np.isnan(average_precision(scores, 0 * targets))
    assert average_precision(scores, 0 * targets + 1) == 1
    logits = np.stack([scores, -scores, np.full(50, -np.inf, np.float32)], axis=1)
    rare = np.stack([targets, 1 - targets, 0 * targets], axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's of a class without images
        found = measured(logits, rare)
    wanted = [average_precision_score(rare[:, k], logits[:, k]) for k in range(2)]
    assert found.mean_average_precision == pytest.approx(np.mean(wanted))
    assert np.isfinite(found.loss) and found.to_dict()["by_class"]["2"]["average_precision"] is None
    assert "mean_average_precision" not in measured(logits, 0 * rare).metrics  # of no class it is known
