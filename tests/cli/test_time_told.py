"""A command that takes long says so in its first line, and what is shorter; no speed is shown as 0."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keras_vit import batch, digits, train, zoo
from keras_vit._util.text import duration, image_rate
from keras_vit.model import cost
from photo_folder import make

MODEL = zoo.load("digits", image_size=64)


def expected(images: int, side: int) -> str:
    flops = cost.count(MODEL.config.replace(image_size=side)).flops
    return duration(images * flops / (cost.CORE_FLOPS * (os.cpu_count() or 1)))


def test_the_time_is_that_of_the_arithmetic_and_a_smaller_size_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    cost.say_time(MODEL, 100, "--image-size")
    assert capsys.readouterr().err == ""  # it takes less than a minute
    images = 10**8
    cost.say_time(MODEL, images, "--image-size")
    line = f"100,000,000 images at 64 pixels: perhaps {expected(images, 64)} on this CPU"
    assert capsys.readouterr().err == f"{line}; with --image-size 32 perhaps {expected(images, 32)}\n"
    cost.say_time(MODEL, images)
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.filterwarnings("ignore:.* are held out")
@pytest.mark.full
def test_probe_evaluation_and_embeddings_begin_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost, "LONG", 0.0)
    photos = make(tmp_path / "photos", per_class=4)
    seen = digits.load()
    data = {"evaluation": (seen.test_images[:8], seen.test_labels[:8]), "num_classes": 10}
    train.run("linear-probe", model=MODEL, data=str(photos))
    assert "--image-size 32 perhaps" in capsys.readouterr().err.splitlines()[1]  # after the labels
    train.evaluate(MODEL, data, progress=True)
    assert capsys.readouterr().err.startswith("8 images at 64 pixels: perhaps ")
    batch.embed(MODEL, str(photos), to=tmp_path / "vectors")
    assert "images at 64 pixels: perhaps" in capsys.readouterr().err.splitlines()[0]


def test_a_slow_speed_is_not_0() -> None:
    assert [image_rate(speed) for speed in (0.163, 9.94, 9.96, 12345)] == [
        "0.16 images/s",
        "9.9 images/s",
        "10 images/s",
        "12,345 images/s",
    ]
