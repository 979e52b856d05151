"""`keras-vit export`, `verify` and `bench` write and print the right things, and fail with clear errors."""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image

from command_line import fails, run
from keras_vit import cli, converters, digits, export, zoo
from keras_vit._util.fields import option_names
from keras_vit._util.text import byte_size
from keras_vit.cli import options as cli_options
from keras_vit.export import _saved_model
from keras_vit.export.exported import load_exported
from keras_vit.export.modes import Options
from litert_graph import read_labels
from tiny_models import built


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


def test_the_line_that_embed_advises_for_a_file_with_a_head_writes_one_that_it_takes(
    written: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = fails(monkeypatch, "embed", written, pictures, "--to", "rows")
    advised = re.search(r"keras-vit (export MODEL .*\.tflite)", message)
    assert advised
    assert "class" not in run(*advised[1].replace("MODEL", "digits").split())
    assert run("embed", "features.tflite", pictures, "--to", "rows").endswith(": 20 rows, 0 with an error\n")


def test_a_file_is_verified_on_built_in_images_and_on_ones_own(written: Path, pictures: Path) -> None:
    row = json.loads(run("verify", written, "digits", "--json"))
    assert set(row) == set(export.verify(zoo.load("digits"), written).to_dict())
    assert (row["path"], row["images"], row["agreement"], row["threads"]) == (str(written), 8, 1.0, 2)
    assert row["cosine"] > 0.999 and row["seconds"] is None
    [first, *_] = sorted(pictures.rglob("*.png"))
    report = json.loads(run("verify", written, "digits", pictures, first, "--quantize", "dynamic", "--json"))
    assert (report["images"], report["agreement"], report["mode"]) == (21, 1.0, "dynamic")
    assert "on 21 images" in run("verify", written, "digits", pictures, first, "--threads", "1")


@pytest.mark.full
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
    file = load_exported(path)
    assert (file.shape, file.batch, file.dtype) == ((64, 56, 3), 2, "uint8")
    outputs = file.call(np.zeros((2, 64, 56, 3), np.uint8))
    assert outputs["probabilities"].sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert outputs["attention"].shape[0] == 2
    assert json.loads(run("verify", path, "digits", "--image-size", "48", "--json"))["agreement"] == 1.0


def test_function_and_command_have_the_options_of_the_dataclass() -> None:
    names, options = option_names(Options), Options()
    defaults = {name: getattr(options, name) for name in names}
    parameters = inspect.signature(export.tflite).parameters
    assert set(parameters) == {*names, "model", "path", "calibration", "verify", "progress"}
    assert {name: parameters[name].default for name in names} == defaults
    command: Any = typer.main.get_command(cli.app)
    described = {each.name: each.default for each in command.commands["export"].params}
    assert {name: described[name] for name in names} == defaults


def test_calibration_takes_the_same_images(tmp_path: Path, pictures: Path) -> None:
    printed = run("export", "digits", "--to", tmp_path / "out.tflite", "--quantize", "int8", "--images", pictures)
    assert " KiB, int8\n" in printed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    """Write a tiny model as a SavedModel by the command, which compares it on one's own images."""
    place = tmp_path_factory.mktemp("saved")
    converters.save(built(num_layers=1), place / "tiny.npz", format="google")
    options = ("--warmup", 2, "--dtype", "bfloat16", "--images", pictures, "--json")
    report = json.loads(run("export", place / "tiny.npz", "--to", place / "1", *options))
    assert (report["path"], report["mode"], report["images"]) == (str(place / "1"), "bfloat16", 20)
    assert report["cosine"] > 0.999
    return place / "1"


def test_a_folder_is_a_saved_model_with_requests_for_warm_up(saved: Path) -> None:
    assert (saved / "saved_model.pb").exists()
    assert (saved / "assets.extra" / "tf_serving_warmup_requests").exists()


@pytest.mark.parametrize(
    ("options", "sizes"), [(("--warmup", 2, "--warmup", 3), [2, 3]), pytest.param((), [1], marks=pytest.mark.full)]
)
def test_a_command_without_sizes_warms_up_for_one_file(
    options: tuple[Any, ...], sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[Any] = []
    monkeypatch.setattr(_saved_model, "_write_warmup", lambda folder, signatures, found: passed.extend(found))
    converters.save(built(num_layers=1), tmp_path / "tiny.npz", format="google")
    run("export", tmp_path / "tiny.npz", "--to", tmp_path / "1", *options)
    assert passed == sizes


@pytest.mark.parametrize(
    ("mode", "options", "images"),
    [
        ("dynamic", (), None),
        ("dynamic", ("--calibrate",), 20),
        ("int8", (), 10),
        ("int8", ("--calibrate",), 10),
        ("none", (), 20),
    ],
)
def test_a_command_rounds_kernels_only_where_it_must_or_is_asked(
    mode: str,
    options: tuple[str, ...],
    images: int | None,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, Any] = {}

    def exported(*_: Any, **given: Any) -> Any:
        found.update(given)
        return SimpleNamespace(to_dict=dict)

    monkeypatch.setattr("keras_vit.export.tflite", exported)
    said: list[str] = []
    monkeypatch.setattr("keras_vit.cli.export.print_line", said.append)
    run("export", "digits", "--to", tmp_path / "x.tflite", "--quantize", mode, "--images", pictures, *options)
    assert (found["calibration"] and len(found["calibration"])) == images
    assert len(found["verify"]) == (10 if mode == "int8" else 20)
    assert any("takes minutes" in line for line in said) == (mode != "none" and images is not None)


def test_calibrate_needs_images_and_something_to_round(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("export", "digits", "--calibrate", "--to", tmp_path / "x.tflite")
    assert "--calibrate needs --images FOLDER" in fails(monkeypatch, *line)
    assert "float16 does not" in fails(monkeypatch, *line, "--quantize", "float16", "--images", pictures)
    folder = ("export", "digits", "--calibrate", "--to", tmp_path / "1", "--images", pictures)
    assert "a SavedModel (a .tflite file has that suffix) does not take --calibrate" in fails(monkeypatch, *folder)


def test_the_copy_of_standard_error_needs_no_close() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        copy = cli_options._copy_of_stderr.__wrapped__()
        number = copy.fileno()
        del copy
        gc.collect()
    assert not warned
    os.close(number)


def check_bench(line: list[Any], image_size: list[int], batch: int) -> None:
    row = json.loads(run("bench", *line, "--rounds", 5, "--json"))
    assert (row["image_size"], row["batch"], row["rounds"]) == (image_size, batch, 5)
    assert 0 < row["median_ms"] <= row["p90_ms"]
    assert row["images_per_second"] == pytest.approx(1000 * batch / row["median_ms"])


def test_bench_times_checkpoints_and_files_and_refuses_what_it_cannot_time(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = built(num_layers=1)
    converters.save(model, "tiny.npz", format="google")
    export.tflite(model, "pixels.tflite", quantize="none", input_dtype="uint8", batch=2, source_size=(40, 24))
    check_bench(["tiny.npz", "--image-size", "32x40"], [32, 40], 1)
    check_bench(["pixels.tflite"], [40, 24], 2)
    first, second = run("bench", "tiny.npz", "--rounds", 3).splitlines()
    assert first.startswith("tiny.npz at 32 x 32, batch 1: median ") and "3 calls after warm-up" in second
    for wrong, said in (
        (["pixels.tflite", "--batch", "3"], "takes 2 images per call. Received: --batch 3"),
        (["pixels.tflite", "--image-size", "48"], "--image-size"),
        ([saved, "--threads", "2"], "threads"),
    ):
        assert said in fails(monkeypatch, "bench", *wrong)


@pytest.mark.full
def test_bench_times_saved_models_and_files_of_one_thread(written: Path, saved: Path) -> None:
    check_bench([saved, "--batch", "3"], [32, 32], 3)
    check_bench([written, "--threads", "1"], [32, 32], 1)


@pytest.mark.full
def test_a_file_that_is_too_far_from_the_model_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, said in (
        ([], "wanted cosine >= 1"),
        (["--least-agreement", "0"], "or accept it with least_cosine=0.99"),
    ):
        line = ["export", "digits", "--to", tmp_path / "out.tflite", "--least-cosine", "1", *options]
        message = fails(monkeypatch, *line)
        assert said in message and "\n" not in message
    assert "has no images" in fails(monkeypatch, *line[:4], "--images", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_model_or_size_is_an_error(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: Any = zoo.load("digits")
    head = other.get_layer("head")
    head.kernel.assign(-np.asarray(head.kernel))
    converters.save(other, tmp_path / "other.npz", format="google")
    message = fails(monkeypatch, "verify", written, tmp_path / "other.npz", "--quantize", "dynamic")
    assert "differs from the model: wanted cosine >= 0.995 and difference_cosine >= 0.97 and" in message
    assert "takes images of" in fails(monkeypatch, "verify", written, "digits", "--image-size", "48")


@pytest.mark.full
def test_an_export_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keras_vit", "export", "digits", "--to", str(tmp_path / "a.tflite")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not list(tmp_path.glob("*")) and not list(tmp_path.glob(".*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 143
    assert not list(tmp_path.iterdir())
