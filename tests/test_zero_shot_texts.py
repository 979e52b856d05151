"""Classifiers whose classes are texts: the official logits, ordinary in every use, and clear errors."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from command_line import fails, run
from keras_vit import converters, digits, export, text, train, zoo
from keras_vit.model.task import Classification
from marks import full_except
from reference_cases import arrays, distance
from tiny_models import built, prepared

DATA = Path(__file__).parent / "data" / "text"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Cases with images and texts. The image tower of openclip_siglip is timm's, whose file does not state its heads.
PAIRS = sorted(path.parent.name for path in DATA.glob("*/reference.npz") if "images" in arrays(path))


@pytest.mark.filterwarnings("ignore:keras_vit. .* has other parts:UserWarning")
@pytest.mark.parametrize("name", full_except(["hf_clip", "hf_siglip"], PAIRS))
def test_the_logits_are_those_of_the_official_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = arrays(DATA / name / "reference.npz")
    file = next((DATA / name).glob("checkpoint.npz"), DATA / name)
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
def model() -> Any:
    """Return the digits as a zero-shot classifier; tests do not change it."""
    return zoo.zero_shot("digits", NAMES)


@pytest.mark.slow
def test_the_script_makes_such_a_text_tower_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).parents[1] / "examples" / "train_digits_text.py"
    monkeypatch.setattr(sys, "argv", [script.name, "--output", str(tmp_path / "again.keras")])
    runpy.run_path(str(script), run_name="__main__")
    assert accuracy(zoo.zero_shot("digits", NAMES, text_encoder=tmp_path / "again.keras")) >= 0.98


def accuracy(of: Any) -> float:
    return train.evaluate(of, "digits", progress=False).to_dict()["top1"]


def test_texts_classify_the_digits_and_stay_in_the_saved_file(model: Any, tmp_path: Path) -> None:
    assert accuracy(model) > 0.98  # 98.9 % of 360; the same image tower has 99.2 % with its own head
    found = model.classify(digits.load().test_images[:3], top=2)
    assert [each[0].label for each in found] == [NAMES[n] for n in digits.load().test_labels[:3]]
    model.save(tmp_path / "model.keras")
    images = prepared(model.config, batch=2)
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(np.asarray(again(images)), np.asarray(model(images)))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["dynamic", "int8"])
def test_a_quantized_file_classifies_as_the_texts_do(mode: str, model: Any, tmp_path: Path) -> None:
    data = digits.load()
    images = data.test_images[:100]
    report = export.tflite(
        model, tmp_path / "m.tflite", quantize=mode, calibration=data.train_images[:32], verify=images
    )
    assert report.agreement >= 0.98


@pytest.mark.full
def test_fine_tuning_starts_from_the_accuracy_of_the_texts(model: Any, tmp_path: Path) -> None:
    """A recipe keeps the head if the classes have the names of the data; a new head begins at a tenth."""
    recipe = train.recipe("finetune-digits", image_size=32, steps=20, reset_head="auto", xla=False, eval_steps=2)
    start = accuracy(model)
    tuned = train.run(recipe, model=model, data="digits", out=tmp_path / "run", progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    evaluated = [line["accuracy"] for line in lines if "accuracy" in line]
    assert evaluated[0] > start - 0.02, evaluated
    assert tuned.metrics["accuracy"] > start - 0.02
    assert tuned.model.config.labels == NAMES


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
def test_sigmoids_are_served(tmp_path: Path) -> None:
    head = zoo.zero_shot_head(built(num_classes=0, num_layers=1), np.eye(3, 32), ["cat", "dog", "eel"], 9, -2)
    model = head.with_config(head.config.replace(probabilities="sigmoid"))
    assert export.saved_model(model, tmp_path / "served").max_error < 1e-4


def test_a_class_has_the_mean_of_its_texts(model: Any) -> None:
    encoder, names, templates = zoo.text_encoder("digits"), ["two", "nine"], ["{}", "a photo of a {}."]
    made = zoo.zero_shot("digits", names, templates=templates)
    rows = np.array([sum(encoder.embed([each.replace("{}", name) for each in templates])) for name in names])
    images = digits.load().test_images[:5]
    want = 20.085537 * zoo.load("digits").embed(images) @ (rows / np.linalg.norm(rows, axis=1, keepdims=True)).T
    np.testing.assert_allclose(np.asarray(made(made.preprocess(images))), want, atol=1e-4)  # logits are up to 20


@pytest.mark.full
def test_many_classes_and_strange_names_are_classes_too() -> None:
    names = [f"class {n}" for n in range(1000)] + ["{}", "a\nb", "猫"]
    assert zoo.zero_shot("digits", names, templates="{}").output_shape == (None, 1003)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"classes": []}, r"classes must be a list of names, none of them empty. Received: \[\]"),
        ({"classes": ["a", " "]}, "none of them empty"),
        ({"classes": "cat"}, "none of them empty. Received: 'cat'"),
        ({"classes": ["a", 1]}, "none of them empty"),
        ({"classes": ["a", "b", "a"]}, "different names. Received 'a' twice"),
        ({"classes": ["a"]}, "softmax of one class is always 1"),
        ({"templates": []}, r'texts with "{}" in place of a name. Received: \[\]'),
        ({"templates": ["a photo"]}, "in place of a name"),
        ({"templates": [1]}, "in place of a name"),
        ({"name_or_path": "ViT-B/16"}, "ViT-B/16 has no text tower. Models that have one"),
        ({"name_or_path": "nothing.npz"}, "nothing.npz"),
        ({"weights": "openai"}, "Received: weights='openai'"),
    ],
)
def test_wrong_classes_and_models_get_one_clear_error(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        zoo.zero_shot(**{"name_or_path": "digits", "classes": ["a", "b"], **arguments})


def test_encoders_that_are_no_pair_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="no pair.*32 of images and 64 of texts"):
        zoo.zero_shot(built(num_classes=0), ["a", "b"], text_encoder="digits")
    with pytest.raises(ValueError, match="needs its text_encoder"):
        zoo.zero_shot(built(num_classes=0), ["a", "b"])


# ---- commands


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 20 digits, whose names say which, and with their embeddings."""
    from PIL import Image

    place, data = tmp_path_factory.mktemp("photos"), digits.load()
    (place / "photos").mkdir()
    for number in range(20):
        name = f"{number:02}-{NAMES[data.test_labels[number]]}.png"
        Image.fromarray(data.test_images[number]).save(place / "photos" / name)
    run("embed", "digits", place / "photos", "--to", place / "vectors")
    return place


def test_a_text_finds_the_photos_that_it_describes(photos: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.html"
    line = ["search", photos / "vectors", "a photo of a seven.", "--top", "3"]
    found = json.loads(run(*line, "--json", "--out", sheet))
    assert all(match["path"].endswith("-seven.png") for match in found) and len(found) == 3
    assert "<h1>a photo of a seven.</h1>" in sheet.read_text(encoding="utf-8")
    assert json.loads(run(*line, "--model", "digits", "--json")) == found


@pytest.mark.full
def test_predict_classifies_by_words_and_by_a_file_of_them(photos: Path, tmp_path: Path) -> None:
    [path] = (photos / "photos").glob("00-*")
    rows = json.loads(run("predict", "digits", path, "--classes", "three, seven", "--json"))
    assert [each["label"] for each in rows[0]["predictions"]] == ["seven", "three"]
    (tmp_path / "words.txt").write_text("\ufeffseven\n\n  three\n", encoding="utf-8")
    again = json.loads(run("predict", "digits", path, "--classes", tmp_path / "words.txt", "--json"))
    assert [each["probability"] for each in again[0]["predictions"]] == pytest.approx(
        [each["probability"] for each in rows[0]["predictions"]], abs=1e-6
    )


def test_wrong_lines_are_told(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = photos / "photos"
    for line, told in {
        ("--classes", "a,,b"): "none of them empty",
        ("--classes", "a,a"): "Received 'a' twice",
        ("--classes", "nothing.txt"): "nothing.txt",
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
