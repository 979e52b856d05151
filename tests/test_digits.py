"""The digits that work offline: the data, the embedded weights, and the script that trained them."""

from __future__ import annotations

import hashlib
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from keras_vit import converters, digits
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.zoo import cards
from places import ROOT

CARD = cards.select(cards.card("ViT-digits"))
SCRIPT = ROOT / "examples" / "train_digits.py"
HELD_OUT = "e61346609b6b015fad5e5839bb40cb5b4199d1d9e0acafe2d882975c4ae03c80"
LARGER = 48  # 1.5 times the training size


@pytest.fixture(scope="module")
def data() -> digits.Digits:
    return digits.load()


def right(model: VisionTransformer, data: digits.Digits) -> int:
    """Return the number of held-out images that are classified correctly."""
    logits = model.predict_on_batch(model.preprocess(data.test_images))
    return int(np.sum(logits.argmax(axis=1) == data.test_labels))


def test_the_split_is_of_all_images_stratified_and_always_the_same(data: digits.Digits) -> None:
    whole, held_out = load_digits(), np.bincount(data.test_labels)
    assert data.train_images.shape == (1437, 8, 8, 3) and data.test_images.shape == (360, 8, 8, 3)
    np.testing.assert_array_equal(np.bincount(data.train_labels) + held_out, np.bincount(whole.target))
    np.testing.assert_allclose(held_out, np.bincount(whole.target) * 360 / 1797, atol=1)  # whole images
    # The images that the weights were not trained on; another split would contain training images.
    content = data.test_images.tobytes() + data.test_labels.astype("<i8").tobytes()
    assert hashlib.sha256(content).hexdigest() == HELD_OUT
    # Grey values on the scale of a byte.
    images = np.concatenate([data.train_images, data.test_images])
    assert images.dtype == np.uint8 and (images == images[..., :1]).all()
    found, wanted = np.sort(images[..., 0], axis=None), np.sort(np.rint(whole.data * 255 / 16), axis=None)
    np.testing.assert_array_equal(found, wanted)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "keras-vit-zoo\[demo\]"'):
        digits.load()


def test_the_embedded_weights_are_those_of_the_card_and_as_accurate(data: digits.Digits) -> None:
    content = Path(CARD.location).read_bytes()
    assert len(content) == CARD.bytes < 1_000_000
    assert hashlib.sha256(content).hexdigest() == CARD.sha256
    (reported,) = CARD.accuracy
    model = converters.load(CARD.location)
    assert model.config.image_size == (reported.image_size,) * 2
    # One image may lie between two classes, so that another processor rounds to the other one.
    assert right(model, data) == pytest.approx(reported.value / 100 * len(data.test_labels), abs=1.02)


@pytest.mark.full
def test_interpolated_positions_keep_what_fresh_ones_lose(data: digits.Digits) -> None:
    model = converters.load(CARD.location, image_size=LARGER)
    interpolated = right(model, data)
    embedding = model.get_layer("position").embedding
    embedding.assign(np.random.default_rng(0).normal(scale=0.02, size=embedding.shape))
    # Measured: 340 of 360, and 83 to 161 over five draws.
    assert interpolated >= 0.75 * len(data.test_labels)
    assert right(model, data) < 0.5 * len(data.test_labels)


@pytest.mark.slow
def test_the_script_makes_such_a_model_again(
    tmp_path: Path, data: digits.Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "again.npz"
    monkeypatch.setattr(sys, "argv", ["train_digits.py", "--output", str(path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    # The range that the script states: another processor sums in another order and gives another model.
    assert right(converters.load(path), data) >= 0.98 * len(data.test_labels)
