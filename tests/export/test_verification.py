"""Verification measures differences, and rejects files of another model and unusable images."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import VisionTransformer, dense, digits, export, zoo
from keras_vit.export import exported, samples, verification
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.head import build_file
from keras_vit.export.litert.operators import STORAGES, Operators
from keras_vit.export.litert.plan import FilePlan
from keras_vit.export.modes import load_mode
from keras_vit.export.report import measure_resources
from keras_vit.model.config import Preprocessing
from keras_vit.model.task import Classification
from marks import full_except
from outlier_models import standardise
from tiny_models import built, prepared, randomised, tiny

KERNEL = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def linear() -> keras.Model:
    """Return a model of one dense layer: 2x2 pixels to five classes."""
    image = keras.Input((2, 2, 3))
    model = keras.Model(image, keras.layers.Dense(5, use_bias=False)(keras.layers.Flatten()(image)))
    model.set_weights([KERNEL])
    return model


def file(path: Path, kernel: np.ndarray = KERNEL, *, bias: Any = None, batch: int | None = 1, ballast: int = 0) -> Path:
    """Write the linear model as a file; `ballast` adds an unused constant of this number of bytes."""
    ops = Operators(Builder())
    image = ops.builder.input("image", (batch, 2, 2, 3))
    flat = ops.reshape(image, (batch, 12), "flat")
    logits = ops.dense(flat, kernel.T, bias, "logits")
    if ballast:
        ops.builder.constant(np.zeros(ballast, np.uint8), "ballast")
    ops.builder.signature({"image": image}, {"logits": logits})
    ops.builder.write(path)
    return path


# ---- measurements


def compared(expected: dict[str, np.ndarray], received: dict[str, np.ndarray]) -> export.Report:
    """Return the report of a file, which is this one, with these outputs."""
    figures = verification.compare(Classification(num_classes=5), expected, received)
    path = Path(__file__)
    return export.Report(path=path, bytes=path.stat().st_size, milliseconds=1.5, **figures)


def test_the_figures_are_those_of_their_definitions() -> None:
    want = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    got = np.array([[3.0, 4.0], [1.0, 0.0], [1.0, 0.0]])
    report = compared({"logits": want}, {"logits": got})
    assert report.images == 3
    assert report.max_error == pytest.approx(2 / 4)
    assert report.cosine == pytest.approx(0.0)
    assert report.agreement == pytest.approx(2 / 3)
    assert report.sqnr == pytest.approx(10 * math.log10(30 / 5))
    facts = ("on 3 images: ", "SQNR 7.8 dB, relative error 5.0e-01", "same best class 66.67%", "1.50 ms an image")
    assert [fact for fact in facts if fact not in str(report)] == []

    # Every output counts for the cosine.
    both = {"logits": np.ones((2, 3)), "attention": np.array([[1.0, 0.0], [0.0, 1.0]])}
    report = compared(both, {**both, "attention": both["attention"][::-1]})
    assert (compared(both, both).cosine, report.cosine, report.max_error) == (1, 0, 0)

    # Tokens are classified each for itself.
    want = np.zeros((1, 4, 2))
    want[..., 0] = 1
    got = want.copy()
    got[0, 0] = [0, 1]
    assert compared({"logits": want}, {"logits": got}).agreement == 0.75


def test_the_largest_feature_of_a_model_without_a_head_is_not_called_a_class() -> None:
    features = {"features": np.array([[3.0, 4.0], [1.0, 0.0]])}
    figures = verification.compare(Classification(num_classes=0), features, features)
    lines = export.Report(path=Path(__file__), bytes=1, milliseconds=1.5, **figures).lines()
    assert lines[1].endswith("relative error 0.0e+00") and "class" not in str(lines)


def test_equals_have_no_noise_and_are_json_all_the_same() -> None:
    want = {"logits": np.zeros((2, 3))}  # logits of a new head: without a direction
    report = compared(want, want)
    assert (report.cosine, report.agreement, report.sqnr) == (1.0, 1.0, math.inf)
    row = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (row["sqnr"], row["path"]) == (None, __file__)
    assert set(row) == {field.name for field in dataclasses.fields(export.Report)}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells in /proc")
def test_time_and_memory_of_a_block_are_measured() -> None:
    size = 256 * 2**20
    with measure_resources() as used:
        ballast = np.ones(size, np.uint8)
        time.sleep(0.05)
    assert 0.05 <= used.seconds < 60
    # Other memory of the process changed by 19 MB once; a wrong unit would be an error of a thousand times.
    assert used.peak_bytes is not None and 0.5 * size < used.peak_bytes < 2 * size
    del ballast


# ---- files


def test_the_models_own_file_passes_with_any_batch(tmp_path: Path, linear: keras.Model) -> None:
    report = export.verify(linear, file(tmp_path / "good.tflite"), threads=1)
    assert (report.images, report.agreement, report.threads, report.mode) == (samples.NUM_SAMPLES, 1.0, 1, "none")
    assert report.max_error < 1e-6 and report.sqnr > 100 and report.milliseconds > 0  # twelve products
    images = np.random.default_rng(1).uniform(-1, 1, (4, 2, 2, 3)).astype(np.float32)
    for batch in (1, 3, None):
        path = file(tmp_path / "file.tflite", batch=batch)
        assert export.verify(linear, path, images).images == 4
        np.testing.assert_allclose(export.runner(path)(images), linear.predict_on_batch(images), atol=1e-6)


def test_what_is_not_the_model_is_refused(tmp_path: Path, linear: keras.Model) -> None:
    for kernel, said in (
        (-KERNEL, "wanted cosine >= 0.99999 and difference_cosine >= 0.9999 and sqnr >= 95 dB and scale >= 0.999"),
        (KERNEL * np.nan, r"computes NaN or infinity \(logits\)"),
        (np.where(np.arange(5) == 2, np.inf, KERNEL), r"computes NaN or infinity \(logits\)"),  # for one class
        (np.concatenate([KERNEL, KERNEL], axis=1), r"logits of shape \(8, 10\), the model \(8, 5\)"),
    ):
        with pytest.raises(export.VerificationError, match=f"bad.tflite .*{said}"):
            export.verify(linear, file(tmp_path / "bad.tflite", kernel))
    with pytest.raises(export.VerificationError, match="expected 27 to"):
        export.verify(linear, file(tmp_path / "large.tflite", ballast=300_000))
    image = keras.Input((2, 2, 3))
    large = keras.Model(image, keras.layers.Dense(5)(keras.layers.Dense(50_000)(keras.layers.Flatten()(image))))
    with pytest.raises(export.VerificationError, match=r"bytes, expected 382,50\d to"):
        export.verify(large, file(tmp_path / "small.tflite"))


def test_a_file_that_shares_only_a_constant_with_its_model_is_refused(tmp_path: Path) -> None:
    image, bias = keras.Input((2, 2, 3)), np.full(5, 300, np.float32)
    model = keras.Model(image, keras.layers.Dense(5)(keras.layers.Flatten()(image)))
    model.set_weights([KERNEL, bias])
    assert export.verify(model, file(tmp_path / "good.tflite", bias=bias)).difference_cosine > 0.999999
    with pytest.raises(export.VerificationError, match="wanted cosine .* and difference_cosine .* cosine 0.999"):
        export.verify(model, file(tmp_path / "bad.tflite", -KERNEL, bias=bias))


def test_thresholds_are_the_callers_to_set(tmp_path: Path, linear: keras.Model) -> None:
    path = file(tmp_path / "opposite.tflite", -KERNEL)
    assert export.verify(linear, path, least_cosine=-1.0).cosine == pytest.approx(-1)
    with pytest.raises(export.VerificationError, match="wanted agreement >= 0.5"):
        export.verify(linear, path, least_cosine=-1.0, least_agreement=0.5)


def test_what_does_not_run_everywhere_is_refused(
    tmp_path: Path, linear: keras.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = Operators(Builder())
    image = ops.builder.input("image", (1, 2, 2, 3))
    deep = ops.reshape(image, (1, 1, 2, 2, 3), "deep")
    ops.builder.signature({"image": image}, {"logits": deep})
    ops.builder.write(tmp_path / "deep.tflite")
    assert exported.read_structure(tmp_path / "deep.tflite") == exported.Structure(frozenset({"RESHAPE"}), 5, 1)
    with pytest.raises(export.VerificationError, match="has tensors of 5 dimensions"):
        export.verify(linear, tmp_path / "deep.tflite")
    path = file(tmp_path / "file.tflite")
    assert exported.find_problems(exported.read_structure(path)) == []
    for operator in ("CUSTOM FlexErf", "VAR_HANDLE"):
        structure = exported.Structure(frozenset({"ADD", operator}), 4, 2)
        monkeypatch.setattr(verification, "read_structure", lambda _, made=structure: made)
        with pytest.raises(export.VerificationError, match=rf"\({operator}\)"):
            export.verify(linear, path)


def test_a_file_that_is_none_or_is_not_there_is_one_error(tmp_path: Path, linear: keras.Model) -> None:
    path = tmp_path / "none.tflite"
    for content in (b"", b"TFL3", b"no file at all, but long enough", b"\x10\0\0\0TFL3" + b"\0" * 64):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="none.tflite is not a LiteRT file"):
            export.verify(linear, path)
    os.mkfifo(tmp_path / "pipe.tflite")
    calls: list[Callable[[Path], Any]] = [export.runner, lambda path: export.verify(linear, path)]
    for call in calls:
        with pytest.raises(ValueError, match="pipe.tflite is neither"):
            call(tmp_path / "pipe.tflite")
    with pytest.raises(FileNotFoundError, match=r"nothing.tflite"):
        export.verify(linear, tmp_path / "nothing.tflite")
    for threads in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match="threads must be"):
            export.verify(linear, file(path), threads=threads)


def test_a_file_that_is_cut_off_is_one_error(tmp_path: Path) -> None:
    model, path = built(num_layers=1), tmp_path / "cut.tflite"
    export.tflite(model, path, quantize="none")
    content = path.read_bytes()
    content = content[: content.index(b"PK\x03\x04")]  # without the archive of texts at its end
    for share in (0.0, 0.001, 0.01, 0.1, 0.5, 0.999):
        path.write_bytes(content[: max(8, int(share * len(content)))])
        with pytest.raises(ValueError, match="cut.tflite is not a LiteRT file that can be"):
            export.verify(model, path)


def test_a_runner_takes_only_images_of_the_files_type_and_shape(tmp_path: Path) -> None:
    for taken, kind, wrong in (
        ("uint8", "uint8 pixels", [np.zeros((1, 2, 2, 3), np.float32), np.full((1, 2, 2, 3), 200, np.int32)]),
        (
            "float32",
            "prepared images, floats,",
            [
                *(np.zeros((1, 2, 2, 3), dtype) for dtype in (np.uint8, np.int64)),
                *(np.zeros(shape, np.float32) for shape in ((1, 2, 3), (1, 2, 2, 1), (1, 3, 2, 3), (1, 2, 2, 3, 1))),
                np.array("photo.jpg"),
            ],
        ),
    ):
        ops = Operators(Builder())
        image = ops.builder.input("image", (None, 2, 2, 3), dtype=taken)
        ops.builder.signature({"image": image}, {"logits": ops.reshape(image, (None, 12), "flat")})
        ops.builder.write(tmp_path / "file.tflite")
        run = export.runner(tmp_path / "file.tflite")
        for given in wrong:
            with pytest.raises(ValueError, match=rf"takes {kind} of shape \(batch, 2, 2, 3\). Received: {given.dtype}"):
                run(given)
        with pytest.raises(ValueError, match="at least one image"):
            run(np.zeros((0, 2, 2, 3), taken))
        assert run(np.ones((3, 2, 2, 3), taken)).shape == (3, 12)


@pytest.mark.full
def test_a_mutated_file_is_one_error_or_none(tmp_path: Path) -> None:
    path, random = tmp_path / "mutated.tflite", np.random.default_rng(0)
    content = file(path, bias=np.ones(5, np.float32)).read_bytes()
    read = 0
    for _ in range(1000):
        mutated = np.frombuffer(content, np.uint8).copy()
        mutated[random.integers(8, len(content), 3)] = random.choice([0, 1, 127, 128, 255], 3)
        path.write_bytes(mutated.tobytes())
        with contextlib.suppress(ValueError):
            exported.read_structure(path)
            read += 1
    assert 0 < read < 1000


def test_a_file_that_fails_while_it_runs_is_one_error(tmp_path: Path) -> None:
    ops = Operators(Builder())
    image = ops.builder.input("image", (None, 2, 2, 3))
    ops.builder.signature({"image": image}, {"logits": ops.reshape(image, (1, 12), "flat")})
    ops.builder.write(tmp_path / "file.tflite")
    with pytest.raises(ValueError, match=r"file\.tflite cannot be run: "):
        export.runner(tmp_path / "file.tflite")(np.zeros((2, 2, 2, 3), np.float32))


def test_a_file_of_another_size_says_how_to_compare_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"takes images of 2x2 pixels and 3 channels.*model.resized\(\(2, 2\)\)"):
        export.verify(built(num_layers=1), file(tmp_path / "file.tflite"), least_cosine=-1)


# ---- SavedModels, of which test_saved_model.py has more


def test_a_saved_model_of_kerass_own_is_compared_too(tmp_path: Path, linear: keras.Model) -> None:
    linear.export(tmp_path / "1", verbose=False)
    report = export.verify(linear, tmp_path / "1")
    assert (report.images, report.agreement, report.threads) == (samples.NUM_SAMPLES, 1.0, None)
    assert report.files_error is None and report.max_error < 1e-6


def test_a_folder_that_cannot_be_run_says_why(tmp_path: Path, linear: keras.Model) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is not a SavedModel that can be loaded: "):
        export.verify(linear, tmp_path / "empty")
    tf.saved_model.save(tf.Module(), str(tmp_path / "bare"))
    with pytest.raises(ValueError, match=r"bare has no signature 'float_images' or 'serving_default'.*Received: \[\]"):
        export.verify(linear, tmp_path / "bare")


# ---- images


def test_images_that_cannot_be_compared_are_one_error(tmp_path: Path) -> None:
    for images, said in (
        (np.zeros((2, 16, 16, 3), np.float32), r"shape \(2, 16, 16, 3\)"),
        (np.zeros((0, 32, 32, 3), np.float32), r"shape \(0, 32, 32, 3\)"),
        (np.full((2, 32, 32, 3), np.nan, np.float32), "NaN or infinity in 2 of 2"),
        (np.full((2, 32, 32, 3), 200.0, np.float32), "floats from 200 to 200"),
        ([], "an empty list"),
    ):
        with pytest.raises(ValueError, match=said):
            samples.prepared_images(built(num_layers=1), images, "images")

    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    with pytest.raises(ValueError, match="Own with input shape None"):
        export.verify(Own(), file(tmp_path / "file.tflite"))


def test_pixels_are_prepared_and_prepared_images_are_taken_as_they_are() -> None:
    model = built(num_layers=1)
    pixels = samples.pixels(model.config, 2, size=(40, 50))
    np.testing.assert_array_equal(samples.prepared_images(model, pixels, "images"), model.preprocess(pixels))
    images = prepared(model.config)
    assert samples.prepared_images(model, images, "images") is images
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        received = samples.prepared_images(model, keras.ops.cast(images, dtype), "images")
        assert received.dtype == np.float32
        np.testing.assert_allclose(received, images, atol=2**-8)  # bfloat16 has 8 bits


def test_built_in_images_are_what_preprocess_makes_of_their_pixels_in_every_size() -> None:
    for preprocessing in (Preprocessing(), Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))):
        model = built(num_layers=1, preprocessing=preprocessing)
        pixels = samples.pixels(model.config, 5)
        assert (pixels.dtype, pixels.shape) == (np.uint8, (5, 32, 32, 3))
        np.testing.assert_array_equal(samples.images(model.config, 5), model.preprocess(pixels))
    for size, channels in (((1, 1), 1), ((3, 200), 3), ((480, 640), 4)):
        assert samples.draw((*size, channels), 4).shape == (4, *size, channels)


CUTS = {
    "resize": "crop",
    "crop_fraction": 0.875,
    "interpolation": "bicubic",
    "antialias": True,
    "mean": [0.3, 0.4, 0.5],
}


@pytest.mark.parametrize("source_size", [None, (48, 40)])
@pytest.mark.parametrize("stated", [{}, {"bits": 12}, {"range": (0, 4095)}])
def test_a_file_of_pixels_is_compared_on_the_pixels_that_the_model_prepares(
    stated: dict[str, Any], source_size: Any, tmp_path: Path
) -> None:
    model, path = built(num_layers=1, num_classes=20, preprocessing=CUTS | stated), tmp_path / "pixels.tflite"
    levels = np.random.default_rng(0).integers(0, 16, (8, 60, 40, 3))
    values = (273 * levels).astype(np.uint16) if stated else (17 * levels).astype(np.uint8)
    for images in (None, values, list(values), model.preprocess(values)):
        options = {"quantize": "none", "input_dtype": "uint8", "source_size": source_size}
        report = export.tflite(model, path, **options, verify=images)
        # Pixels are rounded to whole numbers, which a file without a size of its own shows.
        assert report.sqnr > (30 if source_size is None else 60)
    for own in (model.config.size, model.config.size[0]):
        with pytest.raises(ValueError, match="must not be the model's own image_size"):
            export.tflite(model, tmp_path / "own.tflite", input_dtype="uint8", source_size=own)
    other = model.with_config(model.config.replace(preprocessing={**CUTS, **stated, "mean": [0.5, 0.4, 0.3]}))
    with pytest.raises(export.VerificationError):
        export.verify(other, path, values)


def test_built_in_images_are_always_the_same_and_unlike_each_other() -> None:
    first, again = (samples.images(tiny(), 12) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[:3], samples.images(tiny(), 3))
    flat = first.reshape(12, -1)
    centred = flat - flat.mean(axis=1, keepdims=True)
    alike = centred @ centred.T / np.outer(*2 * [np.linalg.norm(centred, axis=1)])
    assert np.abs(alike[~np.eye(12, dtype=bool)]).max() < 0.95
    spans = flat.max(axis=1) - flat.min(axis=1)
    assert spans.max() == pytest.approx(2, abs=0.02)  # one has every value from -1 to 1
    assert spans.min() < 0.5


WRITTEN = {"none": "float32", "float16": "float16", "dynamic": "int8"}  # modes that need no calibration


# ---- files with the right directions and wrong numbers


def scaled(model: VisionTransformer, layer: str, factor: float) -> VisionTransformer:
    """Return a copy of a model whose layer has weights that are so many times as large."""
    other = model.with_config(model.config)
    weights = [np.asarray(weight) * factor for weight in other.get_layer(layer).get_weights()]
    other.get_layer(layer).set_weights(weights)
    return other


@pytest.mark.parametrize(
    ("mode", "factor"), full_except([("dynamic", 2)], [*itertools.product(WRITTEN, (0.5, 0.9, 2))])
)
def test_a_factor_of_the_logits_is_seen(mode: str, factor: float, tmp_path: Path) -> None:
    model = zoo.load("digits")
    path = tmp_path / "digits.tflite"
    export.tflite(model, path, quantize=mode)
    message = f"wanted sqnr >= .* dB and scale >= .*cosine (1.00|0.99).*, scale {1 / factor:.1f}"
    with pytest.raises(export.VerificationError, match=message):
        export.verify(scaled(model, "head", factor), path, digits.load().test_images[:20])
    assert export.verify(model, path, digits.load().test_images[:20]).agreement == 1.0


def test_a_factor_of_a_saved_models_logits_is_seen(saved_digits: Any) -> None:
    with pytest.raises(export.VerificationError, match="wanted .*sqnr >= 95 dB and scale >= 0.999"):
        export.verify(scaled(saved_digits.model, "head", 3), saved_digits.folder)


@pytest.mark.full
def test_a_depth_of_twice_the_distance_is_seen(tmp_path: Path) -> None:
    backbone = built(num_classes=0, num_layers=4)
    head = {"kind": "dpt", "output": "depth", "blocks": (0, 1, 2, 3), "activation": "sigmoid"}
    sizes: dict[str, Any] = {"widths": (4, 6, 8, 12), "fusion_width": 8}
    near, far = (dense.DenseModel(backbone, dense.MapConfig(**head, **sizes, max_depth=most)) for most in (20, 40))
    far.set_weights(near.get_weights())
    path = tmp_path / "depth.tflite"
    assert export.tflite(far, path, quantize="none").relative_error < 1e-4
    with pytest.raises(export.VerificationError, match=r"wanted agreement >= 0.99 and sqnr .*factor of 1.25 0.00%"):
        export.verify(near, path)


def test_a_value_below_the_mode_is_accepted_by_the_cosine_that_the_error_names(
    tmp_path: Path, linear: keras.Model
) -> None:
    path = file(tmp_path / "file.tflite", 0.8 * KERNEL)
    with pytest.raises(export.VerificationError, match=r"accept it with least_cosine=0\.98\b"):
        export.verify(linear, path, mode="none")
    report = export.verify(linear, path, mode="none", least_cosine=0.98)
    assert report.difference_scale == pytest.approx(0.8) and report.sqnr == pytest.approx(-20 * math.log10(0.2))


@pytest.mark.parametrize("accelerator", [None, "npu"])
def test_products_in_float16_have_room(accelerator: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    want = np.random.default_rng(0).normal(size=(8, 5))
    got = want * 1.01  # an SQNR of 40 dB
    checked = functools.partial(
        verification.check_thresholds, compared({"logits": want}, {"logits": got}), load_mode("none"), has_classes=True
    )
    with pytest.raises(export.VerificationError, match="sqnr >= 95 dB and scale >= 0.999"):
        checked()
    if accelerator is None:  # the model's own products, on a GPU
        monkeypatch.setattr(keras.distribution, "list_devices", lambda: ["cpu:0", "gpu:0"])
    assert checked(is_rounded=accelerator is not None).sqnr == pytest.approx(40)


# ---- models that give the same for all images


@pytest.mark.parametrize("mode", full_except(["dynamic"], ["none", "dynamic"]))
def test_a_new_head_of_zeros_is_not_called_equal(mode: str, tmp_path: Path) -> None:
    model, path = zoo.load("digits", num_classes=3), tmp_path / "new.tflite"
    report = export.tflite(model, path, quantize=mode)
    assert (report.cosine, report.sqnr, report.agreement, report.difference_cosine) == (None, None, None, None)
    assert "not compared: the model gives the same output for all of them" in str(report)
    assert not {"cosine 1", "SQNR", "100.00%"} & set(str(report).split(",")) and "inf" not in str(report)
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["agreement"] is None
    model.get_layer("head").bias.assign([1.0, 2.0, 3.0])  # the same for all images too
    with pytest.raises(export.VerificationError, match="differs from the model: wanted cosine"):
        export.verify(model, path)
    assert export.tflite(model, path, quantize=mode).is_constant


@pytest.mark.full
def test_the_file_of_a_trained_head_is_not_that_of_zeros(tmp_path: Path) -> None:
    model, path = zoo.load("digits", num_classes=3), tmp_path / "trained.tflite"
    head = model.get_layer("head")
    head.set_weights([np.random.default_rng(0).normal(size=weight.shape) for weight in head.get_weights()])
    export.tflite(model, path)
    with pytest.raises(export.VerificationError, match="differs from the model"):
        export.verify(zoo.load("digits", num_classes=3), path)


# ---- labels


def test_labels_are_numbers_or_names_of_the_models_classes(tmp_path: Path) -> None:
    names = [f"digit {number}" for number in range(9)] + ["digit 0"]
    model = zoo.load("digits")
    model = model.with_config(model.config.replace(labels=tuple(names)))
    data, path = digits.load(), tmp_path / "digits.tflite"
    shown = np.flatnonzero(data.test_labels % 9)[:8]  # neither of the two digits 0
    images, numbers = data.test_images[shown], data.test_labels[shown]
    export.tflite(model, path)
    assert export.verify(model, path, images, labels=numbers).accuracy == 1
    assert export.verify(model, path, images, labels=[names[number] for number in numbers]).accuracy == 1
    for wrong, said in (
        (["cat"] * 8, r"names of the model's classes: digit 1, .*Received: 'cat'"),
        (["digit 0"] * 8, "Received: 'digit 0'"),  # of two classes
        (np.full(8, np.nan), r"integers \(n,\).*float64"),
        (numbers.astype(float), "float64"),
        (-numbers.astype(int) - 1, r"is outside 0\.\.9"),
        (np.full(8, 10), r"is outside 0\.\.9.*numbered from 0"),
        (np.eye(10)[numbers], r"float64 \(8, 10\)"),
        (numbers > 4, "bool"),
        (3, r"\(\)"),
    ):
        with pytest.raises(ValueError, match=said):
            export.verify(model, path, images, labels=wrong)
    features = zoo.load("digits", num_classes=0)
    export.tflite(features, path)
    with pytest.raises(ValueError, match="0 classes"):
        export.verify(features, path, images, labels=numbers)


# ---- files of another model


@pytest.mark.parametrize(
    ("seed", "mode"),
    full_except([(4, "dynamic")], [*zip(range(3), itertools.cycle(["none", "dynamic", "float16"])), (4, "dynamic")]),
)
def test_a_file_without_an_mlp_is_refused_with_and_without_its_mode(seed: int, mode: str, tmp_path: Path) -> None:
    shown = np.random.default_rng(seed + 100).uniform(-1, 1, (20, 32, 32, 3)).astype(np.float32)
    path, plan = tmp_path / "file.tflite", FilePlan(storage=STORAGES[WRITTEN[mode]])
    # With random weights, and with weights that keep the variance of activations.
    models = [randomised(VisionTransformer(tiny()), seed)]
    models.append(standardise(VisionTransformer(tiny()), np.random.default_rng(seed)))
    for model in models:
        other = VisionTransformer(model.config)
        other.set_weights(model.get_weights())
        for weight in other.get_layer("block_1").mlp.weights:
            weight.assign(np.zeros(weight.shape))
        build_file(other, plan).write(path)
        for given in (mode, None):
            with pytest.raises(export.VerificationError, match="differs from the model"):
                export.verify(model, path, shown, mode=given)
        build_file(model, plan).write(path)
        assert export.verify(model, path, shown).mode == mode


def few_digits(count: int) -> tuple[VisionTransformer, np.ndarray, np.ndarray]:
    """Return the digits model with a head of the first classes, and prepared images of these for training and test."""
    model = zoo.load("digits")
    head = model.get_layer("head").get_weights()
    few = zoo.load("digits", num_classes=count)
    few.get_layer("head").set_weights([weight[..., :count] for weight in head])
    data = digits.load()
    calibration = data.train_images[data.train_labels < count][:64]
    shown = data.test_images[data.test_labels < count][:40]
    return few, few.preprocess(calibration), few.preprocess(shown)


@pytest.mark.full
@pytest.mark.parametrize(("count", "mode"), [(2, "dynamic"), (2, "int4"), (3, "int8"), (4, "int16x8")])
def test_honest_files_of_few_classes_are_accepted_in_every_mode(count: int, mode: str, tmp_path: Path) -> None:
    model, calibration, shown = few_digits(count)
    given: dict[str, Any] = {"calibration": calibration} if load_mode(mode).needs_calibration else {}
    path = tmp_path / "few.tflite"
    assert export.tflite(model, path, quantize=mode, verify=shown, **given).agreement == 1.0
    assert export.verify(model, path, shown).mode == mode
