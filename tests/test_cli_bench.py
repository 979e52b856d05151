"""`keras-vit bench` runs models and files, prints times, and refuses other input."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import fails, run
from keras_vit import converters, export
from keras_vit._util.progress import timed
from keras_vit.cli import demo
from tiny_models import built


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model as a checkpoint, a SavedModel, and LiteRT files for prepared images and for pixels."""
    folder = tmp_path_factory.mktemp("files")
    model = built(num_layers=1)
    converters.save(model, folder / "tiny.npz", format="google")
    export.saved_model(model, folder / "saved")
    export.tflite(model, folder / "tiny.tflite", quantize="none")
    export.tflite(model, folder / "pixels.tflite", quantize="none", input_dtype="uint8", batch=2, source_size=(40, 24))
    return folder


@pytest.mark.parametrize(
    ("file", "options", "image_size", "batch"),
    [
        ("tiny.npz", ["--image-size", "32x40"], [32, 40], 1),
        ("saved", ["--batch", "3"], [32, 32], 3),
        ("tiny.tflite", ["--threads", "1"], [32, 32], 1),
        ("pixels.tflite", [], [40, 24], 2),
    ],
)
def test_it_times_what_it_is_given(
    files: Path, file: str, options: list[str], image_size: list[int], batch: int
) -> None:
    row = json.loads(run("bench", files / file, "--rounds", 5, *options, "--json"))
    assert (row["image_size"], row["batch"], row["rounds"]) == (image_size, batch, 5)
    assert 0 < row["median_ms"] <= row["p90_ms"]
    assert row["images_per_second"] == pytest.approx(1000 * batch / row["median_ms"])


def test_it_prints_two_lines() -> None:
    lines = run("bench", "digits", "--rounds", 3).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("digits at 32 x 32, batch 1: median ")
    assert "3 calls after warm-up" in lines[1]


def test_slow_first_calls_are_told_apart() -> None:
    calls: list[float] = []

    def call(images: np.ndarray) -> None:
        calls.append(0.2 if not calls else 0.01)
        time.sleep(calls[-1])

    found = demo.measure(functools.partial(timed, call), np.zeros((4, 1)), rounds=10)
    assert found["first_ms"] >= 200
    # A sleep is at least as long as requested; on a busy machine it is longer.
    assert 10 <= found["median_ms"] <= found["p90_ms"]
    assert found["images_per_second"] == pytest.approx(4000 / found["median_ms"])
    assert len(calls) - 1 - 10 >= demo.WARM_UP_CALLS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny.npz", "--rounds", "0"], "--rounds must be an integer >= 1. Received: 0"),
        (["tiny.npz", "--batch", "-1"], "--batch must be an integer >= 1. Received: -1"),
        (["pixels.tflite", "--batch", "3"], "takes 2 images per call. Received: --batch 3"),
        (
            ["tiny.tflite", "--image-size", "48"],
            "--weights, --accept-licence, --image-size and --patch-size are for models",
        ),
        (["saved", "--threads", "2"], "as many threads as TensorFlow chooses"),
        (["nothing.tflite"], "There is no exported file nothing.tflite"),
        (["ViT-B/61"], "nearest"),
    ],
    ids=str,
)
def test_what_cannot_be_timed_is_said(
    files: Path, arguments: list[Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    assert said in fails(monkeypatch, "bench", *arguments)
