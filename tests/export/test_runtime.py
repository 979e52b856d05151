"""A .tflite file as a model: its pixels and answers are the Keras model's, and nothing of it needs TensorFlow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import eomt_cases
import image_kinds
import picture_kinds
from keras_vit import VisionTransformer, dense, digits, errors, export, text, zoo
from keras_vit.export import runtime
from keras_vit.model.config import Preprocessing
from marks import full_except
from reference_cases import arrays
from tiny_models import built, randomised, tiny

pytest.importorskip("ai_edge_litert")

IMAGES = digits.load().test_images[:40]
PREPARATIONS = {
    "vit_jax": Preprocessing(),
    "big_vision": Preprocessing(antialias=True, resize="crop", crop_fraction=0.875),
    "timm": Preprocessing(
        **{"resize": "crop", "interpolation": "bicubic", "antialias": True, "crop_fraction": 0.9},
        **{"crop_rounding": "half_even", "round_pixels": True, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.2, 0.2)},
    ),
}


def exported(model: Any, path: Path, **options: Any) -> runtime.FileModel:
    """Write a file that may be as far from a model with random weights as it likes, and load it."""
    export.tflite(model, path, **{"least_cosine": -1.0, "least_agreement": 0.0, **options})
    loaded = export.load(path, threads=3)
    assert isinstance(loaded, runtime.FileModel)
    return loaded


# ---- pixels


@pytest.mark.parametrize("count", full_except([150], [150, 500]))
def test_pixels_of_pictures_of_all_kinds_are_those_of_preprocess(count: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pictures = [picture_kinds.drawn(random) for _ in range(count)]
    assert {kind for kind, _ in pictures} == {*picture_kinds.KINDS}
    for number, (name, preprocessing) in enumerate(PREPARATIONS.items()):
        channels = 1 if name == "vit_jax" else 3
        model = built(num_channels=channels, preprocessing=preprocessing)
        file = exported(model, tmp_path / f"{number}.tflite", quantize="none")
        for kind, content in pictures[number::3] if number else pictures:
            path = tmp_path / "picture"
            path.write_bytes(content)
            expected = model.preprocess(path)  # JPEG and PNG: decoded by TensorFlow
            for given in (path, content, picture_kinds.opened(content)):
                received = file.preprocess(given)
                assert received.dtype == np.float32
                np.testing.assert_array_equal(received, expected, err_msg=f"{name}, {kind}, {type(given)}")


def test_arrays_lists_folders_and_patterns_are_taken_as_the_model_takes_them(tmp_path: Path) -> None:
    model = zoo.load("digits")
    file = exported(model, tmp_path / "digits.tflite")
    for i, image in enumerate(IMAGES[:3]):
        Image.fromarray(image[..., 0]).save(tmp_path / f"{i}.png")
    for given in (IMAGES[:3], IMAGES[0], list(IMAGES[:2]), IMAGES[0].astype(np.float32), IMAGES[0, ..., 0]):
        np.testing.assert_array_equal(file.preprocess(given), model.preprocess(given))
        assert [one[0].label for one in file.classify(given)] == [one[0].label for one in model.classify(given)]
    expected = [one[0].label for one in model.classify(IMAGES[:3])]
    for given in (tmp_path, f"{tmp_path}/*.png", [tmp_path / f"{i}.png" for i in range(3)]):
        assert [one[0].label for one in file.classify(given)] == expected


# ---- answers

MODES: dict[str, dict[str, Any]] = {
    **{mode: {"quantize": mode} for mode in ("none", "float16", "dynamic", "int4", "int8", "int16x8")},
    "any batch": {"batch": None},
    "batch of four": {"batch": 4},
    "pixels": {"input_dtype": "uint8"},
    "pixels that the file resizes": {"input_dtype": "uint8", "source_size": IMAGES.shape[1:3]},
    "probabilities": {"output": "probabilities"},
    "attention": {"attention": True},
}


@pytest.mark.parametrize("name", full_except(["dynamic", "batch of four", "pixels", "probabilities"], MODES))
def test_answers_are_the_models(name: str, tmp_path: Path) -> None:
    model, options = zoo.load("digits"), MODES[name]
    seen = digits.load().test_images
    calibration = {"calibration": seen[100:200], "verify": seen[:100]} if options.get("quantize") in NEED else {}
    report = export.tflite(model, tmp_path / "digits.tflite", **options, **calibration)
    file = export.load(tmp_path / "digits.tflite", threads=3)
    want, got = model.classify(IMAGES, top=3), file.classify(IMAGES, top=3)
    same = [one[0][:2] == other[0][:2] for one, other in zip(want, got, strict=True)]
    assert np.mean(same) >= report.agreement - 0.05  # of these 40; the report's are others
    assert all(len(ranking) == 3 for ranking in got)
    far = [abs(one[0].probability - other[0].probability) for one, other in zip(want, got, strict=True)]
    assert np.median(far) < 0.02
    outputs = file.run(IMAGES[:5])
    assert {name: len(values) for name, values in outputs.items()} == dict.fromkeys(file.outputs, 5)
    if options.get("attention"):
        maps = np.asarray(model.attention_maps(model.preprocess(IMAGES[:5]))[-1])[:, :, 0, 1:]
        np.testing.assert_allclose(outputs["attention"], maps, atol=0.02)


NEED = ("int4", "int8", "int16x8")


def test_features_and_embeddings_are_the_models(tmp_path: Path) -> None:
    model = zoo.load("digits", num_classes=0)
    file = exported(model, tmp_path / "features.tflite", quantize="none")
    np.testing.assert_allclose(file.embed(IMAGES), model.embed(IMAGES), atol=1e-6)
    wanted = np.asarray(model(model.preprocess(IMAGES)))
    np.testing.assert_allclose(file.features(IMAGES), wanted, atol=1e-5 * np.abs(wanted).max())
    with pytest.raises(ValueError, match="needs a head for classes"):
        file.classify(IMAGES)
    with_head = exported(zoo.load("digits"), tmp_path / "digits.tflite")
    for method in (with_head.embed, with_head.features):
        with pytest.raises(ValueError, match="num_classes=0"):
            method(IMAGES)
    projected = built(projection_head=True)
    file = exported(projected, tmp_path / "projection.tflite", quantize="none")
    image = np.random.default_rng(0).integers(0, 256, (50, 40, 3), np.uint8)
    np.testing.assert_allclose(file.embed(image), projected.embed(image), atol=1e-5)


def test_labels_ids_and_sigmoids_are_the_models(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (50, 40, 3), np.uint8)
    changes = {"num_classes": 1000, "labels": "imagenet2012", "probabilities": "sigmoid"}
    model = built(**changes)
    for output in ("logits", "probabilities"):
        file = exported(model, tmp_path / f"{output}.tflite", quantize="none", output=output)
        [got], [want] = file.classify(image), model.classify(image)
        assert [one[:2] for one in got] == [one[:2] for one in want]
        assert got[0].label_id.startswith("n0")
        np.testing.assert_allclose([one[2] for one in got], [one[2] for one in want], atol=1e-4)
    named = exported(built(labels=tuple("abcde")), tmp_path / "named.tflite", labels=["v", "w", "x", "y", "z"])
    assert {one.label for one in named.classify(image)[0]} == {*"vwxyz"}


def test_texts_are_embedded_as_by_the_encoder(tmp_path: Path) -> None:
    encoder, texts = zoo.text_encoder("digits"), ["seven", "a photo of a three.", "soup, bread & butter"]
    text.tflite(encoder, tmp_path / "text.tflite", quantize="none")
    file = export.load(tmp_path / "text.tflite", threads=2)
    np.testing.assert_allclose(file.embed(texts), encoder.embed(texts), atol=1e-6)
    assert file.embed("seven").shape == (1, 64)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"must lie beside it.*tokenizer\.json"):
        export.load(tmp_path / "text.tflite")


# ---- maps

HEADS: dict[str, dict[str, Any]] = {
    "classes": {"num_classes": 3, "output": "classes", "blocks": (1,), "labels": ("sky", "sea", "land")},
    "depth": {"output": "depth", "blocks": (0, 1), "norm": False, "upsample": 4, "max_depth": 9.0},
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_maps_are_the_models_at_the_size_of_the_image(head: dict[str, Any], tmp_path: Path) -> None:
    model = dense.DenseModel(randomised(VisionTransformer(tiny(num_classes=0))), dense.MapConfig(**head))
    pictures = [np.random.default_rng(0).integers(0, 256, (*sides, 3), np.uint8) for sides in ((40, 60), (32, 32))]
    file = exported(model, tmp_path / "maps.tflite", quantize="none")
    for got, want in zip(file.predict_maps(pictures), model.predict_maps(pictures), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        if head["output"] == "depth":
            np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
        else:
            assert (got != want).mean() < 0.01  # ties of float32
    if head["output"] == "classes":
        assert file.task.class_names() == ["sky", "sea", "land"]
        numbers = exported(model, tmp_path / "numbers.tflite", quantize="none", output="classes")
        for got, want in zip(numbers.predict_maps(pictures), model.predict_maps(pictures), strict=True):
            assert got.dtype == np.uint8 and (got != want).mean() < 0.1  # interpolated classes, not logits
    with pytest.raises(ValueError, match="classify needs classes of whole images"):
        file.classify(pictures)
    with pytest.raises(ValueError, match="predict_segments needs"):
        file.predict_segments(pictures)


def test_an_image_is_squeezed_only_with_a_warning(tmp_path: Path) -> None:
    head = dense.MapConfig(**HEADS["classes"], framing="least", multiple=8)
    model = dense.DenseModel(randomised(VisionTransformer(tiny(num_classes=0))), head)
    file = exported(model, tmp_path / "maps.tflite", quantize="none")
    square, wide = (np.random.default_rng(0).integers(0, 256, (40, width, 3), np.uint8) for width in (40, 80))
    assert (file.predict_maps(square)[0] != model.predict_maps(square)[0]).mean() < 0.01
    with pytest.warns(UserWarning, match="of 40x80 to 32x64, and maps.tflite takes 32x32 alone"):
        assert file.predict_maps(wide)[0].shape == (40, 80)


def test_segments_are_the_official_ones(tmp_path: Path) -> None:
    name = "eomt_1"
    windows = eomt_cases.with_windows(eomt_cases.FOLDER / name, tmp_path / "windows")
    expected, pictures = arrays(eomt_cases.FOLDER / name / "reference.npz"), arrays(eomt_cases.FOLDER / "images.npz")
    files = [
        exported(dense.load(folder), tmp_path / f"{i}.tflite", quantize="none")
        for i, folder in enumerate((eomt_cases.FOLDER / name, windows))
    ]
    whole = [values for key, values in sorted(pictures.items()) if values.dtype == np.uint8]
    eomt_cases.check_segments(*files, whole, expected, ties=0.01)


# ---- threads, batches and errors


def test_one_bad_image_does_not_fail_the_others(tmp_path: Path) -> None:
    good = Image.fromarray(IMAGES[0, ..., 0])
    for options in ({"batch": 4}, {}):
        file = exported(zoo.load("digits"), tmp_path / "digits.tflite", **options)
        damaged_file = image_kinds.encoded(image_kinds.photo(), "JPEG")[:-300]
        found = list(file.classify_each([good, b"no image", good, damaged_file, good]))
        assert [isinstance(each, Exception) for each in found] == [False, True, False, True, False]
        with pytest.raises(ValueError, match="not an image of a known format"):
            file.classify([good, b"no image"])
        for broken in (b"", b"<html>"):
            with pytest.raises(ValueError, match="empty file|text, such as"):
                file.classify(broken)
        with pytest.raises(ValueError, match="at least one image"):
            file.classify([])


def test_many_threads_may_call_a_model(tmp_path: Path) -> None:
    path = tmp_path / "digits.tflite"
    exported(zoo.load("digits"), path)
    for threads in (1, 2):
        file = export.load(path, threads=threads)
        expected = file.classify(IMAGES)
        found: list[Any] = [None] * 6

        def call(number: int, found: list[Any] = found, file: Any = file) -> None:
            found[number] = [file.classify(image)[0] for image in IMAGES] if number % 2 else file.classify(IMAGES)

        workers = [threading.Thread(target=call, args=(number,)) for number in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for answers in found:
            assert [one[0].label for one in answers] == [one[0].label for one in expected]


def damaged(path: Path, change: Callable[[dict[str, str]], None]) -> Path:
    """Copy a file with other texts at its end."""
    copy = path.with_name("copy.tflite")
    with zipfile.ZipFile(path) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
        start = min(entry.header_offset for entry in archive.infolist())
    change(texts)
    copy.write_bytes(path.read_bytes()[:start])
    with zipfile.ZipFile(copy, "a") as archive:
        for name, content in texts.items():
            archive.writestr(name, content)
    return copy


def test_a_file_that_is_overwritten_in_use_is_refused_and_one_that_is_replaced_goes_on(tmp_path: Path) -> None:
    model = zoo.load("digits")
    other = VisionTransformer(model.config)
    fresh = exported(other, tmp_path / "other.tflite", quantize="none").path
    path, image = tmp_path / "digits.tflite", IMAGES[:1]
    expected = exported(model, path, quantize="none").run(IMAGES)["logits"]
    written, file = path.read_bytes(), export.load(path, threads=3)
    first = file.run(image)["logits"]  # the other interpreters have not started
    shutil.copy(fresh, tmp_path / "beside.tflite")
    (tmp_path / "beside.tflite").replace(path)
    np.testing.assert_array_equal(file.run(image)["logits"], first)
    np.testing.assert_allclose(file.run(IMAGES)["logits"], expected, rtol=1e-5, atol=1e-5)
    for content in (fresh.read_bytes(), fresh.read_bytes()[:1000]):
        path.write_bytes(written)
        file = export.load(path, threads=3)
        path.write_bytes(content)
        for images in (image, IMAGES):
            with pytest.raises(errors.OverwrittenFileError, match=r"digits.tflite was overwritten .*Load it again.*mv"):
                file.classify(images)


def test_a_file_that_says_too_little_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "digits.tflite"
    exported(zoo.load("digits"), path)
    with pytest.raises(FileNotFoundError, match="no exported file"):
        export.load(tmp_path / "missing.tflite")
    with pytest.raises(ValueError, match="is a folder"):
        export.load(tmp_path)
    with pytest.raises(ValueError, match="threads"):
        export.load(path, threads=0)
    (tmp_path / "cut.tflite").write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(ValueError, match="cut off or damaged"):
        export.load(tmp_path / "cut.tflite")
    for change in (lambda texts: texts.pop("model.json"), lambda texts: texts.update({"model.json": "{"})):
        with pytest.raises(ValueError, match=r"does not say what its model is: model\.json"):
            export.load(damaged(path, change))

    def unknown(texts: dict[str, str]) -> None:
        facts = json.loads(texts["model.json"])
        facts["config"]["of_a_later_version"] = 1
        texts["model.json"] = json.dumps(facts)

    with pytest.raises((ValueError, TypeError, errors.KerasViTError), match="of_a_later_version"):
        export.load(damaged(path, unknown))


WITHOUT_TENSORFLOW = """
import sys

REFUSED = {"tensorflow", "keras", "h5py", "requests", "filelock", "jinja2", "markupsafe", "rich", "typer"}


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ImportError(f"{name} is refused")


sys.meta_path.insert(0, Refuse())
import numpy as np
from keras_vit import export

image = np.zeros((40, 60, 3), "uint8")
print(export.load("digits.tflite").classify("seven.png", top=1)[0][0].label)
print(export.load("features.tflite").embed(["seven.png"] * 3).shape)
print(export.load("maps.tflite").predict_maps(image)[0].shape)
print(len(export.load("segments.tflite").predict_segments(image)))
print(export.load("text.tflite").embed("seven").shape)
"""


def test_nothing_needs_tensorflow_or_keras(tmp_path: Path) -> None:
    Image.fromarray(IMAGES[0, ..., 0]).save(tmp_path / "seven.png")
    exported(zoo.load("digits"), tmp_path / "digits.tflite")
    exported(zoo.load("digits", num_classes=0), tmp_path / "features.tflite")
    backbone = randomised(VisionTransformer(tiny(num_classes=0)))
    exported(dense.DenseModel(backbone, dense.MapConfig(**HEADS["classes"])), tmp_path / "maps.tflite", quantize="none")
    exported(dense.load(eomt_cases.FOLDER / "eomt_1"), tmp_path / "segments.tflite", quantize="none")
    text.tflite(zoo.text_encoder("digits"), tmp_path / "text.tflite")
    (tmp_path / "script.py").write_text(WITHOUT_TENSORFLOW)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment()
    )
    assert done.stdout.split("\n")[:5] == ["seven", "(3, 64)", "(40, 60)", "1", "(1, 64)"], done.stderr


def environment() -> dict[str, str]:
    """Return the environment of a process that imports this copy of the package."""
    import os

    return {**os.environ, "PYTHONPATH": str(Path(export.__file__).parents[2])}
