"""Commands and functions take a .tflite file where a model stands, and most start no TensorFlow for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_runtime import HEADS, environment

from command_line import fails, run
from keras_vit import VisionTransformer, batch, dense, digits, export, train, zoo
from keras_vit.export import runtime
from tiny_models import randomised, tiny

pytest.importorskip("ai_edge_litert")
parquet = pytest.importorskip("pyarrow.parquet")

DIGITS = digits.load()


class Files:
    """Exported files and images of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pictures = folder / "pictures"
        self.pictures.mkdir()
        for i, image in enumerate(DIGITS.test_images[:12]):
            Image.fromarray(image[..., 0]).save(self.pictures / f"{i:02}.png")
        self.classifier, self.features, self.maps = (
            folder / f"{name}.tflite" for name in ("digits", "features", "maps")
        )
        export.tflite(zoo.load("digits"), self.classifier)
        export.tflite(zoo.load("digits", num_classes=0), self.features)
        head = dense.MapConfig(**HEADS["classes"])
        model = dense.DenseModel(randomised(VisionTransformer(tiny(num_classes=0))), head)
        export.tflite(model, self.maps, quantize="none")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


def test_no_tensorflow_is_started(files: Files) -> None:
    program = """
import sys

sys.modules["tensorflow"] = sys.modules["keras"] = None  # an import of either fails
from keras_vit.cli import main

main()
"""
    commands = (
        ["predict", files.classifier, files.pictures / "00.png"],
        ["predict", files.maps, files.pictures / "00.png", "--to", files.folder / "to"],
        ["embed", files.features, files.pictures, "--to", files.folder / "vectors"],
        ["search", files.folder / "vectors", files.pictures / "00.png", "--top", "1"],
        ["embed", files.classifier, files.pictures, "--to", files.folder / "classes", "--what", "classes"],
        ["bench", files.classifier, "--rounds", "1"],
    )
    outputs = []
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, command)],
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
        )
        assert (done.returncode, done.stderr) == (0, ""), done
        outputs.append(done.stdout)
    assert "seven" in outputs[0] and "00.png" in outputs[3]
    assert {path.name for path in (files.folder / "to").iterdir()} == {"00.png", "00-overlay.png"}
    rows = parquet.read_table(files.folder / "classes").to_pylist()
    assert [row["label"] for row in rows] == [one[0].label for one in zoo.load("digits").classify(files.pictures)]


def test_a_bad_image_is_a_line(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.png").write_bytes(b"nothing")
    text = fails(monkeypatch, "predict", files.classifier, files.pictures / "00.png", tmp_path / "bad.png")
    assert text == "keras-vit: 1 of 2 images cannot be read"
    rows = json.loads(run("predict", files.classifier, files.pictures / "00.png", "--json", "--top", "2"))
    assert [one["label"] for one in rows[0]["predictions"]][0] == "seven" and len(rows[0]["predictions"]) == 2


def test_maps_are_written_as_pillow_reads_them(files: Files, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (40, 60, 3), np.uint8)).save(tmp_path / "photo.png")
    run("predict", files.maps, tmp_path / "photo.png", "--to", tmp_path / "to")
    [expected] = export.load(files.maps).predict_maps(tmp_path / "photo.png")
    with Image.open(tmp_path / "to" / "photo.png") as image:
        np.testing.assert_array_equal(np.asarray(image), expected)
    with Image.open(tmp_path / "to" / "photo-overlay.png") as image:
        assert (image.mode, image.size) == ("RGB", (60, 40))


@pytest.mark.parametrize("what", ["embeddings", "features", "logits", "probabilities"])
def test_rows_are_those_of_the_model(what: str, files: Files, tmp_path: Path) -> None:
    path = files.features if what in ("embeddings", "features") else files.classifier
    model = export.load(path)
    (tmp_path / "bad.png").write_bytes(b"nothing")
    result = batch.embed(path, [files.pictures, tmp_path / "bad.png"], to=tmp_path / "rows", what=what, batch_size=5)
    assert result[1:] == (13, 1)
    rows = parquet.read_table(result.path).to_pylist()
    values = np.array([row[what] for row in rows if row["error"] is None])
    outputs = model.run(files.pictures)
    expected = {
        "embeddings": lambda: model.embed(files.pictures),
        "probabilities": lambda: model.task.exported_output("probabilities", outputs["logits"]),
    }.get(what, lambda: outputs[what])()
    np.testing.assert_allclose(values, expected, atol=1e-6)
    record = json.loads((result.path / "_run.json").read_text())
    assert record["model"] == {"model": str(path)} and record["dtype"] == "file"


def test_int8_rows_are_near_the_models_and_the_run_says_how_near(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.load("digits")
    (tmp_path / "bad.png").write_bytes(b"nothing")
    source, out = [str(files.pictures), str(tmp_path / "bad.png")], tmp_path / "rows"
    run("embed", "digits", *source, "--to", out, "--dtype", "int8")
    values = np.array([row["embeddings"] for row in parquet.read_table(out).to_pylist() if row["error"] is None])
    assert ((values * model.embed(files.pictures)).sum(axis=1) > 0.999).all()
    record = json.loads((out / "_run.json").read_text())
    assert record["dtype"] == "int8" and record["int8"]["images"] == 12 and record["int8"]["cosine"] > 0.999
    [path] = out.glob("_int8-*.tflite")
    assert record["weights"] in path.name and len(export.load(path).features(files.pictures)) == 12
    written = path.stat().st_mtime_ns
    assert batch.embed(model, source, to=out, dtype="int8", retry_errors=True)[1:] == (13, 1)
    assert path.stat().st_mtime_ns == written  # the file of the first call is used again
    assert "00.png" in run("search", out, files.pictures / "00.png", "--top", "1")
    record["int8"]["difference_cosine"] = 0.9
    (out / "_run.json").write_text(json.dumps(record))
    assert "cosine to the model's is 0.900" in fails(monkeypatch, "search", out, files.pictures / "00.png")
    for what, key in (("classes", "label"), ("features", "features")):
        batch.embed(model, files.pictures, to=tmp_path / what, dtype="int8", what=what)
        assert len(parquet.read_table(tmp_path / what)[key]) == 12
    for options in ({"what": "patches"}, {"engine": "ray"}):
        with pytest.raises((ValueError, ImportError), match="int8|ray"):
            batch.embed(model, files.pictures, to=tmp_path / "wrong", dtype="int8", **options)


def test_what_a_file_lacks_is_said_before_anything_is_written(files: Files, tmp_path: Path) -> None:
    wrong: tuple[tuple[Path, dict[str, Any], str], ...] = (
        (files.features, {"what": "classes"}, "needs a head for classes"),
        (files.features, {"what": "patches"}, "none of the outputs"),
        (files.classifier, {}, "num_classes=0"),
        (files.maps, {}, "has no features"),
        (files.features, {"dtype": "float32"}, "has its own dtype"),
        (files.features, {"engine": "ray"}, "has its own dtype|ray"),
    )
    for path, options, message in wrong:
        with pytest.raises((ValueError, ImportError), match=message):
            batch.embed(path, files.pictures, to=tmp_path / "rows", **options)
    assert not (tmp_path / "rows").exists()


def test_commands_say_what_a_file_cannot_do(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, out = files.pictures / "00.png", tmp_path / "rows"
    cases = (
        (("predict", files.classifier, image, "--classes", "cat,dog"), "--classes needs a model with texts"),
        (("predict", files.classifier, image, "--weights", "x"), "--weights: for models, not for files"),
        (("predict", files.classifier, image, "--image-size", "64"), "--image-size: for models"),
        (("visualize", files.classifier, image), "TFLite model, for keras_vit.export.load"),
        (("predict", tmp_path / "missing.tflite", image), "There is no exported file"),
    )
    for command, message in cases:
        assert message in fails(monkeypatch, *command)
    run("embed", files.features, files.pictures, "--to", out)
    assert "search with an image file" in fails(monkeypatch, "search", out, "seven")
    assert "of another model" in fails(monkeypatch, "search", out, image, "--model", files.classifier)


def test_an_evaluation_counts_as_that_of_the_model(files: Files, tmp_path: Path) -> None:
    data = {"evaluation": (DIGITS.test_images, DIGITS.test_labels)}
    expected = train.evaluate(zoo.load("digits"), data)
    export.tflite(zoo.load("digits"), tmp_path / "pixels.tflite", input_dtype="uint8", output="probabilities", batch=4)
    for path in (files.classifier, tmp_path / "pixels.tflite"):
        file = export.load(path)
        assert isinstance(file, runtime.FileModel)
        found = train.evaluate(file, data)
        assert found.count == 360 and abs(found.top1 - expected.top1) < 0.003
        assert abs(found.loss - expected.loss) < 0.005
        labels = np.array([int(one[0].label_id) for one in file.classify(DIGITS.test_images)])
        assert found.top1 == pytest.approx((labels == DIGITS.test_labels).mean())
        examined = train.examine(file, data)
        np.testing.assert_array_equal(examined.predicted, labels)
    assert "357 of 360" in run("evaluate", files.classifier, "--data", "digits")
