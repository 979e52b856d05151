"""`keras-vit train`, `evaluate` and `demo` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from command_line import fails, run
from keras_vit import VisionTransformer, converters, train, zoo
from tiny_models import tiny

QUICK = ["--steps", "2", "--set", "xla=false", "--set", "batch_size=8", "--set", "accumulation=1"]
ALL_READ = ["--steps", "5"]  # of 8 images: each of the pictures below is read


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.npz"
    converters.save(VisionTransformer(tiny(image_size=16)), path, format="google")
    return path


def command(pictures: Path, checkpoint: Path) -> list[Any]:
    """Write a folder of pictures, of which one is damaged; return the command that trains with it."""
    random = np.random.default_rng(0)
    for name in ("cats", "dogs", "owls"):
        (pictures / name).mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(pictures / name / f"{number}.jpg")
    cut = pictures / "dogs" / "5.jpg"
    cut.write_bytes(cut.read_bytes()[:200])
    return ["train", "finetune", "--model", checkpoint, "--data", pictures, "--image-size", 16, *QUICK, *ALL_READ]


@pytest.mark.filterwarnings("default:.*:UserWarning")
def test_pictures_in_folders_train_a_classifier_of_them(tmp_path: Path, checkpoint: Path) -> None:
    line, out = command(tmp_path / "pictures", checkpoint), tmp_path / "run"
    printed = run(*line, "--out", out)
    assert f"{out}/model.keras after 5 steps: accuracy" in printed
    assert "because they cannot be read: 1" in printed
    assert json.loads(run("evaluate", out / "model.keras", "--data", tmp_path / "pictures", "--json"))["count"] > 0


@pytest.mark.full
@pytest.mark.filterwarnings("default:.*:UserWarning")
def test_a_bad_picture_ends_the_run_if_asked(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = command(tmp_path / "pictures", checkpoint)
    assert "dogs/5.jpg" in fails(monkeypatch, *line, "--out", tmp_path / "run", "--on-bad-image", "fail")


@pytest.mark.full
def test_the_same_command_again_says_the_same(tmp_path: Path, checkpoint: Path) -> None:
    command = ["train", "finetune-digits", "--model", checkpoint, "--data", "digits", "--out", tmp_path / "run"]
    command += ["--json", *QUICK]
    first, second = (json.loads(run(*command, "--image-size", 16)) for _ in range(2))
    assert first == second and first["steps"] == 2


@pytest.mark.full
def test_a_folder_that_is_called_like_a_model_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    converters.save(VisionTransformer(tiny(image_size=16)), tmp_path / "digits", format="huggingface")
    run("train", "finetune-digits", "--model", "digits", "--data", "digits", "--out", "out", *QUICK)
    trained, named = converters.load("out/model.keras").config, zoo.load("digits").config
    assert (trained.hidden_size, trained.num_layers) == (named.hidden_size, named.num_layers)
    assert trained.hidden_size != converters.load("digits").config.hidden_size


def test_an_unprepared_data_set_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "cifar10" in fails(
        monkeypatch, "train", "finetune", "--model", "digits", "--data", "cifar10", "--data-dir", "."
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_few_shot(checkpoint: Path) -> None:
    printed = run("evaluate", checkpoint, "--data", "digits", "--few-shot", 1, "--few-shot", 2, "--json")
    assert [row["shots"] for row in json.loads(printed)] == [1, 2]


@pytest.mark.full
def test_the_tour_fine_tunes_exports_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = train.recipe("finetune-digits", image_size=48, steps=2, xla=False)
    monkeypatch.setattr(train, "recipe", lambda *_, **__: quick)
    printed = run("demo", "--out", tmp_path / "demo", "--no-open")
    assert "360 held-out digits" in printed
    files = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"1", "digits.tflite", "finetuned", "report.html"} <= files
