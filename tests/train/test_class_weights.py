"""Weights of classes in recipes and probes: those of Keras' fit and of scikit-learn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics import balanced_accuracy_score
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_class_weight

from keras_vit import digits, train, zoo
from keras_vit.cli.options import parse_fields
from keras_vit.dense.map_tasks import Segmentation
from keras_vit.train.data.sources import open_data
from keras_vit.train.label_check import class_weights
from keras_vit.train.least_squares import Kept, Summed, fit_head
from keras_vit.train.objective import supervised
from keras_vit.train.prepare import build_state
from marks import full_except
from model_weights import values
from refusals import unrefused
from tiny_models import built

LABELS = np.array([0, 1, 2, 0, 1, 0, 0, 0, 2, 0, 0, 1])  # 7, 3 and 2 of the classes


def recipe(**changes: Any) -> train.Recipe:
    fields = {"optimizer": "sgd", "steps": 2, "batch_size": 4, "xla": False, "crop": "none", "flip": False}
    return train.recipe("digits", **fields | {"randaugment_layers": 0, "mixup": 0.0} | changes)


def arrays(labels: np.ndarray = LABELS, **names: Any) -> dict[str, Any]:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 16, 16, 3), dtype=np.uint8)
    return {"train": (images, labels), **names}


@pytest.mark.parametrize("objective", ["softmax", "sigmoid"])
def test_loss_and_gradients_are_those_of_keras_fit(objective: str) -> None:
    model, weights = built(num_classes=3), np.array([0.5, 3, 2], np.float32)
    images, targets = model.preprocess(arrays()["train"][0]), np.eye(3, dtype=np.float32)[LABELS]
    ours = supervised(recipe(objective=objective), model, class_weights=weights)
    with tf.GradientTape() as tape:
        losses, _ = ours.losses(model, {"image": images, "label": targets}, tf.constant([0, 0]))
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    before = values(model)
    # Keras' binary cross-entropy is the mean over classes, ours the sum.
    keras_loss = keras.losses.CategoricalCrossentropy if objective == "softmax" else keras.losses.BinaryCrossentropy
    model.compile(keras.optimizers.SGD(1.0), keras_loss(from_logits=True))
    history = model.fit(images, targets, class_weight=dict(enumerate(weights)), batch_size=len(LABELS), verbose=0)
    factor = 1 if objective == "softmax" else 3
    assert float(loss) == pytest.approx(factor * history.history["loss"][0], rel=1e-5)  # float32
    steps = {path: before[path] - value for path, value in values(model).items()}
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        # The step is a difference of weights up to 1 in float32.
        np.testing.assert_allclose(factor * steps[variable.path], gradient, rtol=1e-3, atol=2e-6)


def test_pixels_are_weighted_as_by_keras_loss() -> None:
    random, weights = np.random.default_rng(0), np.array([0.5, 3, 2], np.float32)
    logits, labels = random.normal(size=(1, 8, 8, 3)).astype(np.float32), random.integers(0, 3, (1, 8, 8))
    labels[0, 0] = 255
    [loss], _ = Segmentation(num_classes=3).losses(
        logits, labels.astype(np.int32), kind="softmax", class_weights=weights
    )
    reference = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255)
    assert float(loss) == pytest.approx(float(reference(labels, logits, sample_weight=weights[labels % 255])), rel=1e-5)


def test_weights_are_balanced_or_stated_by_class() -> None:
    data = open_data(arrays(class_names=["ant", "bee", "cat", "dog"]))
    expected = compute_class_weight("balanced", classes=np.arange(3), y=LABELS)
    np.testing.assert_allclose(class_weights(recipe(class_weights="balanced"), data), [*expected, 1], rtol=1e-6)
    assert class_weights(recipe(), data) is None
    for given in ([1, 5, 1, 1], {"bee": 5}, {1: 5.0}, parse_fields(['x={"bee": 5}'])["x"]):
        np.testing.assert_array_equal(class_weights(recipe(class_weights=given), data), [1, 5, 1, 1])
    maps = np.where(np.arange(256).reshape(1, 16, 16) < 32, 1, 0).repeat(12, axis=0)
    balanced = class_weights(recipe(class_weights="balanced"), open_data(arrays(maps)))
    np.testing.assert_allclose(balanced, [256 / 448, 256 / 64], rtol=1e-6)


def test_weights_that_fit_no_class_are_refused() -> None:
    cases = [
        ({"class_weights": "balancd"}, "must be one of ['balanced']"),
        ({"class_weights": [1, -1]}, "must be in [0, inf). Received: -1"),
        ({"class_weights": {"a": "b"}}, "class_weights.a must be an integer or a number"),
        ({"class_weights": [0, 0]}, "class_weights must have one above 0"),
        ({"class_weights": "balanced", "objective": "masked_patch"}, "are for objective='softmax' or 'sigmoid'"),
    ]
    assert not unrefused(recipe, cases)
    data, rows = open_data(arrays()), open_data(arrays(np.eye(3)[LABELS] + np.eye(3)[0] * (LABELS > 0)[:, None]))

    def resolve(opened: Any, given: Any) -> Any:
        return class_weights(recipe(class_weights=given), opened)

    wrong = [
        ({"opened": data, "given": [1, 2]}, "one for each of the 3 classes of arrays: 0, 1, 2. Received: 2"),
        ({"opened": data, "given": {"dog": 2}}, "class_weights has 'dog', which is no class of the data"),
        ({"opened": rows, "given": "balanced"}, "class_weights need one class for each image or pixel"),
    ]
    assert not unrefused(resolve, wrong)


def test_weights_of_trials_are_checked_before_the_first_run(tmp_path: Path) -> None:
    data, model = arrays(), built(num_classes=3)
    values_of_runs = {"class_weights": ["balanced", {"dog": 2}]}
    source = {**data, "evaluation": data["train"]}
    with pytest.raises(ValueError, match="class_weights has 'dog', which is no class of the data"):
        train.try_values(recipe(), values_of_runs, model=model, data=source, out=tmp_path / "x", progress=False)
    assert not (tmp_path / "x").exists()


def test_a_run_weighs_the_classes_by_their_names_in_any_order() -> None:
    model, data = built(num_classes=2, labels=("b", "a")), open_data(arrays(LABELS % 2, class_names=["a", "b"]))
    images, losses = tf.zeros((2, *model.input_shape[1:])), []
    for given in (None, {"a": 5, "b": 3}, [5, 3]):
        chosen = recipe(reset_head="auto", class_weights=given)
        state, matched = build_state(chosen, model, data, tf.distribute.get_strategy(), out=None, print_line=print)
        assert matched.class_names == ("b", "a")
        batch = {"image": images, "label": tf.eye(2)}
        losses.append(state.objective.losses(state.model, batch, tf.constant([0, 0]))[0].numpy())
    for weighted in losses[1:]:
        np.testing.assert_allclose(weighted, losses[0] * [3, 5], rtol=1e-6)


@pytest.mark.parametrize("name", full_except(["linear-probe"], ["linear-probe", "calibrated", "not calibrated"]))
def test_a_weighted_run_shows_the_balanced_accuracy_of_scikit_learn(name: str, tmp_path: Path) -> None:
    data = digits.load()
    few = data.train_labels < 4
    images, labels = data.train_images[few][:80], data.train_labels[few][:80]
    held_out = data.test_images[:60], np.minimum(data.test_labels[:60], 3)  # 4 to 9 are called 3
    source = {"train": (images, labels), "evaluation": held_out}
    if name == "linear-probe":
        chosen = train.recipe(name, class_weights="balanced")
    else:
        steps: Any = {"steps": 1, "batch_size": 8, "xla": False, "calibrate": name == "calibrated"}
        chosen = train.recipe("finetune-digits", class_weights="balanced", **steps)
    result = train.run(chosen, model="digits", data=source, progress=False)
    predicted = np.argmax(result.model.predict(result.model.preprocess(held_out[0]), verbose=0), axis=1)
    want = balanced_accuracy_score(held_out[1], predicted)
    assert result.metrics["balanced_accuracy"] == pytest.approx(want, abs=1e-12)
    assert result.metrics["accuracy"] != pytest.approx(want, abs=0.01)
    assert any("evaluation_balanced_accuracy" in line for line in result.history)
    examined = train.examine(result.model, {"evaluation": held_out})
    assert examined.to_dict()["balanced_accuracy"] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("kind", ["kept", "summed"])
@pytest.mark.parametrize("classes", [2, 3])
def test_a_head_is_that_of_scikit_learn(kind: str, classes: int) -> None:
    random, l2, labels = np.random.default_rng(0), 8.0, np.tile(LABELS, 8) % classes
    features = (random.normal(size=(len(labels), 5)) + labels[:, None] * [1, 0, 2, 0, 0]).astype(np.float32)
    weights = compute_class_weight("balanced", classes=np.arange(classes), y=labels)
    if kind == "kept":
        kernel, bias = Kept(features, labels, num_classes=classes, class_weights=weights).head(np.arange(5), l2)
    else:
        summed = Summed.empty(5, classes, weights)
        summed.add(features, labels)
        kernel, bias = summed.head(np.arange(5), l2)
    scaler = StandardScaler().fit(features, sample_weight=weights[labels])
    reference = RidgeClassifier(alpha=l2, class_weight="balanced").fit(scaler.transform(features), labels)
    expected = reference.decision_function(scaler.transform(features))
    scores = features @ kernel + bias
    found = scores if classes > 2 else scores[:, 1]
    # The bias is regularised by l2 / 100^2, and 1e-5 is added to the deviations.
    np.testing.assert_allclose(found, expected, atol=1e-4)
    # A weight of 2 is every image of the class twice.
    double = np.where(np.arange(classes) == 1, 2.0, 1.0)
    twice = np.concatenate([np.arange(len(labels)), np.flatnonzero(labels == 1)])
    expected_head = fit_head(features[twice], labels[twice], num_classes=classes, l2=l2)
    found_head = Kept(features, labels, num_classes=classes, class_weights=double).head(np.arange(5), l2)
    for one, other in zip(found_head, expected_head, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


def test_a_probe_weighs_the_classes() -> None:
    random = np.random.default_rng(0)
    images, noise = random.integers(0, 256, (164, 32, 32, 3), dtype=np.uint8), np.arange(64) % 16 == 0
    source = {"train": (images[:64], noise.astype(int)), "class_names": ["often", "rare"]}
    model = zoo.load("digits", num_classes=0)
    with pytest.warns(UserWarning, match=r"far from balanced, 15 : 1 \(60 images of often, 4 of rare\)"):
        plain = train.run("linear-probe", model=model, data=source, progress=False).model
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        changes = {"class_weights": {"rare": 15}}
        weighted = train.run("linear-probe", model=model, data=source, changes=changes, progress=False).model
    shares = [(each(each.preprocess(images[64:])).numpy().argmax(axis=1) == 1).mean() for each in (plain, weighted)]
    assert shares[0] < 0.1 < shares[1]  # labels that images do not show: 1 of 16 against one of two
