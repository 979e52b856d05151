"""The command line prints and writes the right things, and a user's error is one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import reference_cases as reference
from command_line import fails, run
from keras_vit import __version__, converters, zoo
from keras_vit._util import files
from keras_vit.cli import app
from keras_vit.zoo import catalogue, pretrained

VERBS = (
    "list",
    "show",
    "predict",
    "convert",
    "resize",
    "train",
    "evaluate",
    "plan",
    "export",
    "verify",
    "visualize",
    "bench",
    "demo",
)
TOKEN = reference.checkpoint("vit_token")
DIGITS = files.data_folder("zoo") / "weights" / "digits.npz"


def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, without the tests' settings."""
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment, "COLUMNS": "100"},
    )


@pytest.fixture(scope="module")
def digit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw a zero that is not in scikit-learn's data: a white ring with a black hole."""
    path = tmp_path_factory.mktemp("pictures") / "zero.png"
    y, x = np.mgrid[:64, :64] - 31.5
    ring = np.abs(np.hypot(x / 0.75, y) - 22) < 5
    Image.fromarray((ring * 255).astype(np.uint8)).convert("RGB").save(path)
    return path


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["list", "--json"]], ids=" ".join)
def test_what_needs_no_weights_answers_without_tensorflow(arguments: list[str]) -> None:
    code = "\n".join(
        [
            "import sys",
            "from keras_vit.cli import main",
            f"sys.argv = ['keras-vit', *{arguments!r}]",
            "try:",
            "    main()",
            "finally:",
            "    heavy = {'tensorflow', 'keras', 'jax', 'torch'} & set(sys.modules)",
            "    print('imported:', sorted(heavy), file=sys.stderr)",
        ]
    )
    done = process("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr.strip() == "imported: []"


def test_the_module_is_the_command() -> None:
    done = process("-m", "keras_vit", "list", "R50*")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["R50+ViT-B/16", "R50+ViT-L/32"]


def test_help_names_every_verb() -> None:
    help_text = run("--help")
    assert all(re.search(rf"\b{verb}\b", help_text) for verb in VERBS)


def test_list_names_every_model_and_its_weights() -> None:
    families = run("list").split("\n\n")
    assert [family.partition("-")[0] for family in families][1:3] == ["BiT", "CLIP"]
    lines = "\n".join(families).splitlines()
    assert [line.split()[0] for line in lines] == catalogue.names()
    line = next(line for line in lines if line.startswith("ViT-B/16"))
    assert re.search(r" 86.9 M +384 px +85.49 % +Apache-2.0 +augreg-imagenet21k\+imagenet2012, ", line)


def test_list_prints_json() -> None:
    rows = json.loads(run("list", "*", "--json"))
    assert [row["name"] for row in rows] == catalogue.names()
    for row in rows:
        assert row["family"] == catalogue.card(row["name"]).family
        assert row["default"] == row["weights"][0] == catalogue.card(row["name"]).default
        assert row["parameters"] > 0 and row["image_size"] >= 32 and row["licence"]


def test_predict_without_a_head_says_embed_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("loaded or downloaded")

    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    zoo.load("digits", num_classes=0).save(tmp_path / "headless.keras")
    monkeypatch.setattr(pretrained, "load_choice", load)
    for model in (str(tmp_path / "headless.keras"), "DINOv2-B/14"):
        message = fails(monkeypatch, "predict", model, tmp_path / "a.png")
        assert f"{model} has no head for classes" in message and f"keras-vit embed {model} IMAGES" in message
    monkeypatch.setattr(pretrained, "read_config", load)  # the card of DINOv2 says it: nothing is downloaded
    fails(monkeypatch, "predict", "DINOv2-B/14", tmp_path / "a.png")


def test_a_pattern_that_nothing_matches_lists_nothing() -> None:
    assert run("list", "X*") == ""
    assert json.loads(run("list", "X*", "--json")) == []
    assert "no model of the zoo matches 'swin'" in CliRunner().invoke(app, ["list", "swin"]).stderr


@pytest.mark.parametrize("command", ["list", "show"])
def test_the_name_of_another_package_finds_the_model_and_says_where_its_weights_are(command: str) -> None:
    result = CliRunner().invoke(app, [command, "vit_base_patch16_224"])
    assert result.exit_code == 0
    assert result.stdout.startswith("ViT-B/16 ")
    source = "hf://timm/vit_base_patch16_224.augreg2_in21k_ft_in1k/model.safetensors"
    assert result.stderr.strip().endswith(f"ViT-B/16 --weights {source}")
    assert CliRunner().invoke(app, [command, "b16"]).stderr == ""


def test_the_version_is_told() -> None:
    assert run("--version").strip() == __version__


def test_predict_ranks_the_classes_of_every_picture(digit: Path) -> None:
    rows = json.loads(run("predict", "digits", digit, digit, "--top", "3", "--json"))
    assert [row["image"] for row in rows] == [str(digit)] * 2
    best = rows[0]["predictions"]
    assert len(best) == 3
    assert best[0]["label_id"] == "0"
    assert best[0]["probability"] > 0.5
    assert sum(each["probability"] for each in best) <= 1 + 1e-6  # float32's rounding
    printed = run("predict", "digits", digit, "--top", "2").splitlines()
    assert printed[0] == str(digit)
    assert len(printed) == 3
    assert re.fullmatch(r" +\d+\.\d\d%  .+  \(0\)", printed[1])


def test_predict_takes_weights_and_a_resolution(digit: Path) -> None:
    rows = json.loads(run("predict", "ViT-digits", digit, "--weights", DIGITS, "--image-size", "48x40", "--json"))
    assert len(rows[0]["predictions"]) == 5


def test_predict_takes_a_checkpoint(digit: Path) -> None:
    rows = json.loads(run("predict", DIGITS, digit, "--json"))
    assert rows[0]["predictions"][0]["label_id"] == "0"


def test_a_name_of_the_zoo_stays_one_though_a_folder_has_it(
    digit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()
    assert len(run("predict", "digits", digit, "--top", 1).splitlines()) == 2
    assert "digits" in fails(monkeypatch, "predict", "./digits", digit)


def test_the_tour_leaves_files_of_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "thesis.tex").write_text("mine too")
    assert "a folder of its own" in fails(monkeypatch, "demo", "--out", tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "report.html": "mine",
        "thesis.tex": "mine too",
    }


def test_convert_takes_a_keras_file(tmp_path: Path) -> None:
    converters.load(TOKEN).save(tmp_path / "model.keras")
    run("convert", tmp_path / "model.keras", tmp_path / "model.npz", "--to", "google")
    assert converters.detect(tmp_path / "model.npz") == "google"


def test_convert_writes_another_resolution_and_head(tmp_path: Path) -> None:
    printed = run(
        "convert", TOKEN, tmp_path / "out.npz", "--to", "google", "--image-size", "24x48", "--num-classes", "0"
    )
    assert printed.strip() == str(tmp_path / "out.npz")
    config = converters.read_config(tmp_path / "out.npz", config={"image_size": (24, 48)})
    assert (config.grid, config.num_classes) == ((3, 6), 0)


def test_a_model_of_the_zoo_is_converted_and_resized(tmp_path: Path) -> None:
    run("convert", "digits", tmp_path / "digits.npz", "--to", "google", "--num-classes", "3")
    run("resize", "digits", tmp_path / "larger.npz", "48")
    assert converters.load(tmp_path / "digits.npz", num_classes=0).config.grid == (8, 8)
    larger = converters.load(tmp_path / "larger.npz").config
    assert (converters.detect(tmp_path / "larger.npz"), larger.grid, larger.num_classes) == ("google", (12, 12), 10)


def test_resize_keeps_the_format_and_the_head(tmp_path: Path) -> None:
    run("resize", TOKEN, tmp_path / "out.npz", "48")
    assert converters.detect(tmp_path / "out.npz") == "google"
    before, after = reference.arrays(TOKEN), reference.arrays(tmp_path / "out.npz")
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert changed == ["Transformer/posembed_input/pos_embedding"]
    assert after[changed[0]].shape == (1, 37, 32)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "ViT-B/61"], "nearest"),
        (["predict", "ViT-B/61", "x.png"], "nearest"),
        (["predict", "digits", "nothing.png"], "nothing.png"),
        (["predict", "ViT-B/16", "nothing.png"], "There is no image file or folder 'nothing.png'"),
        (["predict", "digits", "x.png", "--weights", "nothing.npz"], "nothing.npz"),
        (["predict", "digits", "x.png", "--weights", "imagenet21k"], "digits"),
        (["predict", "digits", "x.png", "--image-size", "big"], "HEIGHTxWIDTH. Received: 'big'"),
        (["predict", "digits", "x.png", "--image-size", "3"], "smaller than one patch"),
        (["convert", "nothing.npz", "out.npz", "--to", "google"], "nothing.npz"),
        (["convert", TOKEN, "out.npz", "--to", "gogle"], "google"),
        (
            ["convert", TOKEN, "out.npz", "--to", "google", "--num-classes", "-1"],
            "--num-classes must be an integer >= 0",
        ),
        (["resize", TOKEN, "out.npz", "32x32x3"], "HEIGHTxWIDTH"),
        (["resize", TOKEN, "out.npz", "0"], "image_size"),
        (["convert", "text.npz", "out.npz", "--to", "google"], "text.npz"),
    ],
    ids=str,
)
def test_an_error_of_the_user_is_one_line(
    arguments: list[Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npz").write_text("no checkpoint")
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    message = fails(monkeypatch, *arguments)
    assert said in message
    assert "Traceback" not in message
    assert not (tmp_path / "out.npz").exists()


def test_a_picture_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.png").write_text("no picture")
    assert "text.png" in fails(monkeypatch, "predict", "digits", tmp_path / "text.png")


@pytest.mark.parametrize("arguments", [["lst"], ["list", "--jsn"], ["show"], ["predict", "digits"]], ids=" ".join)
def test_a_command_that_is_none_is_a_usage_error(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.output


def test_the_version_is_one_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", __version__)


def test_a_table_of_ones_own_is_converted_from_and_facts_are_taken(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    google = (files.data_folder("converters") / "checkpoints" / "google.toml").read_text()
    table.write_text(google.replace('"embedding/kernel" = "embedding/kernel"', '"embedding/kernel" = "stem"'))
    mine, back = tmp_path / "mine.npz", tmp_path / "back.npz"
    run("convert", TOKEN, mine, "--to", table)
    run("convert", mine, back, "--from", table, "--to", "google", "--config", "num_heads=4")
    with np.load(TOKEN) as before, np.load(mine) as own, np.load(back) as after:
        assert "stem" in own.files
        assert {name: before[name].tobytes() for name in before} == {name: after[name].tobytes() for name in after}
