"""`keras-vit train`, `evaluate` and `plan` on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import fails, run
from keras_vit import VisionTransformer, converters, zoo
from keras_vit.cli import main
from tiny_models import tiny

QUICK = ["--steps", "2", "--set", "xla=false", "--set", "batch_size=8", "--set", "accumulation=1"]
ALL_READ = ["--steps", "5"]  # of 8 images: each of the pictures below is read

MODEL_AND_DATA = ("--model", "digits", "--data", "digits")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.npz"
    converters.save(VisionTransformer(tiny(image_size=16)), path, format="google")
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create three classes of twelve images, one of which is truncated."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for name in ("cats", "dogs", "owls"):
        (folder / name).mkdir()
        for number in range(12):
            pixels = random.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.jpg")
    cut = folder / "dogs" / "5.jpg"
    cut.write_bytes(cut.read_bytes()[:200])
    return folder


@pytest.mark.filterwarnings("default:.*:UserWarning")
def test_pictures_in_folders_train_a_classifier_of_them(tmp_path: Path, checkpoint: Path, pictures: Path) -> None:
    out = tmp_path / "run"
    printed = run(
        "train",
        "finetune",
        "--model",
        checkpoint,
        "--data",
        pictures,
        "--out",
        out,
        "--image-size",
        16,
        *QUICK,
        *ALL_READ,
    )
    assert f"{out}/model.keras after 5 steps: accuracy" in printed
    assert "because they cannot be read: 1" in printed
    ranking = run("evaluate", out / "model.keras", "--data", pictures, "--json")
    assert json.loads(ranking)["count"] > 0


@pytest.mark.filterwarnings("default:.*:UserWarning")
def test_a_picture_that_cannot_be_read_may_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path, pictures: Path
) -> None:
    arguments = ["--model", checkpoint, "--data", pictures, "--out", tmp_path, "--image-size", 16]
    message = fails(monkeypatch, "train", "finetune", *arguments, *QUICK, *ALL_READ, "--on-bad-image", "fail")
    assert message.startswith("keras-vit: ")
    assert "dogs/5.jpg" in message


@pytest.mark.full
def test_the_same_command_again_says_the_same(tmp_path: Path, checkpoint: Path) -> None:
    command = ["train", "finetune-digits", "--model", checkpoint, "--data", "digits", "--out", tmp_path / "run"]
    command += ["--json", *QUICK]
    first, second = (json.loads(run(*command, "--image-size", 16)) for _ in range(2))
    assert first == second
    assert first["steps"] == 2


@pytest.mark.full
def test_a_folder_that_is_called_like_a_model_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    converters.save(VisionTransformer(tiny(image_size=16)), tmp_path / "digits", format="huggingface")
    run("train", "finetune-digits", "--model", "digits", "--data", "digits", "--out", "out", *QUICK)
    trained, named = converters.load("out/model.keras").config, zoo.load("digits").config
    assert (trained.hidden_size, trained.num_layers) == (named.hidden_size, named.num_layers)
    assert trained.hidden_size != converters.load("digits").config.hidden_size


def test_few_shot(checkpoint: Path) -> None:
    printed = run("evaluate", checkpoint, "--data", "digits", "--few-shot", 1, "--few-shot", 2, "--json")
    assert [row["shots"] for row in json.loads(printed)] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "finetun", *MODEL_AND_DATA], "finetune"),
        (["train", "missing.toml", *MODEL_AND_DATA], "no recipe file missing.toml"),
        (["train", "finetune", *MODEL_AND_DATA, "--set", "learnin_rate=1"], "learning_rate"),
        (["train", "finetune", *MODEL_AND_DATA, "--set", "steps"], "--set must be FIELD=VALUE"),
        (["train", "finetune", *MODEL_AND_DATA, "--strategy", "tpus"], "strategy must be one of"),
        (["train", "finetune", "--model", "digits", "--data", "oxford_iiit_pet"], "oxford_iiit_pet"),
        (["train", "augreg-lite1", *MODEL_AND_DATA], "augreg-light1"),
        (["train", "finetune", "--model", "missing.npz", "--data", "digits"], "missing.npz"),
        (["evaluate", "digits", "--data", "nowhere/at/all"], "nowhere/at/all"),
        (["plan", "ViT-Q/16", "--batch", "8"], "ViT-Q/16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = fails(monkeypatch, *arguments)
    assert said.startswith("keras-vit: ")
    assert message in said


@pytest.mark.parametrize("command", [["train", "finetune", "--model", "digits"], ["evaluate", "digits"]])
def test_the_data_must_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["keras-vit", *command])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().err
    assert "Missing" in printed and "--data" in printed


def test_an_unprepared_data_set_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    message = fails(monkeypatch, "train", "finetune", "--model", "digits", "--data", "cifar10", "--data-dir", tmp_path)
    assert "cifar10" in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "B/16", "--batch", "8"],
        pytest.param(["show", "B/16", "--image-size", "240"], marks=pytest.mark.full),
    ],
)
def test_counting_a_model_that_is_not_on_a_card_is_quiet(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "keras_vit", *command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(
        "86,(567,656|589,928)", done.stdout
    )  # timm, torchvision; 29 positions more at 240 px  # parameters of ViT-B/16 with 1,000 classes: timm, torchvision
