"""Few-shot accuracy against scikit-learn, NumPy and the official formula."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import keras
import numpy as np
import pytest
from sklearn.linear_model import Ridge

from keras_vit import digits, zoo
from keras_vit.train import least_squares
from keras_vit.train.few_shots import draw_images, few_shot
from keras_vit.train.least_squares import BIAS, MIN_DEVIATION, Kept, Summed, draw_held_out, fit_head
from refusals import unrefused
from tiny_models import built

L2 = 2.0**10


def problem(images: int, width: int, classes: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features and labels of overlapping classes, and further features."""
    random = np.random.default_rng(0)
    labels = np.concatenate([np.arange(classes), random.integers(0, classes, images - classes)])
    centres = random.normal(size=(classes, width))
    features = random.normal(size=(images, width)) * random.uniform(0.1, 9, width) + 3 + centres[labels]
    return features, labels, random.normal(size=(20, width)) * 5 + 3


def standardised(features: np.ndarray, like: np.ndarray) -> np.ndarray:
    x = (features - like.mean(axis=0)) / (like.std(axis=0) + MIN_DEVIATION)
    return np.concatenate([x, np.full((len(x), 1), BIAS)], axis=1)


def fitted(features: np.ndarray, labels: np.ndarray, others: np.ndarray, l2: float) -> np.ndarray:
    kernel, bias = fit_head(features, labels, num_classes=4, l2=l2)
    return others @ kernel + bias


# More images than features, equally many (with the bias), fewer: both ways of solving and the limit between them.
SHAPES = [(200, 16), (17, 16), (16, 16), (12, 40)]


def test_the_solution_is_that_of_scikit_learns_ridge() -> None:
    for (images, width), l2 in itertools.product(SHAPES, (1e-3, L2)):
        features, labels, others = problem(images, width)
        found = fitted(features, labels, others, l2)
        ridge = Ridge(alpha=l2, fit_intercept=False, solver="svd")
        ridge.fit(standardised(features, features), 2.0 * np.eye(4)[labels] - 1)
        # Both are float64; with a small l2 the inverse loses half of its digits (condition number 1e8).
        np.testing.assert_allclose(found, ridge.predict(standardised(others, features)), rtol=1e-6, atol=1e-6)


def test_a_feature_that_never_changes_does_no_harm() -> None:
    features, labels, others = problem(50, 8)
    features[:, 3] = others[:, 3] = 7.0
    found = fitted(features, labels, others, L2)
    rest = [column for column in range(8) if column != 3]
    expected = fitted(features[:, rest], labels, others[:, rest], L2)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_sums_give_the_heads_and_choices_of_features_that_are_kept() -> None:
    features, labels, _ = problem(120, 16)
    columns = np.array([1, 2, 5, 7, 11])
    kept = Kept(features, labels, num_classes=4)
    summed = Summed.empty(16, 4)
    held_out = kept._folds == 0
    for rows in np.array_split(np.flatnonzero(~held_out), 3):
        summed.add(features[rows], labels[rows])
    summed = Summed(summed.products, summed.sums, held_out=(features[held_out], labels[held_out]))
    scores, seen = next(iter(summed.predict(columns)(0.5)))
    first, same = next(iter(kept.predict(columns)(0.5)))
    np.testing.assert_array_equal(seen, same)
    # Features that are summed are standardised by the images that the fit sees. Float32 scores of about 1.
    own = Kept(features[~held_out], labels[~held_out], num_classes=4).head(columns, 0.5 * np.sum(~held_out))
    np.testing.assert_allclose(scores, features[held_out][:, columns] @ own[0] + own[1], atol=1e-5)
    assert first.shape == scores.shape
    assert summed.count == kept.count == 120
    for found, wanted in zip(summed.head(columns, 3.0), kept.head(columns, 3.0), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_of_many_images_in_the_order_of_their_classes_all_classes_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.repeat(np.arange(20), 50)
    fifth = draw_held_out(labels, seed=0)
    assert np.bincount(labels[fifth]).tolist() == [10] * 20
    monkeypatch.setattr(least_squares, "MOST_HELD_OUT", 60)
    fewer = draw_held_out(labels, seed=0)
    assert len(fewer) == 60 and set(fewer) < set(fifth) and np.ptp(np.bincount(labels[fewer])) <= 1


def test_images_are_drawn_by_seed_and_more_shots_hold_fewer() -> None:
    labels = np.random.default_rng(0).integers(0, 3, 100)
    one, same, other = (draw_images(labels, 5, num_classes=3, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    for number, (few, many) in enumerate(zip(one, draw_images(labels, 20, num_classes=3, seed=0), strict=True)):
        assert len(set(few)) == 5 and set(labels[many]) == {number}
        np.testing.assert_array_equal(few, many[:5])
    with pytest.warns(UserWarning, match="1 of 2 classes have fewer than 5 images, class 1 2"):
        chosen = draw_images([0] * 9 + [1] * 2, 5, num_classes=2, seed=0)
    assert [len(some) for some in chosen] == [5, 2]
    with pytest.raises(ValueError, match=r"these have none: \[1\]"):
        draw_images([0, 2], 1, num_classes=3, seed=0)


@functools.cache
def arrays() -> dict[str, Any]:
    """Return some of the digits as arrays, so that their order is known."""
    data = digits.load()
    return {
        "train": (data.train_images[:400], data.train_labels[:400]),
        "evaluation": (data.test_images[:128], data.test_labels[:128]),
    }


@pytest.mark.full
def test_few_shot_on_digits_is_the_official_formula_on_the_models_features() -> None:
    model, data = zoo.load("digits"), arrays()
    found = few_shot(model, data, shots=(5, 1, 5), seed=3)
    train, test = (
        model.features(model.preprocess(data[part][0]), ["pre_logits"])["pre_logits"].numpy().astype(np.float64)
        for part in data
    )
    labels, expected_labels = data["train"][1], data["evaluation"][1]
    random = np.random.default_rng(3)
    chosen = [random.permutation(np.flatnonzero(labels == number)) for number in range(10)]
    assert list(found) == [1, 5]
    for shots in found:
        taken = np.concatenate([some[:shots] for some in chosen])
        x = standardised(train[taken], train[taken])
        weights = x.T @ np.linalg.solve(x @ x.T + L2 * np.eye(len(x)), 2.0 * np.eye(10)[labels[taken]] - 1)
        expected = np.mean((standardised(test, train[taken]) @ weights).argmax(axis=1) == expected_labels)
        # Features differ in the last float32 digits between batch sizes, which may change one prediction.
        assert found[shots] == pytest.approx(expected, abs=1.01 / len(test))


def test_another_keras_model_gives_a_layer_of_its_own() -> None:
    images = keras.Input((8, 8, 3))
    flat = keras.layers.Flatten(name="flat")(images)
    model = keras.Model(images, keras.layers.Dense(3)(flat))
    assert few_shot(model, arrays(), shots=(10,), layer="flat")[10] > 0.8  # the range of raw pixels of digits


IMAGES = np.zeros((4, 8, 8, 3), np.uint8)
BOTH = {part: (IMAGES, np.eye(2)[[0, 1, 0, 1]]) for part in ("train", "evaluation")}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"shots": ()}, "shots must be integers >= 1"),
    ({"shots": (0, 5)}, "shots must be integers >= 1"),
    ({"l2": 0.0}, "l2 above 0"),
    ({"layer": "pre_logit"}, "layers are some of"),
    ({"layer": "block_1"}, "'block_1'"),
    ({"data": BOTH}, "one label per image"),
    ({"data": {"train": (IMAGES, np.arange(4))}}, "a training and a held-out split"),
]


def test_what_cannot_be_done_is_said() -> None:
    model = built()
    assert not unrefused(lambda **asked: few_shot(model, **{"data": arrays(), **asked}), WRONG)
