"""Commands take models and images in every form: run folders, folders, patterns, many files, bad ones among them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from command_line import fails, run
from keras_vit import VisionTransformer, converters, train, zoo
from keras_vit._util.files import READABLE, SUFFIXES, image_files
from keras_vit.cli import app, options
from keras_vit.model import classify
from tiny_models import built, tiny


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the folder of a finished training run."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    model = VisionTransformer(tiny(image_size=16, num_classes=3, labels=("ant", "bee", "cat")))
    model.get_layer("head").kernel.assign(np.random.default_rng(0).normal(size=(model.config.hidden_size, 3)))
    model.save(folder / "model.keras")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write twenty images in folders, and files that are none of them."""
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for number in range(20):
        path = folder / f"{number % 2}" / f"{number:02}.{'PNG' if number % 3 else 'jpg'}"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.png").touch()
    (folder / "0" / "._00.jpg").touch()
    return folder


# ---- models


@pytest.mark.full
def test_a_folder_of_a_run_is_its_model(
    run_folder: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, image = run_folder / "model.keras", photos / "0" / "00.jpg"
    assert run("predict", run_folder, image) == run("predict", file, image)
    assert converters.read_config(run_folder) == converters.load(run_folder).config
    run("convert", run_folder, tmp_path / "mine.npz", "--to", "google")
    assert converters.read_config(tmp_path / "mine.npz").num_classes == 3
    run("resize", run_folder, tmp_path / "larger.keras", "24")
    assert converters.load(tmp_path / "larger.keras").config.size == (24, 24)
    assert "another .keras file" in fails(monkeypatch, "resize", run_folder, tmp_path / "out.npz", "24")
    plan = run("plan", run_folder, "--batch", 8)
    assert plan.startswith("mine at 16x16, batch 8")
    assert f"at 24 x 24, {run_folder}" in run("show", run_folder, "--image-size", 24).splitlines()[0]
    assert json.loads(run("show", file, "--json"))["num_classes"] == 3
    assert options.find_model(str(run_folder)).load().config.labels == ("ant", "bee", "cat")


@pytest.mark.full
def test_a_run_can_start_from_a_folder_and_a_name_can_take_its_weights(run_folder: Path) -> None:
    pixels = np.zeros((8, 16, 16, 3), np.uint8)
    recipe = train.recipe("digits", steps=1, batch_size=8, optimizer="sgd", xla=False)
    arrays = {"train": (pixels, np.arange(8) % 3), "num_classes": 3}
    assert train.run(recipe, model=run_folder, data=arrays, progress=False).model.config.num_layers
    with pytest.raises(ValueError, match="contains another architecture"):
        zoo.load("digits", weights=run_folder)


def test_weights_of_a_name_may_be_a_keras_file(tmp_path: Path) -> None:
    digits = zoo.load("digits")
    digits.save(tmp_path / "model.keras")
    loaded = zoo.load("digits", weights=tmp_path, image_size=48)
    assert loaded.config == digits.config.replace(image_size=48)
    assert np.array_equal(loaded.get_layer("head").kernel, digits.get_layer("head").kernel)


def test_a_run_that_has_not_finished_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for read in (converters.load, converters.read_config, converters.detect):
        with pytest.raises(converters.CheckpointError, match="a training run that has not finished: it has no model"):
            read(tmp_path)
    (tmp_path / "best.keras").touch()
    with pytest.raises(converters.CheckpointError, match=r"or name .*best\.keras, its best model so far"):
        converters.load(tmp_path)


def test_the_name_of_a_data_set_may_have_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "prepared"))
    (tmp_path / "elsewhere" / "cifar10_corrupted").mkdir(parents=True)
    for data_dir in (None, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="There is no folder of images or of prepared data"):
            options.check_data("cifar10_corrupted/blur_1", data_dir)
    options.check_data("cifar10_corrupted/blur_1", tmp_path / "elsewhere")
    options.check_data("cifar10_corrupted/blur_1", Path("gs://bucket/prepared"))
    (tmp_path / "elsewhere").rename(tmp_path / "prepared")
    options.check_data("cifar10_corrupted/blur_1", None)


# ---- images


def test_files_folders_and_patterns_are_images(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos)
    every = sorted(str(path) for path in Path().rglob("[01][0-9].*"))
    assert len(every) == 20
    assert image_files(["."]) == image_files(["*"]) == image_files(["**/*.*"]) == image_files(["0", "1"]) == every
    assert image_files(["1/*.jpg"]) == sorted(str(path) for path in Path("1").glob("*.jpg"))
    assert image_files(["notes.txt", "0/02.PNG", Path("0/02.PNG")]) == ["notes.txt", "0/02.PNG", "0/02.PNG"]
    Path("x.JFIF").write_text("a suffix that training reads too")
    assert image_files(["."]) == [*every, "x.JFIF"]
    Path("x.JFIF").unlink()
    assert image_files(["gs://bucket/x.jpg"]) == ["gs://bucket/x.jpg"]

    Path("[1].png").write_text("brackets in a name are no pattern")
    assert image_files(["[1].png"]) == ["[1].png"]
    Path("[1].png").unlink()


def test_what_has_no_images_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    os.mkfifo("pipe")
    for path, said in {
        "nothing.png": "There is no image file or folder 'nothing.png'",
        "*.xyz": r"'\*.xyz' has no images",
        "empty": "'empty' has no images",
        "pipe": "'pipe' is not a regular file",
    }.items():
        with pytest.raises((FileNotFoundError, ValueError), match=said):
            image_files([path])
    assert {".jpe", ".jfif", ".webp"} < set(READABLE) < set(SUFFIXES)
    for suffix in SUFFIXES:
        Path("empty", f"x{suffix}").touch()
    assert len(image_files(["empty"])) == len(SUFFIXES)  # all kinds that training reads


@pytest.mark.full
def test_of_many_images_a_report_shows_some_and_says_so(run_folder: Path, photos: Path, tmp_path: Path) -> None:
    arguments = ["visualize", run_folder, photos, "--out", tmp_path / "report.html"]
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert "16 of the 20 images are used, evenly chosen" in result.stderr
    page = result.stdout.strip()
    shown = [path for path in image_files([photos]) if Path(path).name in Path(page).read_text(encoding="utf-8")]
    assert len(shown) == 16 and any("/1/" in path for path in shown)


@pytest.mark.full
def test_reports_and_exports_leave_out_and_count_what_cannot_be_read(
    run_folder: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(photos / "1", folder)
    (folder / "a.jpg").write_bytes(b"<html>")
    (folder / "b.png").touch()
    file = tmp_path / "x.tflite"
    commands = [("visualize", run_folder, folder, "--out", tmp_path / "report.html")]
    commands += [("export", run_folder, "--to", file, "--images", folder), ("verify", file, run_folder, folder)]
    for command in commands:
        with pytest.warns(UserWarning, match=r"cannot be read are left out: 2\. Such as '.*a.jpg' is text"):
            run(*command)
    assert "b.png' is an empty file" in fails(monkeypatch, "verify", file, run_folder, folder / "b.png")


@pytest.mark.full
def test_commands_take_folders_and_patterns(
    run_folder: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads(run("predict", run_folder, photos, "--json"))
    assert [row["image"] for row in rows] == image_files([photos])
    monkeypatch.setenv("HOME", str(photos))
    [home] = json.loads(run("predict", run_folder, "~/0/02.PNG", "--json"))
    same = next(row for row in rows if row["image"].endswith("02.PNG"))
    assert [each["label"] for each in home["predictions"]] == [each["label"] for each in same["predictions"]]
    page = run("visualize", run_folder, f"{photos}/0/*.jpg", "--out", tmp_path / "report.html").strip()
    assert "00.jpg" in Path(page).read_text(encoding="utf-8")


# ---- many images


def test_many_images_are_classified_in_batches_of_one_shape(
    run_folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = converters.load(run_folder)
    files = image_files([photos])
    single = [model.classify(file, top=3)[0] for file in files]
    prepared: list[Any] = []
    seen: list[tuple[int, int]] = []
    preprocess, predict = model.preprocess, model.predict_on_batch

    def prepare(image: Any) -> Any:
        prepared.append(image)
        return preprocess(image)

    def count(images: np.ndarray) -> Any:
        seen.append((len(images), len(prepared)))
        return predict(images)

    monkeypatch.setattr(model, "preprocess", prepare)
    monkeypatch.setattr(model, "predict_on_batch", count)
    for images, size, calls in (
        (photos, 16, [16, 16]),
        (files, 8, [8, 8, 8]),
        (files, 20, [20]),
        (str(photos / "*" / "*"), 64, [20]),
        ([files[:3], [np.asarray(Image.open(file)) for file in files[3:]]], 7, [7, 7, 7]),
        (np.stack([np.asarray(Image.open(file)) for file in files]), 6, [6, 6, 6, 6]),
    ):
        seen.clear()
        prepared.clear()
        found = model.classify(images, top=3, batch_size=size)
        # Only as many images are prepared as a batch needs: any number takes the memory of one batch.
        assert seen == [(each, min(20, size * number)) for number, each in enumerate(calls, start=1)]
        assert [[each.label for each in row] for row in found] == [[each.label for each in row] for row in single]
        for one, other in zip(found, single, strict=True):
            # Another number of images in a matrix product changes the last place of float32; 1e-5 is 100 of them.
            assert [each.probability for each in one] == pytest.approx([each.probability for each in other], abs=1e-5)


def test_an_image_that_cannot_be_read_is_named_or_returned(run_folder: Path, photos: Path, tmp_path: Path) -> None:
    model = converters.load(run_folder)
    good = image_files([photos])[:5]
    (tmp_path / "bad.jpg").write_text("no image")
    files = [*good[:2], tmp_path / "bad.jpg", *good[2:]]
    with pytest.raises(ValueError, match=r"bad\.jpg"):
        model.classify(files)
    results = list(classify.classify_each(model, files, top=1, batch_size=2))
    assert [isinstance(result, Exception) for result in results] == [number == 2 for number in range(6)]
    best = [each[0].label for each in (*results[:2], *results[3:]) if not isinstance(each, Exception)]
    assert best == [each[0].label for each in model.classify(good, top=1)]


def test_a_model_that_computes_nan_predicts_and_embeds_nothing() -> None:
    model = built(num_layers=1)
    image = np.zeros((32, 32, 3), np.uint8)
    model.get_layer("head").bias.assign([0, 1, 2, 3, -np.inf])  # a class that is never predicted
    [ranking] = model.classify(image)
    assert (ranking[-1].label, ranking[-1].probability) == ("class 4", 0)
    for value in (np.nan, np.inf):
        model.get_layer("block_0").mlp.dense1.bias.assign(np.full(64, value))
        for call in (model.classify, model.embed):
            with pytest.raises(ValueError, match=r"must compute finite numbers. Received: NaN or infinity"):
                call(image)


def test_numbers_below_one_are_refused(run_folder: Path, photos: Path) -> None:
    model = converters.load(run_folder)
    for name in ("top", "batch_size"):
        with pytest.raises(ValueError, match=f"{name} must be an integer >= 1. Received: 0"):
            model.classify(photos, **{name: 0})
    with pytest.raises(ValueError, match="at least one image"):
        model.classify([])


def test_a_bad_file_is_a_line_and_not_the_end_of_the_others(run_folder: Path, photos: Path, tmp_path: Path) -> None:
    for name in ("a", "c"):
        Image.new("RGB", (16, 16)).save(tmp_path / f"{name}.png")
    bad = tmp_path / "b.png"
    bad.write_text("no image")
    result = CliRunner().invoke(app, ["predict", str(run_folder), str(tmp_path), "--top", "1"])
    assert result.exit_code == 1
    assert str(result.exception) == "1 of 3 images cannot be read"
    first, _, line, third, _ = result.stdout.splitlines()
    assert (first, third) == (str(tmp_path / "a.png"), str(tmp_path / "c.png"))
    assert line.startswith(f"{bad}: ")
    assert not line.removeprefix(f"{bad}: ").startswith(str(bad))
    result = CliRunner().invoke(app, ["predict", str(run_folder), str(tmp_path), "--json", "--top", "1"])
    rows = json.loads(result.stdout)
    assert [set(row) for row in rows] == [{"image", "predictions"}, {"image", "error"}, {"image", "predictions"}]
    assert result.exit_code == 1


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Write a checkpoint without config.json and what the header says."""
    file, bare = tmp_path / "timm" / "model.safetensors", tmp_path / "bare.safetensors"
    file.parent.mkdir()
    converters.save(built(num_classes=10, norm_epsilon=1e-6), file, format="timm")
    save_file(load_file(file), bare)
    return bare


STATED = ("--config", "num_heads=4")  # the other facts of the file are named


@pytest.mark.filterwarnings("ignore:keras_vit. bare")
def test_commands_take_what_a_file_does_not_state(
    bare: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = next(photos.rglob("*.PNG"))
    assert "weights=FILE" in fails(monkeypatch, "predict", bare, image)
    run("predict", bare, image, *STATED)
    run("embed", bare, image, "--to", tmp_path / "vectors", *STATED)
    run("export", bare, "--to", tmp_path / "x.tflite", *STATED)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:keras_vit. bare")
def test_evaluations_and_trainings_take_it_too(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("evaluate", bare, "--data", "digits", "--few-shot", "1", *STATED)
    run("train", "linear-probe", "--model", bare, "--data", "digits", "--out", tmp_path / "run", *STATED)
    assert "--continue-from" in fails(monkeypatch, "train", "--continue-from", tmp_path / "run", *STATED)
