"""Files for accelerators: what a device chooses, which operators they have, and that GPUs take them whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compiled_model
from compiled_model import run_compiled, run_on_gpu
from keras_vit import VisionTransformer, ViTConfig, digits, export, text, zoo
from keras_vit.export import samples
from keras_vit.export.exported import load_exported
from outlier_models import images, score, standardise
from text_cases import EXPORTED, small_encoder
from tiny_models import FAMILIES, OTHERS, built, tiny

interpreter = pytest.importorskip("ai_edge_litert.interpreter")

CHROMIUM = Path("/usr/lib/chromium")  # Debian's package has SwiftShader, a GPU in software
# No GPU has the int16 tensors of int16x8.
MODES = ("none", "float16", "dynamic", "int4", "int8")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[VisionTransformer, Path]:
    model, path = zoo.load("digits"), tmp_path_factory.mktemp("accelerators") / "digits.tflite"
    export.tflite(model, path, quantize="none")
    return model, path


def test_a_compiled_file_computes_what_the_interpreter_does(tmp_path: Path) -> None:
    path, model = tmp_path / "file.tflite", built(num_layers=1)
    export.tflite(model, path, batch=2, attention=True, input_dtype="uint8")
    pixels = np.random.default_rng(0).integers(0, 256, (3, *model.config.size, 3), np.uint8)
    run, loaded = run_compiled(path, pixels), load_exported(path)
    assert set(run.outputs) == {"logits", "attention"}
    for name, values in run.outputs.items():
        expected = np.concatenate([loaded.call(batch)[name][:count] for batch, count in loaded.batches(pixels)])
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    assert run.milliseconds > 0
    assert "XNNPACK" in run.messages


def test_a_program_that_fails_crashes_or_hangs_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, image = tmp_path / "bad.tflite", np.zeros((1, 2, 2, 3), np.float32)
    path.write_bytes(b"abcdTFL3" * 100)
    with pytest.raises(ValueError, match=r"bad.tflite cannot be run on CPU: .*Flatbuffer"):
        run_compiled(path, image)
    program = tmp_path / "program.py"
    monkeypatch.setattr(compiled_model, "__file__", str(program))
    program.write_text("import os; os.abort()")
    with pytest.raises(ValueError, match="LiteRT crashed .exit status -6"):
        run_compiled(path, image, hardware=("GPU", "CPU"))
    program.write_text("raise SystemExit('F0000 00:00:1.5 17028 model.cc:218] Check failed: !IsInput(x)')")
    with pytest.raises(ValueError, match=r"GPU: Check failed: !IsInput\(x\) \(exit status 1\)"):
        run_compiled(path, image, hardware=("GPU",))
    program.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(compiled_model, "TIMEOUT", 0.2)
    with pytest.raises(ValueError, match="did not run on GPU in 0.2 seconds"):
        run_compiled(path, image, hardware=("GPU",))


def test_a_file_for_a_device_says_what_was_chosen(file: tuple[VisionTransformer, Path], tmp_path: Path) -> None:
    model, path = file[0], tmp_path / "npu.tflite"
    report = export.tflite(model, path, device="npu")
    assert report.mode == "float16" and "CONV_2D" in operators(path)
    assert "for npu: float16, float32 images, convolution patches. float16: Qualcomm measured" in str(report)
    images = samples.images(model.config, 4)
    given = {"calibration": images, "verify": images, "least_cosine": -1, "least_agreement": 0}
    with pytest.raises(ValueError, match="'int16x8' does not run with device='gpu'.*int16"):
        export.tflite(model, path, device="gpu", quantize="int16x8", **given)


@pytest.mark.full
def test_a_hybrid_has_no_convolution_that_gpus_refuse_or_compute_wrong(tmp_path: Path) -> None:
    resnet = {"num_layers": (1, 1), "width_factor": 0.5}
    model, path = built(resnet=resnet, patch_size=1, image_size=64), tmp_path / "hybrid.tflite"
    given = samples.images(model.config, 4)
    options = {"calibration": given, "verify": given, "patches": "dense", "least_cosine": -1, "least_agreement": 0}
    for mode in ("dynamic", "int8"):
        export.tflite(model, path, quantize=mode, **options)
        convolutions = operators(path)["CONV_2D"]
        kernels = [kernel for _, kernel in convolutions]
        assert kernels and all(height > 1 for _, height, _, _ in kernels)
        assert max(version for version, _ in convolutions) <= 6  # 7 is for int4 kernels


def test_patches_are_embedded_as_the_mode_or_the_caller_says(tmp_path: Path) -> None:
    model, path = built(), tmp_path / "file.tflite"
    given = samples.images(model.config, 4)
    for expected, options in (
        ("CONV_2D", {"quantize": "int8"}),
        ("CONV_2D", {"quantize": "int16x8"}),
        ("SPACE_TO_DEPTH", {"quantize": "dynamic"}),
        ("CONV_2D", {"quantize": "dynamic", "patches": "convolution"}),
        ("SPACE_TO_DEPTH", {"quantize": "int8", "patches": "dense"}),
    ):
        export.tflite(model, path, calibration=given, verify=given, least_cosine=-1, least_agreement=0, **options)
        assert {"CONV_2D", "SPACE_TO_DEPTH"} & set(operators(path)) == {expected}, options


def operators(path: Path) -> dict[str, list[tuple[int, tuple[int, ...]]]]:
    """Return the (version, shape of the second input) of a file's operators, by kind."""
    from ai_edge_litert.tools import flatbuffer_utils

    from keras_vit.export.litert.builder import schema

    names = {number: name for name, number in vars(schema().BuiltinOperator).items() if isinstance(number, int)}
    model, found = flatbuffer_utils.read_model(str(path)), {}
    [graph] = model.subgraphs
    for operator in graph.operators:
        code = model.operatorCodes[operator.opcodeIndex]
        shape = tuple(graph.tensors[operator.inputs[min(1, len(operator.inputs) - 1)]].shape)
        found.setdefault(names[code.builtinCode], []).append((code.version, shape))
    return found


@pytest.fixture(scope="module")
def gpu(file: tuple[VisionTransformer, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Provide a GPU: this machine's, or SwiftShader."""
    with pytest.MonkeyPatch.context() as patch:
        if (CHROMIUM / "vk_swiftshader_icd.json").exists():
            patch.setenv("LD_LIBRARY_PATH", str(CHROMIUM))
            patch.setenv("VK_ICD_FILENAMES", str(CHROMIUM / "vk_swiftshader_icd.json"))
            patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("vulkan")))
        try:
            run_on_gpu(file[1], file[0].preprocess(digits.load().test_images[:1]))
        except ValueError as error:
            pytest.skip(str(error))
        yield


def check_whole_and_right(model: VisionTransformer, path: Path, mode: str, given: Any, least: float) -> None:
    """Export, run on the GPU, and compare differences of images with the model's."""
    calibration, shown = given
    export.tflite(model, path, quantize=mode, calibration=calibration, verify=shown, least_cosine=-1, least_agreement=0)
    run, taken, of = run_on_gpu(path, shown)
    assert taken == of
    assert score(model.predict_on_batch(shown), run.outputs["logits"]) > least


# Lowest mean cosine of differences in each mode, measured in software, as on the CPU: 1 - 1e-13, 1 - 3e-8, .99998,
# .9998, .9997 of the digits; 1 - 1e-12, 1 - 4e-7, .9998, .978, .992 of two blocks of Ti/16 or of a small hybrid.
# The bounds allow two to five times the distance from 1; a wrong operator gives less than .5.
LEAST = {
    "digits": (0.999999, 0.999999, 0.9999, 0.999, 0.999),
    "Ti/16": (0.999999, 0.99999, 0.9995, 0.95, 0.98),
    "R26+S/32": (0.999999, 0.99999, 0.9995, 0.95, 0.98),
}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LEAST)
def test_models_are_whole_and_right_on_the_gpu(name: str, mode: str, gpu: None, tmp_path: Path) -> None:
    if name == "digits":
        model, seen = zoo.load("digits"), digits.load()
        given = [model.preprocess(part) for part in (seen.train_images[:64], seen.test_images[:40])]
    else:
        config = ViTConfig.from_name(name, image_size=64, num_layers=2, num_classes=50)
        if config.resnet is not None:  # a second unit and a second stage with a stride, and odd sides
            resnet = {"num_layers": (2, 1, 1), "width_factor": 0.5}
            config = tiny(resnet=resnet, patch_size=1, image_size=72, num_classes=50, hidden_size=64)
        model = VisionTransformer(config)
        rng = np.random.default_rng(0)
        for variable in model.weights:
            variable.assign(variable + 0.02 * rng.standard_normal(variable.shape))
        given = [np.concatenate([samples.images(config, 8), images(config, 8, seed=9)]), images(config, 6)]
    check_whole_and_right(model, tmp_path / "file.tflite", mode, given, LEAST[name][MODES.index(mode)])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FAMILIES | OTHERS)
def test_families_are_whole_and_right_on_the_gpu(kind: str, gpu: None, tmp_path: Path) -> None:
    model = standardise(VisionTransformer(tiny(**(FAMILIES | OTHERS)[kind])), np.random.default_rng(0))
    shown = images(model.config, 4)  # measured: 1 - 1e-12
    check_whole_and_right(model, tmp_path / "file.tflite", "none", (None, shown), 0.999999)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "float16", "dynamic"])
@pytest.mark.parametrize("name", ["largest id", "end token", "siglip 2"])
def test_text_towers_are_whole_and_right_on_the_gpu(name: str, mode: str, gpu: None, tmp_path: Path) -> None:
    tokenizer, fields = EXPORTED[name]
    path = text.tflite(small_encoder(tokenizer, **fields), tmp_path / "text.tflite", quantize=mode).path
    told = json.loads((tmp_path / "text.test.json").read_text(encoding="utf-8"))
    run, taken, of = run_on_gpu(path, np.asarray(told["ids"], np.int32))
    [found] = run.outputs.values()
    cosines = (found * told["embeddings"]).sum(axis=-1) / np.linalg.norm(found, axis=-1)
    assert taken == of and cosines.min() > 0.9999


@pytest.mark.gpu
def test_int16_stays_on_the_cpu(file: Any, gpu: None, tmp_path: Path) -> None:
    model, seen = file[0], digits.load()
    calibration, path = model.preprocess(seen.train_images[:16]), tmp_path / "file.tflite"
    export.tflite(
        model, path, quantize="int16x8", calibration=calibration, verify=calibration, least_agreement=0, least_cosine=-1
    )
    run, taken, of = run_on_gpu(path, calibration)
    assert taken < of and "INT16" in run.messages


@pytest.mark.gpu
def test_other_files_are_whole_on_the_gpu(file: Any, gpu: None, tmp_path: Path) -> None:
    model, path = file[0], tmp_path / "file.tflite"
    for options in ({"input_dtype": "uint8"}, {"input_dtype": "uint8", "source_size": (12, 20)}, {"attention": True}):
        export.tflite(model, path, **options)
        shape, dtype = load_exported(path).shape, load_exported(path).dtype
        _, taken, of = run_on_gpu(path, np.ones((1, *shape), dtype))
        assert taken == of, options
