"""LiteRT files give the model's outputs in every mode; a failed export leaves no file and a clear error."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import VisionTransformer, export, zoo
from keras_vit import digits as digits_data
from keras_vit._util import files
from keras_vit.export import exported, modes, samples
from keras_vit.export.exported import load_exported
from keras_vit.model.config import Preprocessing
from litert_graph import read_labels
from tiny_models import VARIANTS, built, prepared

TFLITE = importlib.import_module("keras_vit.export._tflite")
# Largest error of a logit, relative to the largest logit. float32: another order of additions, measured 1e-7 to 2e-6,
# a hundredth of the error of a wrong activation (2e-4). float16: weights have 11 bits, 2.4e-4 of each, and errors of
# many weights partly cancel. dynamic: weights and activations have 8 bits (4e-3 of a channel's largest).
WORST_ERROR = {"none": 1e-5, "float16": 5e-3, "dynamic": 0.15}
WORST_COSINE = {"none": 0.999999, "float16": 0.99999, "dynamic": 0.99}
SMALL = {"num_layers": 1}


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    """Return a model of one block with random weights."""
    return built(**SMALL)


@pytest.fixture(scope="module")
def digits() -> VisionTransformer:
    """Return a trained model."""
    return zoo.load("digits")


def nothing_but(folder: Path, *expected: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(expected)


# ---- outputs


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *[
            ("none", kind)
            for kind in ("pure", "hybrid", "gap", "map", "registers", "unpooled", "headless", "distilled")
        ],
        *[("float16", kind) for kind in ("pure", "hybrid")],
        *[("dynamic", kind) for kind in ("pure", "hybrid", "gap", "map")],
    ],
)
def test_a_file_gives_the_models_logits(tmp_path: Path, kind: str, mode: str) -> None:
    model = built(**SMALL, **VARIANTS[kind])
    images = prepared(model.config, batch=4)
    path = tmp_path / "tiny.tflite"
    # Thresholds are for trained models; the classes of random ones are close to each other.
    report = export.tflite(model, path, quantize=mode, verify=images, least_cosine=0.9, least_agreement=0)
    received, want = export.runner(path)(images), np.asarray(model(images))
    assert received.shape == want.shape
    error = float(np.abs(received - want).max() / np.abs(want).max())
    assert error <= WORST_ERROR[mode]
    assert report.cosine >= WORST_COSINE[mode]
    assert (report.images, report.bytes, report.mode) == (4, path.stat().st_size, mode)
    assert report.max_error == pytest.approx(error, rel=1e-3, abs=1e-6)
    assert exported.find_problems(exported.read_structure(path)) == []
    assert nothing_but(tmp_path, "tiny.tflite")


def test_pixels_quantize_as_well_as_prepared_images(tmp_path: Path, digits: VisionTransformer) -> None:
    images = digits_data.load().test_images[:100]
    path = tmp_path / "digits.tflite"
    prepared_in = export.tflite(digits, path, verify=images).sqnr
    pixels_in = export.tflite(digits, path, input_dtype="uint8", source_size=8, verify=images).sqnr
    assert abs(pixels_in - prepared_in) < 1  # dB; 0.1 measured, and 4.3 with pixels that are not centred


def test_the_report_says_what_the_export_took(tmp_path: Path, model: VisionTransformer) -> None:
    report = export.tflite(model, tmp_path / "out.tflite", threads=1)
    assert report.path == tmp_path / "out.tflite"
    assert (report.mode, report.threads, report.preprocess_error) == ("dynamic", 1, None)
    assert report.seconds is not None
    assert report.seconds > 0
    assert report.peak_bytes is None or report.peak_bytes < 2**30  # a model of 10,000 weights


def test_quantized_files_are_smaller(tmp_path: Path) -> None:
    model = built(hidden_size=256, mlp_dim=1024, **SMALL)
    sizes = {name: export.tflite(model, tmp_path / name, quantize=name).bytes for name in WORST_ERROR}
    for mode, size in sizes.items():
        least, most = exported.expected_bytes(model, modes.load_mode(mode), (32, 32))
        assert least <= size <= most
    # Two kernels of the last block are float16 in dynamic files: a large share of these small models.
    assert sizes["dynamic"] < 0.62 * sizes["float16"] < 0.36 * sizes["none"]


@pytest.mark.parametrize("batch", [1, 3, None])
def test_the_batch_is_the_callers_to_choose(batch: int | None, tmp_path: Path, model: VisionTransformer) -> None:
    path = tmp_path / "out.tflite"
    export.tflite(model, path, quantize="none", batch=batch)
    images = prepared(model.config, batch=4)
    np.testing.assert_allclose(export.runner(path)(images), model.predict_on_batch(images), atol=1e-4)


def test_another_resolution_is_a_word(tmp_path: Path, model: VisionTransformer) -> None:
    path = tmp_path / "out.tflite"
    export.tflite(model, path, quantize="none", image_size=(24, 48))
    larger = model.resized((24, 48))
    images = prepared(larger.config)
    np.testing.assert_allclose(export.runner(path)(images), larger.predict_on_batch(images), atol=1e-4)


def test_probabilities_are_those_of_the_logits(tmp_path: Path, model: VisionTransformer) -> None:
    path = tmp_path / "out.tflite"
    report = export.tflite(model, path, quantize="none", output="probabilities")
    images = prepared(model.config)
    received = export.runner(path)(images)
    logits = np.asarray(model(images), np.float64)
    np.testing.assert_allclose(received, np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), atol=1e-5)
    assert report.agreement == 1


@pytest.mark.parametrize("kind", ["pure", "registers"])
def test_the_class_tokens_attention_is_a_second_output(kind: str, tmp_path: Path) -> None:
    model = built(**VARIANTS[kind])
    path = tmp_path / "out.tflite"
    report = export.tflite(model, path, quantize="none", attention=True)
    images = prepared(model.config, batch=1)
    outputs = load_exported(path).call(images)
    expected = np.asarray(model.attention_maps(images)[-1])[:, :, 0, model.config.num_prefix_tokens :]
    assert set(outputs) == {"logits", "attention"}
    np.testing.assert_allclose(outputs["attention"], expected, atol=1e-5)
    assert report.cosine > 0.99999


@pytest.mark.parametrize("mode", ["none", "dynamic"])
@pytest.mark.parametrize("preprocessing", [Preprocessing(), Preprocessing(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1))])
def test_pixels_are_scaled_inside(preprocessing: Preprocessing, mode: str, tmp_path: Path) -> None:
    model = built(**SMALL, preprocessing=preprocessing)
    path = tmp_path / "out.tflite"
    export.tflite(model, path, quantize=mode, input_dtype="uint8", least_agreement=0)
    pixels = samples.pixels(model.config, 3)
    received, want = export.runner(path)(pixels), model.predict_on_batch(model.preprocess(pixels))
    assert np.abs(received - want).max() <= WORST_ERROR[mode] * np.abs(want).max()


@pytest.mark.parametrize(
    ("resize", "preprocessing", "worst"),
    [
        ("exact", Preprocessing(), 0.01),  # float32 against float32, of 255
        ("exact", Preprocessing(interpolation="bicubic", antialias=True, resize="crop", crop_fraction=0.9), 0.01),
        ("builtin", Preprocessing(), 0.01),
        ("builtin", Preprocessing(antialias=True), 255),
    ],
)
def test_a_files_own_resize_is_measured(
    resize: str, preprocessing: Preprocessing, worst: float, tmp_path: Path
) -> None:
    model = built(**SMALL, preprocessing=preprocessing)
    report = export.tflite(
        model,
        tmp_path / "out.tflite",
        quantize="none",
        input_dtype="uint8",
        source_size=(60, 80),
        resize=resize,
        least_cosine=0.9999 if worst < 1 else -1,
        least_agreement=0,
    )
    assert report.preprocess_error is not None
    assert report.preprocess_error <= worst
    assert (worst == 255) == (report.preprocess_error > 20)  # noise and edges, shrunk by half without antialias
    assert nothing_but(tmp_path, "out.tflite")


@pytest.mark.parametrize("kind", ["pixels", "prepared"])
def test_a_file_of_pixels_is_compared_on_whatever_images_there_are(
    kind: str, tmp_path: Path, model: VisionTransformer
) -> None:
    pixels = samples.pixels(model.config, 3, size=(50, 40))
    images = pixels if kind == "pixels" else model.preprocess(pixels)
    path = tmp_path / "out.tflite"
    report = export.tflite(model, path, quantize="none", input_dtype="uint8", source_size=64, verify=images)
    assert (report.images, report.agreement) == (3, 1.0)


def test_a_trained_model_keeps_its_answers(tmp_path: Path, digits: VisionTransformer) -> None:
    from keras_vit.digits import load

    data = load()
    report = export.tflite(digits, tmp_path / "digits.tflite", verify=data.test_images)
    # The requirement for 8-bit kernels: the same class for 99.5 % of the 360 images.
    assert report.agreement >= 0.995
    assert report.cosine >= 0.999


@pytest.mark.parametrize(("mode", "dtype"), [("int8", "float32"), ("int8", "uint8"), ("int4", "float32")])
def test_calibrated_files_are_near(mode: str, dtype: str, tmp_path: Path, digits: VisionTransformer) -> None:
    from keras_vit.digits import load

    images = load().train_images[:32]
    path = tmp_path / "out.tflite"
    report = export.tflite(digits, path, quantize=mode, calibration=images, input_dtype=dtype, verify=images)
    assert report.mode == mode
    assert b"M001" in path.read_bytes()
    assert len(read_labels(path)) == 10
    assert nothing_but(tmp_path, "out.tflite")


def test_without_other_images_a_calibrated_file_is_compared_on_the_calibrations(
    tmp_path: Path, digits: VisionTransformer
) -> None:
    from keras_vit.digits import load

    images = load().test_images[:64]
    report = export.tflite(digits, tmp_path / "out.tflite", quantize="int8", calibration=images)
    assert (report.images, report.calibrated_on) == (64, True)
    assert "on 64 images (those of the calibration)" in str(report)


def test_outliers_are_smoothed_without_calibration_too(tmp_path: Path) -> None:
    model = built(num_layers=2)
    gamma = model.get_layer("block_1").norm1.gamma
    factors = np.ones(gamma.shape, np.float32)
    factors[3] = 300
    gamma.assign(factors)
    images = samples.images(model.config, 16)
    dynamic = (files.data_folder("converters") / "exports" / "dynamic.toml").read_text(encoding="utf-8")
    plain = tmp_path / "plain.toml"
    plain.write_text(dynamic.partition("[smoothing]")[0], encoding="utf-8")
    reports = [
        export.tflite(
            model,
            tmp_path / "out.tflite",
            quantize=mode,
            calibration=given,
            verify=images,
            least_cosine=0,
            least_agreement=0,
        )
        for mode, given in ((str(plain), None), ("dynamic", None), ("dynamic", images))
    ]
    assert min(report.sqnr for report in reports[1:]) > reports[0].sqnr + 2


# ---- metadata


def test_labels_and_preparation_lie_in_the_file(tmp_path: Path, digits: VisionTransformer) -> None:
    path = tmp_path / "digits.tflite"
    export.tflite(digits, path)
    # Without labels the classes have no names, and an app shows their numbers.
    assert len(read_labels(path)) == (10 if digits.config.labels else 0)
    assert b"M001" in path.read_bytes()


def test_labels_of_ones_own(tmp_path: Path, model: VisionTransformer) -> None:
    path = tmp_path / "out.tflite"
    export.tflite(model, path)
    assert read_labels(path) == []
    export.tflite(model, path, labels=["a", "b", "c", "d", "e"])
    assert read_labels(path) == ["a", "b", "c", "d", "e"]
    with pytest.raises(ValueError, match="2 for 5 classes"):
        export.tflite(model, path, labels=["a", "b"])


def test_a_label_is_a_line_whatever_is_in_it(tmp_path: Path, model: VisionTransformer) -> None:
    path = tmp_path / "out.tflite"
    export.tflite(model, path, labels=["a\nb", "ü\u2028 x\r\n", "", "猫", " d "])
    assert read_labels(path) == ["a b", "ü x", "", "猫", "d"]


def test_labels_may_be_long(tmp_path: Path) -> None:
    model = built(num_classes=1000, **SMALL)
    names = [f"{number} " + "x" * 600 for number in range(1000)]
    path = tmp_path / "out.tflite"
    export.tflite(model, path, quantize="none", labels=names)
    assert read_labels(path) == names


@pytest.mark.parametrize("channels", [2, 4])
def test_images_of_other_channels_than_colour_are_images(channels: int, tmp_path: Path) -> None:
    model = built(num_channels=channels, **SMALL)
    pixels = samples.pixels(model.config, 2, size=(50, 40))
    options: dict[str, Any] = {"input_dtype": "uint8", "source_size": (50, 40), "verify": pixels}
    assert export.tflite(model, tmp_path / "out.tflite", quantize="none", **options).cosine > 0.99999


# ---- errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantize": "int3"}, r"quantize must be one of \[.*'dynamic'.*'float16'.*'none'.*Received: 'int3'"),
        ({"quantize": ""}, "Received: ''"),
        ({"quantize": "Dynamic"}, "the nearest is 'dynamic'"),
        ({"quantize": "mine.toml"}, "There is no file mine.toml"),
        ({"quantize": None}, r"quantize must be one of \[.*Received: None"),
        ({"input_dtype": "int8"}, r"input_dtype must be one of \['float32', 'uint8'\]. Received: 'int8'"),
        ({"resize": "best"}, r"resize must be one of \['exact', 'builtin'\]. Received: 'best'"),
        ({"output": "classes"}, "needs a model with a class for every pixel"),
        ({"batch": 0}, "batch must be an integer >= 1. Received: 0"),
        ({"batch": 0, "output": "x"}, r"batch must be an integer >= 1.*; output must be one of"),
        ({"threads": 0}, "threads must be an integer >= 1. Received: 0"),
        (
            {"source_size": 64},
            "source_size needs input_dtype='uint8' .*only pixels are resized. Received: 'float32'",
        ),
        ({"source_size": (0, 3), "input_dtype": "uint8"}, "source_size"),
        ({"image_size": 3}, "smaller than one patch"),
        ({"least_cosine": 5.0}, r"least_cosine must be in \[-1, 1\]. Received: 5.0"),
        ({"least_cosine": float("nan")}, r"least_cosine must be in \[-1, 1\]. Received: nan"),
        ({"least_agreement": -0.1}, r"least_agreement must be in \[0, 1\]. Received: -0.1"),
        ({"least_agreement": "all"}, "least_agreement must be .*a number. Received: 'all'"),
        ({"quantize": "int8"}, "quantize='int8' needs calibration images.*Received: None"),
        ({"quantize": "int8", "calibration": []}, "an empty list"),
        ({"quantize": "int8", "calibration": np.zeros((0, 32, 32, 3), np.float32)}, r"shape \(0, 32, 32, 3\)"),
        ({"quantize": "int8", "calibration": np.zeros((4, 8, 8, 3), np.float32)}, r"shape \(4, 8, 8, 3\)"),
        ({"quantize": "int8", "calibration": np.full((4, 32, 32, 3), np.nan, np.float32)}, "NaN or infinity in 4 of 4"),
        ({"quantize": "int8", "calibration": np.full((1, 32, 32, 3), 255, np.float32)}, "floats from 255 to 255"),
        ({"verify": np.full((4, 32, 32, 3), np.inf, np.float32)}, "verify must be finite"),
        ({"labels": "imagenet"}, r"labels must be one of \['digits'"),
        ({"labels": range(5)}, "the names of the classes, all strings. Received: 0"),
        ({"labels": 5}, "the names of the classes, all strings. Received: 5"),
        ({"labels": []}, "0 for 5 classes"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_said_before_any_work(
    options: dict[str, Any], said: str, tmp_path: Path, model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TFLITE, "build_file", None)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        export.tflite(model, tmp_path / "out.tflite", **options)
    assert nothing_but(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantize": "int8", "threads": 0}, ("threads must be", "quantize='int8' needs calibration images")),
        ({"quantize": "nomode", "threads": 0}, ("threads must be", "quantize must be one of", "Received: 'nomode'")),
        (
            {"source_size": "x", "resize": "y", "image_size": "abc", "labels": "nolist"},
            (
                "resize must be one of",
                "source_size must be an integer",
                "source_size needs",
                "labels must be",
                "image_size must be",
            ),
        ),
        (
            {"labels": ["a"], "image_size": 3, "least_cosine": 5.0},
            (
                "least_cosine must be",
                "one label per class: 1 for 5 classes",
                "smaller than one patch",
            ),
        ),
        (
            {"quantize": "int3", "labels": ["a"], "image_size": 0},
            ("quantize must be one of", "one label per class", "image_size must be"),
        ),
    ],
    ids=str,
)
def test_everything_that_is_wrong_is_one_message(
    options: dict[str, Any], said: tuple[str, ...], tmp_path: Path, model: VisionTransformer
) -> None:
    with pytest.raises(ValueError, match="^tflite: " + ".*".join(said)):
        export.tflite(model, tmp_path / "out.tflite", **options)
    assert nothing_but(tmp_path)


def test_options_are_checked_once(tmp_path: Path, model: VisionTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    options, calls = importlib.import_module("keras_vit.export.litert.options").Options, []
    problems = options.problems
    monkeypatch.setattr(options, "problems", lambda self: calls.append(self) or problems(self))
    export.tflite(model, tmp_path / "out.tflite", calibration=samples.images(model.config, 2))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            "headless",
            {"output": "probabilities"},
            "output='probabilities' needs a head. Received: a model of num_classes=0",
        ),
        ("headless", {"labels": ["a"]}, "labels need a head. Received: a model of num_classes=0"),
        (
            "gap",
            {"attention": True},
            "attention=True needs attention and a class token. Received: a model without class token",
        ),
    ],
)
def test_what_a_model_cannot_give_is_said(kind: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        export.tflite(built(**SMALL, **VARIANTS[kind]), tmp_path / "out.tflite", **options)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, model: VisionTransformer) -> None:
    with pytest.raises(IsADirectoryError, match="cannot be written over a folder"):
        export.tflite(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no folder for the .tflite file: '.*missing'"):
        export.tflite(model, tmp_path / "missing" / "out.tflite")
    assert nothing_but(tmp_path)


# ---- complete or absent


def fail_with(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("stage", "mode"),
    [
        ("build_file", "dynamic"),
        ("find_outliers", "dynamic"),
        ("quantize_file", "int8"),
        ("verify", "none"),
    ],
)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "The disk is full; nothing was written to: '.*out.tflite'"),
        (OSError(13, "Permission denied"), "Permission denied"),
        (KeyboardInterrupt("stop"), "stop"),
        (export.VerificationError("no"), "no"),
    ],
    ids=str,
)
def test_whatever_happens_yesterdays_file_stays(
    stage: str,
    mode: str,
    error: BaseException,
    said: str,
    tmp_path: Path,
    model: VisionTransformer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "out.tflite"
    path.write_bytes(b"yesterday's")
    monkeypatch.setattr(TFLITE, stage, fail_with(error))
    with pytest.raises(type(error), match=said):
        export.tflite(model, path, quantize=mode, calibration=samples.images(model.config, 2))
    assert path.read_bytes() == b"yesterday's"
    assert nothing_but(tmp_path, "out.tflite")


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(
    tmp_path: Path, model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = importlib.import_module("keras_vit.export.litert.builder")
    write, calls = builder._write_at, []

    def fill(file: Any, *arguments: Any, **options: Any) -> None:
        calls.append(file)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        write(file, *arguments, **options)

    monkeypatch.setattr(builder, "_write_at", fill)
    with pytest.raises(OSError, match="The disk is full"):
        export.tflite(model, tmp_path / "out.tflite")
    assert len(calls) == 6
    assert nothing_but(tmp_path)


def test_a_new_file_takes_the_place_of_the_old_one(tmp_path: Path, model: VisionTransformer) -> None:
    path = tmp_path / "out.tflite"
    path.write_bytes(b"yesterday's")
    report = export.tflite(model, path)
    assert path.stat().st_size == report.bytes > 1000
    assert path.stat().st_mode & 0o444 == 0o444  # an app's build may run as another user
    assert nothing_but(tmp_path, "out.tflite")


@pytest.mark.parametrize("name", ["größe 模型.tflite", "x" * 248 + ".tflite", "export", "unquantized"])
def test_a_file_may_be_called_anything(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = built(**SMALL)
    images = samples.images(model.config, 4)
    report = export.tflite(model, name, quantize="int8", calibration=images, least_cosine=0, least_agreement=0)
    assert report.path == Path(name)
    assert nothing_but(tmp_path, name)


def test_a_file_of_another_model_is_refused_and_leaves_nothing(
    tmp_path: Path, model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, other = TFLITE.build_file, built(**SMALL, num_registers=1)
    monkeypatch.setattr(TFLITE, "build_file", lambda _, options: build(other, options))
    path = tmp_path / "out.tflite"
    with pytest.raises(export.VerificationError, match="differs from the model: wanted cosine >= 0.995") as told:
        export.tflite(model, path)
    assert str(told.value).startswith(f"{path} ")  # and not the temporary path
    assert nothing_but(tmp_path)


def test_thresholds_are_the_modes_and_the_callers(tmp_path: Path, digits: VisionTransformer) -> None:
    path = tmp_path / "out.tflite"
    with pytest.raises(export.VerificationError, match="wanted cosine >= 1.0"):
        export.tflite(digits, path, least_cosine=1.0)
    assert nothing_but(tmp_path)


def test_without_the_packages_there_is_one_hint(
    tmp_path: Path, model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in ("ai_edge_litert", "ai_edge_litert.interpreter"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "keras-vit-zoo\[litert\]"'):
        export.tflite(model, tmp_path / "out.tflite")
    assert nothing_but(tmp_path)
