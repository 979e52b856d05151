"""`keras-vit export` and `keras-vit verify` write and print the right things, and fail with clear errors."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image

from command_line import fails, run
from keras_vit import cli, digits, export
from keras_vit._util.checks import option_names
from keras_vit._util.text import byte_size
from keras_vit.export.litert.options import Options
from litert_graph import read_labels


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder of folders of digits as PNG files, with another file beside them."""
    folder = tmp_path_factory.mktemp("pictures")
    data = digits.load()
    for number, (image, label) in enumerate(zip(data.test_images[:20], data.test_labels, strict=False)):
        (folder / str(label)).mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / str(label) / f"{number}.png")
    (folder / "readme.txt").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the digits model by the command."""
    path = tmp_path_factory.mktemp("written") / "digits.tflite"
    printed = run("export", "digits", "--to", path)
    assert printed.startswith(f"{path}: {byte_size(path.stat().st_size)}, dynamic\n  on 8 images: cosine 0.99")
    assert "exported in" in printed
    return path


def test_a_file_is_verified_on_built_in_images(written: Path) -> None:
    row = json.loads(run("verify", written, "digits", "--json"))
    assert (row["path"], row["images"], row["agreement"], row["threads"]) == (str(written), 8, 1.0, 2)
    assert row["cosine"] > 0.999
    assert row["seconds"] is None


def test_a_file_is_verified_on_ones_own_images(written: Path, pictures: Path) -> None:
    [first, *_] = sorted(pictures.rglob("*.png"))
    report = json.loads(run("verify", written, "digits", pictures, first, "--quantize", "dynamic", "--json"))
    assert (report["images"], report["agreement"], report["mode"]) == (21, 1.0, "dynamic")
    assert "on 21 images" in run("verify", written, "digits", pictures, first, "--threads", "1")


def test_everything_that_a_file_can_be_is_an_option(tmp_path: Path, pictures: Path) -> None:
    path, names = tmp_path / "pixels.tflite", tmp_path / "names.txt"
    names.write_text("".join(f"digit {number}\n" for number in range(10)))
    options = ["--image-size", "48", "--input", "uint8", "--source-size", "64x56", "--output", "probabilities"]
    printed = run(
        *("export", "digits", "--to", path, "--quantize", "none", *options, "--labels", names, "--images", pictures),
        *("--batch", "2", "--attention", "--threads", "1", "--least-cosine", "0.99", "--json"),
    )
    row = json.loads(printed)
    assert (row["images"], row["mode"], row["threads"], row["agreement"]) == (20, "none", 1, 1.0)
    assert row["preprocess_error"] < 0.01
    assert read_labels(path) == names.read_text().splitlines()
    from keras_vit.export.exported import load_exported

    file = load_exported(path)
    assert (file.shape, file.batch, file.dtype) == ((64, 56, 3), 2, "uint8")
    outputs = file.call(np.zeros((2, 64, 56, 3), np.uint8))
    assert outputs["probabilities"].sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert outputs["attention"].shape[0] == 2
    assert json.loads(run("verify", path, "digits", "--image-size", "48", "--json"))["agreement"] == 1.0


def test_function_and_command_have_the_options_of_the_dataclass() -> None:
    names, options = option_names(Options), Options()
    parameters = inspect.signature(export.tflite).parameters
    assert set(parameters) == {*names, "model", "path", "calibration", "verify", "progress"}
    assert {name: parameters[name].default for name in names} == {name: getattr(options, name) for name in names}
    command: Any = typer.main.get_command(cli.app)
    described = {each.name: each for each in command.commands["export"].params}
    assert set(names) <= set(described)
    assert {name: described[name].default for name in names} == {name: getattr(options, name) for name in names}


def test_calibration_takes_the_same_images(tmp_path: Path, pictures: Path) -> None:
    printed = run("export", "digits", "--to", tmp_path / "out.tflite", "--quantize", "int8", "--images", pictures)
    assert " KiB, int8\n" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export", "digits", "--to", "{}/missing/out.tflite"], "There is no folder for the .tflite file: {}/missing"),
        (["export", "digits", "--to", "{}"], "{} already exists"),
        (["export", "digits", "--to", "{}/out.tflite", "--quantize", "int5"], "quantize must be one of"),
        (["export", "digits", "--to", "{}/out.tflite", "--quantize", "int8"], "needs calibration images"),
        (["export", "digits", "--to", "{}/out.tflite", "--images", "{}"], "has no images"),
        (
            ["export", "digits", "--to", "{}/out.tflite", "--images", "nothing.png"],
            "no image file or folder 'nothing.png'",
        ),
        (
            ["export", "digits", "--to", "{}/out.tflite", "--source-size", "big"],
            "--source-size must be a number of pixels",
        ),
        (["export", "digits", "--to", "{}/out.tflite", "--input", "int8"], "--input must be one of"),
        (["export", "digits", "--to", "{}/out.tflite", "--least-cosine", "1"], "wanted cosine >= 1.0"),
        (
            ["export", "digits", "--to", "{}/out.tflite", "--least-cosine", "1", "--least-agreement", "0"],
            "(--images FOLDER), or quantize='float16'; or accept it with least_cosine=0.99",
        ),
        (["export", "nothing", "--to", "{}/out.tflite"], "nothing"),
        (["verify", "{}/nothing.tflite", "digits"], "There is no exported file {}/nothing.tflite"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_of_the_user_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = fails(monkeypatch, *(argument.format(tmp_path) for argument in arguments))
    assert said.format(tmp_path) in message
    assert "\n" not in message
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_model_is_status_1(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keras_vit import converters, zoo

    other: Any = zoo.load("digits")
    head = other.get_layer("head")
    head.kernel.assign(-np.asarray(head.kernel))
    converters.save(other, tmp_path / "other.npz", format="google")
    message = fails(monkeypatch, "verify", written, tmp_path / "other.npz", "--quantize", "dynamic")
    assert "differs from the model: wanted cosine >= 0.995 and difference_cosine >= 0.97." in message


def test_a_size_that_does_not_fit_says_what_to_do(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = fails(monkeypatch, "verify", written, "digits", "--image-size", "48")
    assert "takes images of" in message


def test_the_report_is_the_functions_own(written: Path) -> None:
    from keras_vit import zoo

    assert set(json.loads(run("verify", written, "digits", "--json"))) == set(
        export.verify(zoo.load("digits"), written).to_dict()
    )


def test_a_folder_is_a_saved_model_that_is_compared_on_ones_own_images(tmp_path: Path, pictures: Path) -> None:
    options = ("--warmup", 2, "--dtype", "bfloat16", "--images", pictures, "--json")
    report = json.loads(run("export", "digits", "--to", tmp_path / "digits" / "1", *options))
    assert (report["path"], report["agreement"]) == (str(tmp_path / "digits" / "1"), 1.0)
    assert (report["mode"], report["images"]) == ("bfloat16", 20)
    assert (tmp_path / "digits" / "1" / "assets.extra" / "tf_serving_warmup_requests").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "models/1", "--quantize", "none", "--input", "uint8"], "suffix) does not take --quantize, --input."),
        (["--to", "x.tflite", "--top", "3"], "a .tflite file does not take --top."),
    ],
)
def test_options_of_the_other_kind_are_refused(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in fails(monkeypatch, "export", "digits", *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["digits.onnx", "digits.keras"])
def test_a_file_of_another_trade_is_not_written(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = fails(monkeypatch, "export", "digits", "--to", tmp_path / name)
    assert "a .tflite file, or a folder for a SavedModel" in message
    assert not list(tmp_path.iterdir())
