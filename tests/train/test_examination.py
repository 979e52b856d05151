"""What `evaluate --out` writes, and what a notebook shows of models and results."""

from __future__ import annotations

import base64
import csv
import dataclasses
import functools
import io
import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import confusion_matrix

from command_line import fails, run
from html_document import Document
from keras_vit import VisionTransformer, digits, train, zoo
from tiny_models import tiny

HOSTILE = "<script>alert(1)</script>"


@functools.cache
def digits_model() -> VisionTransformer:
    return zoo.load("digits")


@functools.cache
def examined(count: int = 80) -> train.Examination:
    data, model = digits.load(), digits_model()
    labels = np.where(np.arange(count) % 4 == 0, (data.test_labels[:count] + 1) % 10, data.test_labels[:count])
    return train.examine(model, {"evaluation": (data.test_images[:count], labels)})


def test_the_counts_are_those_of_scikit_learn_and_of_evaluate() -> None:
    found, data, model = examined(), digits.load(), digits_model()
    logits = model.predict_on_batch(model.preprocess(data.test_images[:80]))
    np.testing.assert_array_equal(found.predicted, logits.argmax(axis=1))
    np.testing.assert_array_equal(found.confusion, confusion_matrix(found.labels, found.predicted, labels=range(10)))
    measured = train.evaluate(model, {"evaluation": (data.test_images[:80], found.labels)})
    assert found.accuracy == pytest.approx(measured.top1)
    by_class = {row["class"]: row for row in found.by_class()}
    zeros = found.labels == 0
    assert by_class["zero"]["images"] == zeros.sum()
    assert by_class["zero"]["accuracy"] == (found.predicted[zeros] == 0).mean()
    assert by_class["zero"]["mistaken_for"] == "nine"  # a wrong label is one more than the digit
    assert sum(row["images"] for row in found.confusions()) == (found.labels != found.predicted).sum()
    worst = found.mistakes()
    assert len(worst) == (found.labels != found.predicted).sum()
    shares = [row["probability_of_class"] for row in worst]
    assert shares == sorted(shares) and shares[0] < 1e-3 < worst[0]["probability"]
    assert found.mistakes(0) == [] and found.mistakes(2) == worst[:2]
    for wrong in (-1, 1.5, "2", True):
        with pytest.raises(ValueError, match="most must be an integer >= 0, or None. Received: "):
            found.mistakes(wrong)  # type: ignore[arg-type]


@pytest.mark.full
def test_the_page_shows_the_worst_mistakes_and_no_name_is_markup(tmp_path: Path) -> None:
    names = [HOSTILE, "=1+1", "@SUM(A1)", *"3456789"]
    model, data = zoo.load("digits", labels=tuple(names)), digits.load()
    wrong = (data.test_labels[:50] + (np.arange(50) % 2 == 0)) % 10
    arrays = {"evaluation": (data.test_images[:50], wrong), "class_names": names}
    found = train.examine(model, arrays)
    page, results, table = found.write(tmp_path / "new" / "folder", predictions=True)
    text = page.read_text(encoding="utf-8")
    document = Document(text)
    assert "<script" not in text and HOSTILE in document.text
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    pictures = [each["src"] for each in document.all("img")]
    assert len(pictures) == min(24, len(found.mistakes()))
    first = found.mistakes(1)[0]["image"]
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(pictures[0].partition(",")[2]))))
    np.testing.assert_allclose(shown, data.test_images[found.images.index(first)], atol=8)  # perhaps as JPEG
    assert json.loads(results.read_text())["accuracy"] == found.accuracy
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert len(rows) == 50 and {"'=1+1", "'@SUM(A1)"} <= {row["class"] for row in rows}
    assert sum(row["class"] == row["predicted"] for row in rows) / 50 == found.accuracy


@pytest.mark.full
def test_the_command_writes_what_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, folder = digits.load(), tmp_path / "photos"
    for number, image in enumerate(data.test_images[:10]):
        path = folder / ("zero", "one")[number % 2] / f"{number:02} {'<b>&' if number < 5 else ''}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(path)
    printed = run("evaluate", "digits", "--data", str(folder), "--out", str(tmp_path / "out"), "--predictions")
    names = ["examination.html", "examination.json", "predictions.csv"]
    assert printed.splitlines()[-3:] == [str(tmp_path / "out" / name) for name in names]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "predictions.csv").read_text())))
    assert len(rows) == 10 and any("<b>&" in row["image"] for row in rows)
    assert "<b>" not in (tmp_path / "out" / "examination.html").read_text()
    command = ("evaluate", "digits", "--data", "digits")
    assert "--predictions needs --out" in fails(monkeypatch, *command, "--predictions")
    assert "--few-shot" in fails(monkeypatch, *command, "--out", "x", "--few-shot", "1")
    images, labels = np.zeros((4, 32, 32, 1), "uint8"), np.ones((4, 10), int)
    with pytest.raises(ValueError, match="one class for each image, and no maps"):
        train.examine(digits_model(), {"evaluation": (images, labels)})


def test_many_classes_take_little_memory(tmp_path: Path) -> None:
    numbers = np.arange(50)
    labels, predicted = numbers * 400, numbers // 2 * 800  # of two images the first is right
    few = examined()
    found = dataclasses.replace(
        few,
        classes=list(map(str, range(21_843))),
        labels=labels,
        predicted=predicted,
        images=few.images[:50],
        probabilities=few.probabilities[:50],
        indices=few.indices[:50],
    )
    tracemalloc.start()
    found.write(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6  # a matrix of the classes has 3.8 GB
    assert str(found).endswith("25 of 50 images are right (50.00%)")
    assert found.by_class()[1] == {"class": "400", "images": 1, "accuracy": 0.0, "mistaken_for": "0"}


def test_models_and_results_show_themselves_in_a_notebook() -> None:
    model = VisionTransformer(tiny(num_classes=3, labels=("<b>", "cat", "dog")))
    shown = model._repr_html_()
    assert "&lt;b&gt;, cat, dog" in shown and f"{model.count_params():,}" in shown
    recipe, figures = train.recipe("linear-probe"), {"accuracy": 0.5}
    result = train.Result(model, recipe, figures, [], 1, 7.0, skipped=0, unread=0, out="runs/<x>", stopped=False)
    assert "0.5000" in result._repr_html_() and "runs/&lt;x&gt;" in result._repr_html_()
    assert "zero" in examined()._repr_html_()
