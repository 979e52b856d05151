"""Verification says what it measured: on which images, of which calibration, with which accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import run
from keras_vit import digits, export, zoo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a folder for each class."""
    place, data, names = tmp_path_factory.mktemp("classes"), digits.load(), zoo.load("digits").task.class_names()
    for number, (image, label) in enumerate(zip(data.test_images[:24], data.test_labels, strict=False)):
        (place / names[label]).mkdir(exist_ok=True)
        Image.fromarray(image[..., 0]).save(place / names[label] / f"{number:02}.png")
    return place


@pytest.mark.full
def test_calibration_and_comparison_are_halves_and_labels_give_accuracy(folder: Path, tmp_path: Path) -> None:
    file, model = tmp_path / "digits.tflite", zoo.load("digits")
    shown = run("export", "digits", "--to", file, "--quantize", "int8", "--images", folder)
    files = sorted(map(str, folder.rglob("*.png")))
    right = np.mean([Path(name).parent.name == best.label for name, [best] in zip(
        files[1::2], model.classify(files[1::2], top=1), strict=True)])  # fmt: skip
    assert "on 12 images: " in shown and "calibrated on 12 other images" in shown
    assert f"model {right:.2%}" in shown and "accuracy on their classes: file" in shown
    values = json.loads(run("verify", file, "digits", folder, "--json"))
    assert values["images"] == 24 and values["model_accuracy"] >= 0.9 and values["accuracy"] >= 0.9
    pixels = digits.load().test_images[:24]
    labels = digits.load().test_labels[:24]
    assert export.verify(model, file, folder).accuracy == values["accuracy"]
    assert export.verify(model, file, pixels, labels=(labels + 1) % 10).model_accuracy < 0.2
    assert export.verify(model, file, pixels).accuracy is None
    with pytest.raises(ValueError, match="one class for each of 24 images. Received: 3"):
        export.verify(model, file, pixels, labels=labels[:3])
    same = export.tflite(model, file, quantize="int8", calibration=files, verify=files)
    assert "on 24 images (those of the calibration)" in str(same) and same.calibration_images == 24


def test_images_that_are_all_alike_calibrate_nothing(tmp_path: Path) -> None:
    model = zoo.load("digits")
    for colour in (0, 128):
        alike = np.full((16, 32, 32, 1), colour, np.uint8)
        for mode in ("int8", "int16x8"):
            with pytest.raises(ValueError, match="calibration images must differ.*16 images"):
                export.tflite(model, tmp_path / "digits.tflite", quantize=mode, calibration=alike)
    assert not list(tmp_path.iterdir())
