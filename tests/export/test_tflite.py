"""LiteRT files give the model's outputs in every mode; a failed export leaves no file and a clear error."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import VisionTransformer, digits, export, zoo
from keras_vit._util import files
from keras_vit.export import exported, modes, samples, sizes
from keras_vit.export.exported import load_exported
from keras_vit.model.config import Preprocessing
from litert_graph import read_labels
from marks import full_except
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
def trained() -> VisionTransformer:
    return zoo.load("digits")


def nothing_but(folder: Path, *expected: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(expected)


# ---- outputs


@pytest.mark.parametrize(
    ("mode", "kinds"),
    full_except(
        [("none", ("pure", "unpooled", "headless"))],
        [
            ("none", ("pure", "unpooled", "headless")),
            ("float16", ("hybrid",)),
            ("dynamic", ("hybrid", "map")),
        ],
    ),
)
def test_a_file_gives_the_models_logits(tmp_path: Path, kinds: tuple[str, ...], mode: str) -> None:
    path = tmp_path / "tiny.tflite"
    for kind in kinds:
        model = built(**SMALL, **VARIANTS[kind])
        images = prepared(model.config, batch=4)
        # Thresholds are for trained models; the classes of random ones are close to each other.
        report = export.tflite(model, path, quantize=mode, verify=images, least_cosine=0.9, least_agreement=0)
        received, want = export.runner(path)(images), np.asarray(model(images))
        assert received.shape == want.shape
        error = float(np.abs(received - want).max() / np.abs(want).max())
        assert error <= WORST_ERROR[mode], kind
        assert report.cosine >= WORST_COSINE[mode], kind
        assert (report.images, report.bytes, report.mode) == (4, path.stat().st_size, mode)
        assert report.max_error == pytest.approx(error, rel=1e-3, abs=1e-6)
        assert exported.find_problems(exported.read_structure(path)) == []
    assert nothing_but(tmp_path, "tiny.tflite")


def test_options_choose_the_batch_the_size_and_the_outputs(tmp_path: Path, model: VisionTransformer) -> None:
    path, images = tmp_path / "out.tflite", prepared(model.config, batch=4)
    for batch in (1, 3, None):
        export.tflite(model, path, quantize="none", batch=batch)
        np.testing.assert_allclose(export.runner(path)(images), model.predict_on_batch(images), atol=1e-4)

    export.tflite(model, path, quantize="none", image_size=(24, 48))
    larger = model.resized((24, 48))
    np.testing.assert_allclose(
        export.runner(path)(prepared(larger.config)), larger.predict_on_batch(prepared(larger.config)), atol=1e-4
    )

    report = export.tflite(model, path, quantize="none", output="probabilities")
    raised = np.exp(np.asarray(model(images), np.float64))
    np.testing.assert_allclose(export.runner(path)(images), raised / raised.sum(axis=1, keepdims=True), atol=1e-5)
    assert report.agreement == 1

    registers = built(**VARIANTS["registers"])
    report = export.tflite(registers, path, quantize="none", attention=True)
    outputs = load_exported(path).call(images[:1])
    expected = np.asarray(registers.attention_maps(images[:1])[-1])[:, :, 0, registers.config.num_prefix_tokens :]
    assert set(outputs) == {"logits", "attention"} and report.cosine > 0.99999
    np.testing.assert_allclose(outputs["attention"], expected, atol=1e-5)


def test_pixels_are_scaled_inside(tmp_path: Path, trained: VisionTransformer) -> None:
    path = tmp_path / "out.tflite"
    model = built(**SMALL, preprocessing=Preprocessing(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1)))
    export.tflite(model, path, quantize="none", input_dtype="uint8", least_agreement=0)
    pixels = samples.pixels(model.config, 3)
    received, want = export.runner(path)(pixels), model.predict_on_batch(model.preprocess(pixels))
    assert np.abs(received - want).max() <= WORST_ERROR["none"] * np.abs(want).max()

    images = digits.load().test_images[:100]
    prepared_in = export.tflite(trained, path, verify=images).sqnr
    pixels_in = export.tflite(trained, path, input_dtype="uint8", source_size=8, verify=images).sqnr
    assert abs(pixels_in - prepared_in) < 1  # dB; 0.1 measured, and 4.3 with pixels that are not centred


@pytest.mark.parametrize("channels", [2, 4])
def test_images_of_other_channels_than_colour_are_images(channels: int, tmp_path: Path) -> None:
    model = built(num_channels=channels, **SMALL)
    pixels = samples.pixels(model.config, 2, size=(50, 40))
    options: dict[str, Any] = {"input_dtype": "uint8", "source_size": (50, 40), "verify": pixels}
    assert export.tflite(model, tmp_path / "out.tflite", quantize="none", **options).cosine > 0.99999


@pytest.mark.parametrize(
    ("resize", "preprocessing", "worst"),
    [
        ("exact", Preprocessing(interpolation="bicubic", antialias=True, resize="crop", crop_fraction=0.9), 0.01),
        ("builtin", Preprocessing(), 0.01),  # float32 against float32, of 255
        ("builtin", Preprocessing(antialias=True), 255),
    ],
)
def test_a_files_own_resize_is_measured(
    resize: str, preprocessing: Preprocessing, worst: float, tmp_path: Path
) -> None:
    model = built(**SMALL, preprocessing=preprocessing)
    options: dict[str, Any] = {"quantize": "none", "input_dtype": "uint8", "source_size": (60, 80), "resize": resize}
    least = {"least_cosine": 0.9999 if worst < 1 else -1, "least_agreement": 0}
    report = export.tflite(model, tmp_path / "out.tflite", **options, **least)
    assert report.preprocess_error is not None and report.preprocess_error <= worst
    assert (worst == 255) == (report.preprocess_error > 20)  # noise and edges, shrunk by half without antialias
    assert nothing_but(tmp_path, "out.tflite")
    if worst < 1:  # pixels of any size, or prepared images
        pixels = samples.pixels(model.config, 3, size=(50, 40))
        for images in (pixels, model.preprocess(pixels)):
            assert export.verify(model, tmp_path / "out.tflite", images).images == 3


def test_a_trained_model_keeps_its_answers(tmp_path: Path, trained: VisionTransformer) -> None:
    path = tmp_path / "digits.tflite"
    report = export.tflite(trained, path, verify=digits.load().test_images, threads=1)
    # The requirement for 8-bit kernels: the same class for 99.5 % of the 360 images.
    assert report.agreement >= 0.995 and report.cosine >= 0.999
    assert (report.path, report.mode, report.threads, report.preprocess_error) == (path, "dynamic", 1, None)
    assert report.seconds > 0 and (report.peak_bytes is None or report.peak_bytes < 2**30)
    assert len(read_labels(path)) == 10 and b"M001" in path.read_bytes()


@pytest.mark.full
def test_pixels_quantize_as_well_as_prepared_images(tmp_path: Path, trained: VisionTransformer) -> None:
    images, path = digits.load().test_images[:100], tmp_path / "digits.tflite"
    prepared_in = export.tflite(trained, path, verify=images).sqnr
    pixels_in = export.tflite(trained, path, input_dtype="uint8", source_size=8, verify=images).sqnr
    assert abs(pixels_in - prepared_in) < 1  # dB; 0.1 measured, and 4.3 with pixels that are not centred


def test_a_calibrated_file_takes_pixels_and_says_on_which_images_it_was_compared(
    tmp_path: Path, trained: VisionTransformer
) -> None:
    images = digits.load().train_images[:32]
    options = {"quantize": "int8", "calibration": images, "input_dtype": "uint8"}
    report = export.tflite(trained, tmp_path / "out.tflite", **options, verify=digits.load().test_images[:32])
    assert (report.mode, report.calibrated_on) == ("int8", False)
    for same in ({}, {"verify": images}, {"verify": images.copy()}):
        report = export.tflite(trained, tmp_path / "out.tflite", **options, **same)
        assert (report.images, report.calibrated_on) == (32, True)
        assert "on 32 images (those of the calibration)" in str(report)
    report = export.tflite(trained, tmp_path / "out.tflite", quantize="dynamic", calibration=trained.preprocess(images))
    assert not report.calibrated_on  # compared on the built-in images


def test_quantized_files_are_smaller(tmp_path: Path) -> None:
    model = built(hidden_size=256, mlp_dim=1024, **SMALL)
    found = {name: export.tflite(model, tmp_path / name, quantize=name).bytes for name in WORST_ERROR}
    for mode, size in found.items():
        least, most = sizes.expected_bytes(model, modes.load_mode(mode), (32, 32))
        assert least <= size <= most
    # Two kernels of the last block are float16 in dynamic files: a large share of these small models.
    assert found["dynamic"] < 0.62 * found["float16"] < 0.36 * found["none"]


@pytest.mark.full
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
    options = {"verify": images, "least_cosine": 0, "least_agreement": 0}
    reports = [
        export.tflite(model, tmp_path / "out.tflite", quantize=mode, calibration=given, **options)
        for mode, given in ((str(plain), None), ("dynamic", None), ("dynamic", images))
    ]
    assert min(report.sqnr for report in reports[1:]) > reports[0].sqnr + 2


def test_labels_of_ones_own_are_lines_whatever_is_in_them(tmp_path: Path, model: VisionTransformer) -> None:
    path = tmp_path / "out.tflite"
    export.tflite(model, path)
    assert read_labels(path) == []  # an app shows the numbers of classes
    export.tflite(model, path, labels=["a\nb", "ü\u2028 x\r\n", "", "猫", " d "])
    assert read_labels(path) == ["a b", "ü x", "", "猫", "d"]
    names = [f"{number} " + "x" * 600 for number in range(1000)]
    export.tflite(built(num_classes=1000, **SMALL), path, quantize="none", labels=names)
    assert read_labels(path) == names


# ---- errors


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"quantize": "int3"}, r"quantize must be one of \[.*'dynamic'.*'float16'.*'none'.*'int3'"),
    ({"quantize": "Dynamic"}, "nearest is 'dynamic'"),
    ({"quantize": "mine.toml"}, "mine.toml"),
    ({"quantize": 8}, "quantize must be"),
    ({"device": "tpu"}, "device must be"),
    (
        {"device": "gpu", "quantize": "int16x8", "batch": 2},
        "quantize='int16x8' does not run.*device='gpu' needs batch=1",
    ),
    ({"input_dtype": "int8"}, "input_dtype must be"),
    ({"resize": "best"}, "resize must be"),
    ({"output": "classes"}, "a class for every pixel"),
    ({"batch": 0, "output": "x"}, "batch must be .*output must be"),
    ({"threads": 0}, "threads must be"),
    ({"patches": "conv"}, "patches must be"),
    ({"source_size": 64}, "source_size needs input_dtype='uint8'"),
    ({"source_size": (0, 3), "input_dtype": "uint8"}, "source_size"),
    ({"source_size": (40, 40, 3), "input_dtype": "uint8"}, "source_size"),
    ({"source_size": 40.5, "input_dtype": "uint8"}, "source_size"),
    ({"image_size": 3}, "smaller than one patch"),
    ({"least_cosine": 5.0}, "least_cosine must be"),
    ({"least_cosine": float("nan")}, "least_cosine must be"),
    ({"least_agreement": -0.1}, "least_agreement must be"),
    ({"least_agreement": "all"}, "least_agreement must be"),
    ({"quantize": "int8"}, "needs calibration images"),
    ({"quantize": "int8", "calibration": []}, "an empty list"),
    ({"quantize": "int8", "calibration": np.zeros((0, 32, 32, 3), np.float32)}, "calibration"),
    ({"quantize": "int8", "calibration": np.zeros((4, 8, 8, 3), np.float32)}, r"\(4, 8, 8, 3\)"),
    ({"quantize": "int8", "calibration": np.full((4, 32, 32, 3), np.nan, np.float32)}, "NaN or infinity in 4 of 4"),
    ({"quantize": "int8", "calibration": np.full((1, 32, 32, 3), 255, np.float32)}, "floats from 255 to 255"),
    ({"verify": np.full((4, 32, 32, 3), np.inf, np.float32)}, "verify must be finite"),
    ({"labels": "imagenet"}, "labels must be"),
    ({"labels": range(5)}, "the names of the classes, all strings"),
    ({"labels": ["a", "b"]}, "2 for 5 classes"),
    ({"labels": []}, "0 for 5 classes"),
    # Everything that is wrong is one message.
    ({"quantize": "int8", "threads": 0}, "^tflite: threads must be.*needs calibration images"),
    (
        {"source_size": "x", "resize": "y", "image_size": "abc", "labels": "nolist"},
        "^tflite: resize must be.*source_size must be.*source_size needs.*labels must be.*image_size must be",
    ),
    ({"quantize": "int3", "labels": ["a"], "image_size": 0}, "^tflite: quantize.*one label per class.*image_size"),
]
IMPOSSIBLE: list[tuple[str, dict[str, Any], str]] = [
    ("headless", {"output": "probabilities"}, "needs a head"),
    ("headless", {"labels": ["a"]}, "labels= needs a head"),
    ("gap", {"attention": True}, "a class token"),
    ("mixer", {"attention": True}, "without attention"),
]


def test_what_cannot_be_done_is_said_before_any_work(
    tmp_path: Path, model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TFLITE, "build_file", None)
    for options, said in WRONG:
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            export.tflite(model, tmp_path / "out.tflite", **options)
    for kind, options, said in IMPOSSIBLE:
        changes = {"tokens_mlp_dim": 24, "position": "none"} if kind == "mixer" else VARIANTS[kind]
        with pytest.raises(ValueError, match=said):
            export.tflite(built(**SMALL, **changes), tmp_path / "out.tflite", **options)
    with pytest.raises(IsADirectoryError, match="folder"):
        export.tflite(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="missing"):
        export.tflite(model, tmp_path / "missing" / "out.tflite")
    assert nothing_but(tmp_path)


def test_without_the_packages_there_is_one_hint(
    tmp_path: Path, model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ai_edge_litert", "ai_edge_litert.interpreter"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"keras-vit-zoo\[litert\]"):
        export.tflite(model, tmp_path / "out.tflite")
    assert nothing_but(tmp_path)


# ---- complete or absent


def fail_with(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def write_earlier(path: Path) -> None:
    """Write a result as keras_vit does, which an export may replace."""
    with files.writing_result(path) as file:
        file.write(b"yesterday's")


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
    error: BaseException, said: str, tmp_path: Path, model: VisionTransformer
) -> None:
    path, calibration = tmp_path / "out.tflite", samples.images(model.config, 2)
    write_earlier(path)
    stages = {"build_file": "dynamic", "find_outliers": "dynamic", "quantize_file": "int8", "verify": "none"}
    for stage, mode in stages.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TFLITE, stage, fail_with(error))
            with pytest.raises(type(error), match=said):
                export.tflite(model, path, quantize=mode, calibration=calibration)
        assert path.read_bytes() == b"yesterday's", stage
        assert nothing_but(tmp_path, "out.tflite"), stage


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


def test_a_new_file_takes_the_place_of_the_old_one_whatever_it_is_called(
    tmp_path: Path, model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["größe 模型.tflite", "x" * 248 + ".tflite", "export", "unquantized"]
    options = {"calibration": samples.images(model.config, 4), "least_cosine": 0, "least_agreement": 0}
    for name in names:
        write_earlier(Path(name))
        report = export.tflite(model, name, quantize="int8", **options)
        assert report.path == Path(name) and Path(name).stat().st_size == report.bytes > 1000
        assert Path(name).stat().st_mode & 0o444 == 0o444  # an app's build may run as another user
    assert nothing_but(tmp_path, *names)


def test_a_file_of_another_model_is_refused_and_leaves_nothing(
    tmp_path: Path, model: VisionTransformer, trained: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.tflite"
    with pytest.raises(export.VerificationError, match="wanted cosine >= 1[. ]"):
        export.tflite(trained, path, least_cosine=1.0)
    build, other = TFLITE.build_file, built(**SMALL, num_registers=1)
    monkeypatch.setattr(TFLITE, "build_file", lambda _, options: build(other, options))
    with pytest.raises(export.VerificationError, match="differs from the model: wanted cosine >= 0.995") as told:
        export.tflite(model, path)
    assert str(told.value).startswith(f"{path} ")  # and not the temporary path
    assert nothing_but(tmp_path)
