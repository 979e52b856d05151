"""Zero-shot classifiers from text embeddings and from texts: the official numbers, as model, file and export."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from command_line import fails, run
from family_table import formats_of
from keras_vit import ViTConfig, converters, digits, export, text, train, zoo
from keras_vit.errors import CheckpointError
from keras_vit.export.litert.head import build_file
from keras_vit.export.litert.plan import FilePlan
from keras_vit.export.server import model_function
from keras_vit.model.layers import L2Normalization
from keras_vit.model.task import Classification
from marks import full_except
from places import DATA, ROOT
from reference_cases import arrays, distance
from tiny_models import built, prepared, tiny

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
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

# Cases with images and texts. The image tower of openclip_siglip is timm's, whose file does not state its heads.
PAIRS = sorted(path.parent.name for path in (DATA / "text").glob("*/reference.npz") if "images" in arrays(path))


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
        build_file(made, FilePlan(batch=3)).write(tmp_path / "m.tflite")
        assert distance(export.runner(tmp_path / "m.tflite")(images), want) < 3e-6
    assert model.config.labels == ("cat", "dog", "eel")
    assert ViTConfig(**model.config.to_dict()) == model.config


@pytest.fixture(scope="module")
def prototypes() -> Any:
    """Return a trained encoder with the mean embedding of each digit as its text."""
    encoder, data = zoo.load("digits", num_classes=0), digits.load()
    means = [encoder.embed(data.train_images[data.train_labels == n][:10]).mean(axis=0) for n in range(10)]
    return zoo.zero_shot_head(encoder, means, [f"digit {n}" for n in range(10)], logit_scale=20)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["dynamic", "int4", "int8"])
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


@pytest.mark.full
def test_a_projection_has_no_probabilities_and_no_classes(tmp_path: Path) -> None:
    model, pixels = built(**ENCODERS["projection"]), np.zeros((2, 40, 40, 3), np.uint8)
    with pytest.raises(ValueError, match="output='probabilities' needs a head for classes.*projection_head=True"):
        export.tflite(model, tmp_path / "m.tflite", output="probabilities")
    with pytest.raises(ValueError, match="labels= needs a head for classes"):
        export.tflite(model, tmp_path / "m.tflite", labels=[str(number) for number in range(24)])
    for call in (model.classify, lambda images: model.decode_predictions(model(model.preprocess(images)))):
        with pytest.raises(ValueError, match="head for classes.*projection_head=True"):
            call(pixels)
    export.saved_model(model, tmp_path / "1", warmup=())
    signatures = tf.saved_model.load(tmp_path / "1").signatures
    answer = signatures["uint8_images"](images=tf.constant(pixels))
    np.testing.assert_allclose(unit(answer["logits"]), model.embed(pixels), atol=1e-5)
    served = {name: set(function.structured_outputs) for name, function in signatures.items()}
    assert served["serving_default"] == served["float_images"] == {"logits"}
    assert served["tolerant"] == {"logits", "valid"}


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


def test_wrong_embeddings_get_one_clear_error() -> None:
    encoder, eye = built(num_classes=0, num_layers=1), np.eye(2, 32)
    good: dict[str, Any] = {"text_embeddings": eye, "labels": ["a", "b"], "logit_scale": 1, "bias": 0}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"text_embeddings": np.eye(2, 31)}, r"\(classes, 32\).* Received: shape \(2, 31\)"),
        ({"text_embeddings": np.ones(32)}, r"shape \(32,\)"),
        *(({"text_embeddings": value}, "must be numbers") for value in ("a dog", None, [[1, 2], [3]])),
        ({"text_embeddings": np.eye(0, 32), "labels": []}, r"shape \(0, 32\)"),
        ({"text_embeddings": eye * [[1], [0]]}, r"no row zero.*rows \[1\]"),
        ({"text_embeddings": eye * np.nan}, r"finite.*rows \[0 1\]"),
        *(({"labels": value}, "2 different names") for value in (["a"], ["a", "a"], "ab", [1, 2], None)),
        *(({"logit_scale": value}, "logit_scale must be a number above 0") for value in (0, np.inf, [1, 2], "x")),
        *(({"bias": value}, "bias") for value in (np.nan, 1e39)),
        # All that is wrong is named at once.
        ({"text_embeddings": np.eye(2, 3), "labels": ["a"], "logit_scale": -1}, "text_embeddings.*labels.*logit_scale"),
    ]
    for changes, named in wrong:
        with pytest.raises(ValueError, match=named):
            zoo.zero_shot_head(encoder, **{**good, **changes})
    for model, named in (
        ({"num_classes": 3}, "head of 3 classes"),
        ({"num_classes": 0, "distilled": True}, "distilled"),
        ({"num_classes": 0, "classifier": "unpooled"}, "unpooled"),
    ):
        with pytest.raises(ValueError, match=named):
            zoo.zero_shot_head(built(**model), **good)
    for fields in ({"normalize_features": True}, {"representation_size": 8}, {"labels": tuple("abcde")}):
        with pytest.raises(ValueError, match="projection_head"):
            tiny(projection_head=True, **fields)


# ---- classes that are texts


@pytest.mark.parametrize("name", full_except(["hf_clip", "hf_siglip"], PAIRS))
def test_the_logits_are_those_of_the_official_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = arrays(DATA / "text" / name / "reference.npz")
    file = next((DATA / "text" / name).glob("checkpoint.npz"), DATA / "text" / name)
    # The tokenizers of the cases are cases of their own.
    monkeypatch.setattr(text.TextEncoder, "tokenize", lambda *_: case["input_ids"].astype(np.int32))
    classes = [f"class {n}" for n in range(len(case["input_ids"]))]
    if name.startswith("openclip_siglip"):
        image_encoder = converters.load(file, config={"num_heads": 4})
        model = zoo.zero_shot(image_encoder, classes, templates="{}", text_encoder=file)
    else:
        model = zoo.zero_shot(file, classes, templates="{}")
    assert distance(model(case["images"]), case["logits_per_image"]) < 1e-5  # the manifest's tolerance of each case
    has_bias = "siglip" in name or name == "openclip_custom"
    assert model.config.probabilities == ("sigmoid" if has_bias else "softmax")
    assert model.config.labels == tuple(classes)


@pytest.fixture(scope="module")
def by_texts() -> Any:
    """Return the digits as a zero-shot classifier; tests do not change it."""
    return zoo.zero_shot("digits", NAMES)


@pytest.mark.slow
def test_the_script_makes_such_a_text_tower_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "examples" / "train_digits_text.py"
    monkeypatch.setattr(sys, "argv", [script.name, "--output", str(tmp_path / "again.keras")])
    runpy.run_path(str(script), run_name="__main__")
    assert accuracy(zoo.zero_shot("digits", NAMES, text_encoder=tmp_path / "again.keras")) >= 0.98


def accuracy(of: Any) -> float:
    return train.evaluate(of, "digits", progress=False).to_dict()["top1"]


@pytest.mark.full
def test_texts_classify_the_digits_and_stay_in_the_saved_file(by_texts: Any, tmp_path: Path) -> None:
    assert accuracy(by_texts) > 0.98  # 98.9 % of 360; the same image tower has 99.2 % with its own head
    found = by_texts.classify(digits.load().test_images[:3], top=2)
    assert [each[0].label for each in found] == [NAMES[n] for n in digits.load().test_labels[:3]]
    by_texts.save(tmp_path / "model.keras")
    images = prepared(by_texts.config, batch=2)
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(np.asarray(again(images)), np.asarray(by_texts(images)))


@pytest.mark.full
def test_fine_tuning_starts_from_the_accuracy_of_the_texts(by_texts: Any, tmp_path: Path) -> None:
    """A recipe keeps the head if the classes have the names of the data; a new head begins at a tenth."""
    recipe = train.recipe("finetune-digits", image_size=32, steps=20, reset_head="auto", xla=False, eval_steps=2)
    start = accuracy(by_texts)
    tuned = train.run(recipe, model=by_texts, data="digits", out=tmp_path / "run", progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    evaluated = [line["accuracy"] for line in lines if "accuracy" in line]
    assert evaluated[0] > start - 0.02, evaluated
    assert tuned.metrics["accuracy"] > start - 0.02
    assert tuned.model.config.labels == NAMES


@pytest.mark.full
def test_sigmoids_are_the_probabilities_of_each_class_everywhere(tmp_path: Path) -> None:
    encoder = built(num_classes=0, num_layers=1)
    head = zoo.zero_shot_head(encoder, np.eye(3, 32), ["cat", "dog", "eel"], 9, -2)
    model = head.with_config(head.config.replace(probabilities="sigmoid"))
    images = prepared(model.config, batch=3)
    logits = np.asarray(model(images), np.float64)
    want = 1 / (1 + np.exp(-logits))
    found = model.decode_predictions(logits.astype(np.float32), top=3)
    assert [[each.label for each in row] for row in found] == [
        [("cat", "dog", "eel")[n] for n in order] for order in np.argsort(-logits, axis=1)
    ]
    np.testing.assert_allclose([[each.probability for each in row] for row in found], -np.sort(-want), rtol=1e-5)
    report = export.tflite(model, tmp_path / "m.tflite", quantize="none", output="probabilities")
    assert report.cosine > 0.999
    np.testing.assert_allclose(export.runner(tmp_path / "m.tflite")(images), want, atol=1e-5)
    served = model.task.served_outputs({"logits": keras.ops.convert_to_tensor(logits)}, None, 2)
    np.testing.assert_allclose(served["probabilities"], want, rtol=1e-6)
    np.testing.assert_allclose(served["scores"], -np.sort(-want)[:, :2], rtol=1e-6)
    assert model.config.replace(num_classes=4).probabilities == "softmax"
    large = Classification(num_classes=2, probabilities="sigmoid").decode(np.array([[50, 90]], np.float32), 1)
    assert large[0][0].label_id == "1"  # although both sigmoids are 1 in float32


@pytest.mark.full
def test_a_class_has_the_mean_of_its_texts() -> None:
    encoder, names, templates = zoo.text_encoder("digits"), ["two", "nine"], ["{}", "a photo of a {}."]
    made = zoo.zero_shot("digits", names, templates=templates)
    rows = np.array([sum(encoder.embed([each.replace("{}", name) for each in templates])) for name in names])
    images = digits.load().test_images[:5]
    want = 20.085537 * zoo.load("digits").embed(images) @ (rows / np.linalg.norm(rows, axis=1, keepdims=True)).T
    np.testing.assert_allclose(np.asarray(made(made.preprocess(images))), want, atol=1e-4)  # logits are up to 20


def test_wrong_classes_and_models_get_one_clear_error() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"classes": []}, r"classes must be a list of names, none of them empty. Received: \[\]"),
        *(({"classes": value}, "none of them empty") for value in (["a", " "], "cat", ["a", 1])),
        ({"classes": ["a", "b", "a"]}, "different names. Received 'a' twice"),
        ({"classes": ["a"]}, "softmax of one class is always 1"),
        *(({"templates": value}, "in place of a name") for value in ([], ["a photo"], [1], 5)),
        ({"name_or_path": "ViT-B/16"}, "ViT-B/16 has no text tower. Models that have one"),
        ({"name_or_path": "nothing.npz"}, "nothing.npz"),
        ({"weights": "openai"}, "Received: weights='openai'"),
        # Encoders that are no pair.
        ({"name_or_path": built(num_classes=0)}, "needs its text_encoder"),
        ({"name_or_path": built(num_classes=0), "text_encoder": "digits"}, "no pair.*32 of images and 64 of texts"),
    ]
    for arguments, named in wrong:
        with pytest.raises((ValueError, FileNotFoundError), match=named):
            zoo.zero_shot(**{"name_or_path": "digits", "classes": ["a", "b"], **arguments})


# ---- commands


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 20 digits, whose names say which, and with their embeddings."""
    place, data = tmp_path_factory.mktemp("photos"), digits.load()
    (place / "photos").mkdir()
    for number in range(20):
        name = f"{number:02}-{NAMES[data.test_labels[number]]}.png"
        Image.fromarray(data.test_images[number]).save(place / "photos" / name)
    run("embed", "digits", place / "photos", "--to", place / "vectors")
    return place


@pytest.mark.full
def test_a_text_finds_the_photos_that_it_describes(photos: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.html"
    line = ["search", photos / "vectors", "a photo of a seven.", "--top", "3"]
    found = json.loads(run(*line, "--json", "--out", sheet))
    assert all(match["path"].endswith("-seven.png") for match in found) and len(found) == 3
    assert "<h1>a photo of a seven.</h1>" in sheet.read_text(encoding="utf-8")
    assert json.loads(run(*line, "--model", "digits", "--json")) == found


def test_predict_classifies_by_a_file_of_words(photos: Path, tmp_path: Path) -> None:
    [path] = (photos / "photos").glob("00-*")
    (tmp_path / "words.txt").write_text("\ufeffseven\n\n  three\n", encoding="utf-8")
    [row] = json.loads(run("predict", "digits", path, "--classes", tmp_path / "words.txt", "--json"))
    labels = [each["label"] for each in row["predictions"]]
    assert sorted(labels) == ["seven", "three"] and path.stem.endswith(labels[0])


def test_wrong_lines_are_told(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo, latin = photos / "photos", tmp_path / "latin.txt"
    latin.write_bytes("cat\nété\n".encode("latin-1"))
    for line, told in {
        ("--classes", "a,,b"): "none of them empty",
        ("--classes", "a,a"): "Received 'a' twice",
        ("--classes", "nothing.txt"): "nothing.txt",
        ("--classes", str(latin)): "latin.txt must be saved as UTF-8. Received: other bytes in line 2",
        ("--classes", "a,b", "--template", "a photo"): "in place of a name",
        ("--template", "a {}"): "--template is for --classes",
    }.items():
        assert told in fails(monkeypatch, "predict", "digits", photo, *line)
    assert "no text tower" in fails(monkeypatch, "predict", "ViT-B/16", photo, "--classes", "a,b")
    # The folder is another model's: its own texts would find nothing of sense.
    shutil.copytree(photos / "vectors", tmp_path / "vectors")
    record = json.loads((tmp_path / "vectors" / "_run.json").read_text())
    (tmp_path / "vectors" / "_run.json").write_text(json.dumps({**record, "weights": "0123456789abcdef"}))
    told = fails(monkeypatch, "search", tmp_path / "vectors", "seven", "--model", "digits")
    assert "another model than digits" in told
