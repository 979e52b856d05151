"""Embeddings, and classifiers from text embeddings: the numbers of the official code, as model, file and export."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from family_table import formats_of
from keras_vit import ViTConfig, converters, digits, export, zoo
from keras_vit.errors import CheckpointError
from keras_vit.export.litert.emit import build_file
from keras_vit.export.litert.options import Options
from keras_vit.export.server import model_function
from keras_vit.model.layers import L2Normalization
from marks import full_except
from reference_cases import arrays, distance
from tiny_models import built, prepared, tiny

DATA = Path(__file__).parent / "data"
pytestmark = pytest.mark.filterwarnings("ignore:keras_vit. .* has other parts:UserWarning")

# Case -> facts that the file does not state, the official output before normalization, stored logit scale and bias.
CASES: dict[str, tuple[dict[str, Any], str, float, float]] = {
    "families/hf_clip_full": ({}, "image_features", 2.3, 0),
    "families/hf_clip_vision": ({}, "pooler_output", 2.3, 0),
    "families/hf_siglip_full": ({}, "image_features", 2.3, -1.7),
    "google_families/bv_siglip2": ({}, "output", 2.1, -3.3),
    "google_families/bv_siglip_head": ({"projection_head": True}, "output", 2.1, -3.3),
}
# What encoders there are, beside those of the cases: no norm is left to fold, one is, two layers follow.
ENCODERS: dict[str, dict[str, Any]] = {
    "token": {"num_classes": 0},
    "gap": {"num_classes": 0, "classifier": "gap", "class_token": True, "final_norm": "pooled"},
    "map": {"num_classes": 0, "classifier": "map"},
    "representation": {"num_classes": 0, "representation_size": 24},
    "projection": {"num_classes": 24, "projection_head": True},
}


MODES = sorted(path.stem for path in (Path(__file__).parents[1] / "converters" / "exports").glob("*.toml"))


def unit(x: Any) -> np.ndarray:
    """Return rows of length 1, computed by NumPy in float64."""
    x = np.asarray(x, np.float64)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def texts(model: Any, count: int = 3) -> np.ndarray:
    """Return text embeddings of various lengths."""
    return np.random.default_rng(5).normal(scale=4, size=(count, model.output_shape[-1]))


def classifier(**changes: Any) -> Any:
    """Return a tiny zero-shot classifier of three classes."""
    model = built(**changes)
    return zoo.zero_shot_head(model, texts(model), ["cat", "dog", "eel"], 10, -2)


@pytest.mark.parametrize("name", full_except(["families/hf_clip_full", "google_families/bv_siglip2"], CASES))
def test_logits_are_those_of_the_official_embeddings(name: str) -> None:
    facts, key, log_scale, bias = CASES[name]
    file = DATA / name / "checkpoint.npz"
    model = converters.load(file if file.exists() else file.parent, config=facts)
    case = arrays(next((DATA / name).glob("[or]*ut*.npz"), DATA / name / "reference.npz"))
    images, features = next(case[k] for k in ("input", "input_nhwc") if k in case), unit(case[key])
    np.testing.assert_allclose(features, case.get("normalized", features), atol=1e-6)
    text = texts(model)
    made = zoo.zero_shot_head(model, text, ["a", "b", "c"], np.exp([log_scale]), [bias])  # as arrays of files
    # Float32 noise of the cases is up to 4e-7 of the largest number; dot products of 24 to 32 numbers add some.
    assert distance(made(images), np.exp(log_scale) * features @ unit(text).T + bias) < 3e-6
    assert distance(made.features(images, ["pre_logits"])["pre_logits"], features) < 3e-6


@pytest.mark.parametrize("kind", full_except(["map"], ENCODERS))
def test_every_kind_of_encoder_classifies_and_is_written_as_one_file(kind: str, tmp_path: Path) -> None:
    model, encoder = classifier(**ENCODERS[kind]), built(**ENCODERS[kind])
    images = prepared(model.config, batch=3)
    feature = model.with_config(model.config.replace(num_classes=0))
    for made, want in (
        (feature, unit(encoder(images))),
        (model, 10 * unit(encoder(images)) @ unit(texts(encoder)).T - 2),
    ):
        assert distance(made(images), want) < 2e-6
        served = model_function(made)(images)
        assert distance(served.get("logits", served["features"]), want) < 2e-6
        build_file(made, Options(batch=3)).write(tmp_path / "m.tflite")
        assert distance(export.runner(tmp_path / "m.tflite")(images), want) < 3e-6
    assert model.config.labels == ("cat", "dog", "eel")
    assert ViTConfig(**model.config.to_dict()) == model.config


@pytest.fixture(scope="module")
def prototypes() -> Any:
    """Return a trained encoder with the mean embedding of each digit as its text."""
    encoder, data = zoo.load("digits", num_classes=0), digits.load()
    means = [encoder.embed(data.train_images[data.train_labels == n][:10]).mean(axis=0) for n in range(10)]
    return zoo.zero_shot_head(encoder, means, [f"digit {n}" for n in range(10)], logit_scale=20)


@pytest.mark.parametrize("mode", full_except(["dynamic"], MODES))
def test_every_mode_holds_it_within_its_thresholds(mode: str, prototypes: Any, tmp_path: Path) -> None:
    data = digits.load()
    report = export.tflite(
        prototypes,
        tmp_path / "m.tflite",
        quantize=mode,
        calibration=data.train_images[:32],
        verify=data.test_images[:50],
    )
    assert report.agreement >= 0.98
    with zipfile.ZipFile(tmp_path / "m.tflite") as archive:
        assert archive.read(archive.namelist()[0]).decode().splitlines() == list(prototypes.config.labels)


def test_it_classifies_and_is_saved(prototypes: Any, tmp_path: Path) -> None:
    data = digits.load()
    best = [ranking[0].label for ranking in prototypes.classify(data.test_images[:32], top=1)]
    assert np.mean([label == f"digit {n}" for label, n in zip(best, data.test_labels, strict=False)]) > 0.9
    images = prototypes.preprocess(data.test_images[:4])
    prototypes.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(np.asarray(again(images)), np.asarray(prototypes(images)))


@pytest.mark.full
def test_it_is_served(prototypes: Any, tmp_path: Path) -> None:
    assert export.saved_model(prototypes, tmp_path / "served").max_error < 1e-4  # logits are up to 20


def test_formats_that_cannot_hold_it_are_refused(tmp_path: Path) -> None:
    model = classifier(num_classes=0)
    assert formats_of(model.config) == {}
    with pytest.raises(CheckpointError, match="normalize_features=True"):
        converters.save(model, tmp_path / "m.npz", format="big_vision")
    assert model.with_config(model.config.replace(num_classes=2)).config.labels is None


def test_clip_keeps_its_projection_in_other_formats(tmp_path: Path) -> None:
    model = converters.load(DATA / "families/hf_clip_full")
    assert model.config.projection_head
    again = converters.load(converters.save(model, tmp_path / "timm", format="timm"))
    assert again.config.projection_head
    assert not model.config.replace(num_classes=7).projection_head


def test_a_zero_feature_has_finite_results_and_gradients() -> None:
    layer, x = L2Normalization(), tf.Variable([[0.0, 0.0], [3.0, 4.0]])
    with tf.GradientTape() as tape:
        y = layer(x)
    np.testing.assert_allclose(y, [[0, 0], [0.6, 0.8]], atol=1e-7)
    assert np.isfinite(tape.gradient(y, x)).all()


def test_images_are_embedded_from_wherever_they_are(tmp_path: Path) -> None:
    model = built(num_classes=0)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 40, 3), np.uint8)
    want = unit(model(model.preprocess(pixels)))
    paths = [tmp_path / f"{n}.png" for n in range(3)]
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(image).save(path)
    for images in (pixels, list(pixels), paths, tmp_path, [Image.open(path) for path in paths]):
        found = model.embed(images, batch_size=2)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, want, atol=1e-6)
    np.testing.assert_allclose(model.embed(pixels[0]), want[:1], atol=1e-6)
    head = built()  # classes are no embedding
    assert model.embed(pixels).shape == head.embed(pixels).shape
    for wrong in ([], pixels[:0]):
        with pytest.raises(ValueError, match="at least one image"):
            model.embed(wrong)
    with pytest.raises(ValueError, match="features of every token"):
        built(classifier="unpooled").embed(pixels)


@pytest.fixture(scope="module")
def encoder() -> Any:
    """Return a model without a head; tests do not change it."""
    return built(num_classes=0, num_layers=1)


GOOD: dict[str, Any] = {"text_embeddings": np.eye(2, 32), "labels": ["a", "b"], "logit_scale": 1, "bias": 0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"text_embeddings": np.eye(2, 31)}, r"\(classes, 32\).* Received: shape \(2, 31\)"),
        ({"text_embeddings": np.ones(32)}, r"shape \(32,\)"),
        ({"text_embeddings": "a dog"}, "text_embeddings must be numbers"),
        ({"text_embeddings": None}, "text_embeddings must be numbers"),
        ({"text_embeddings": [[1, 2], [3]]}, "text_embeddings must be numbers"),
        ({"text_embeddings": np.eye(0, 32), "labels": []}, r"shape \(0, 32\)"),
        ({"text_embeddings": np.eye(2, 32) * [[1], [0]]}, r"no row zero.*rows \[1\]"),
        ({"text_embeddings": np.full((2, 32), np.nan)}, r"finite.*rows \[0 1\]"),
        ({"labels": ["a"]}, "2 different names"),
        ({"labels": ["a", "a"]}, "2 different names.*'a', 'a'"),
        ({"labels": "ab"}, "2 different names.*'ab'"),
        ({"labels": [1, 2]}, "2 different names"),
        ({"labels": None}, "2 different names.*None"),
        ({"logit_scale": 0}, "logit_scale must be a number above 0"),
        ({"logit_scale": np.inf}, "logit_scale must be a number above 0"),
        ({"logit_scale": [1, 2]}, "logit_scale must be a number above 0"),
        ({"logit_scale": "x"}, "logit_scale must be a number above 0"),
        ({"bias": np.nan}, "bias"),
        ({"bias": 1e39}, "bias"),
    ],
)
def test_wrong_arguments_get_one_clear_error(changes: dict[str, Any], named: str, encoder: Any) -> None:
    with pytest.raises(ValueError, match=named):
        zoo.zero_shot_head(encoder, **{**GOOD, **changes})


def test_all_that_is_wrong_is_named_at_once(encoder: Any) -> None:
    with pytest.raises(ValueError, match="text_embeddings.*labels.*logit_scale"):
        zoo.zero_shot_head(encoder, np.eye(2, 3), ["a"], -1)


@pytest.mark.parametrize(
    "model", [{"num_classes": 3}, {"num_classes": 0, "distilled": True}, {"classifier": "unpooled", "num_classes": 0}]
)
def test_models_without_one_embedding_are_refused(model: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="head of 3 classes|distilled|unpooled"):
        zoo.zero_shot_head(built(**model), **GOOD)


@pytest.mark.parametrize(
    "fields", [{"normalize_features": True}, {"representation_size": 8}, {"labels": tuple("abcde")}]
)
def test_a_projection_is_no_classifier(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="projection_head"):
        tiny(projection_head=True, **fields)
