"""Fixed ranges of 8 and 16 bits: factors of output channels, norms in integers, and the search for what they hurt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import VisionTransformer, export
from keras_vit.export.check import samples
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.emit import build_file, write_model
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.options import Options
from keras_vit.export.litert.writer import FileWriter
from keras_vit.export.quantization import modes
from keras_vit.export.quantization.calibration import FileGraph
from keras_vit.export.quantization.emulation import Emulation, RoundingBuilder
from keras_vit.export.quantization.modes import Mode, Rule
from keras_vit.export.quantization.quantize import quantize
from keras_vit.export.quantization.search import search
from marks import full_except
from outlier_models import images, plant, score
from tiny_models import FAMILIES, VARIANTS, built

pytest.importorskip("ai_edge_quantizer")

RANDOM = np.random.default_rng(3)


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    """A tiny model, in whose block 1 a hidden channel of 40 has no effect and one output channel is 30 times larger."""
    model = plant(built())
    mlp, out = model.get_layer("block_1").mlp, model.get_layer("block_1").attention.out
    bias, kernel = np.array(mlp.dense1.bias), np.array(mlp.dense2.kernel)
    bias[3], kernel[3] = 40, 0
    mlp.dense1.bias.assign(bias)
    mlp.dense2.kernel.assign(kernel)
    factors = np.where(np.arange(out.kernel.shape[-1]) == 7, 30, 1)
    out.kernel.assign(np.array(out.kernel) * factors)
    return model


@pytest.fixture(scope="module")
def calibration(model: VisionTransformer) -> np.ndarray:
    return np.concatenate([samples.images(model.config, 8), images(model.config, 8, seed=9)])


def measured(model: VisionTransformer, path: Path, mode: str | Path, calibration: np.ndarray) -> float:
    shown = images(model.config, 8)
    export.tflite(
        model, path, quantize=str(mode), calibration=calibration, verify=shown, least_cosine=-1, least_agreement=0
    )
    return score(model.predict_on_batch(shown), export.runner(path)(shown))


def without_search(tmp_path: Path, mode: str) -> Path:
    text = (modes.data_files.folder("converters") / "exports" / f"{mode}.toml").read_text()
    path = tmp_path / f"{mode}.toml"
    path.write_text(text[: text.index("[search]")])
    return path


def test_the_search_finds_the_layers_that_were_spoiled(
    model: VisionTransformer, calibration: np.ndarray, tmp_path: Path
) -> None:
    parameters = modes.Search(noise=0.0025, activations=32, share=0.8)
    mode = dataclasses.replace(modes.load_mode("int8"), search=parameters)
    found = search(model, Options(), mode, calibration, tmp_path / "work", progress=False)
    for layer in ("dense1", "dense2"):
        assert found.shares[f"block_1/mlp/{layer}"] > 3 * found.shares[f"block_0/mlp/{layer}"]
    assert "block_1/mlp/dense1" in found.chosen
    assert "embedding" in found.shares
    assert len(found.chosen) < len(found.shares)
    assert found.noise <= 1.2 * parameters.noise  # the noises of single layers add up, nearly
    better = measured(model, tmp_path / "a.tflite", "int8", calibration)
    worse = measured(model, tmp_path / "b.tflite", without_search(tmp_path, "int8"), calibration)
    assert better > 0.99
    assert 1 - better < 0.7 * (1 - worse)  # the rest is of kernels and of ranges at run time


def test_a_spoiled_output_channel_gets_a_factor(
    model: VisionTransformer, calibration: np.ndarray, tmp_path: Path
) -> None:
    mode = dataclasses.replace(modes.load_mode("int8"), search=modes.Search(noise=1, activations=32, share=1))
    factors = search(model, Options(), mode, calibration, tmp_path / "work", progress=False).options.output_factors
    assert np.argmin(factors["block_1/attention/out"]) == 7
    build_file(model, Options(output_factors=factors)).write(tmp_path / "out.tflite")
    received, expected = export.runner(tmp_path / "out.tflite")(calibration), model.predict_on_batch(calibration)
    np.testing.assert_allclose(received, expected, atol=1e-5 * np.abs(expected).max())


def test_kernels_of_four_bits_that_lose_most_get_eight(
    model: VisionTransformer, calibration: np.ndarray, tmp_path: Path
) -> None:
    spoiled = model.get_layer("block_1").attention.value
    kernel = np.array(spoiled.kernel)
    kernel[:2] *= 20  # two inputs: the others of their blocks have few steps left
    text = (modes.data_files.folder("converters") / "exports" / "int4.toml").read_text()
    scores = {}
    try:
        spoiled.kernel.assign(kernel)
        for share in (0, 0.1):
            path = tmp_path / f"{share}.toml"
            path.write_text(text[: text.index("[smoothing]")] + f"[search]\nnoise = 0\nshare = {share}\n")
            scores[share] = measured(model, tmp_path / "out.tflite", path, calibration)
        found = search(model, Options(), modes.load_mode(path), calibration, tmp_path / "work", progress=False)
    finally:
        spoiled.kernel.assign(kernel / np.where(np.arange(len(kernel)) < 2, 20, 1)[:, None, None])
    assert next(iter(found.shares)) == "block_1/attention/value"
    assert "block_1/attention/value" in found.chosen
    assert found.mode.storage_of("FULLY_CONNECTED", "block_1/attention/value").bits == 8
    assert scores[0.1] > scores[0]


def test_no_search_is_done_on_one_image(model: VisionTransformer, calibration: np.ndarray, tmp_path: Path) -> None:
    mode = modes.load_mode("int8")
    found = search(model, Options(), mode, calibration[:1], tmp_path / "work", progress=False)
    assert found.mode is mode
    assert "two images" in found.lines()[0]


@pytest.mark.full
def test_sixteen_bits_go_where_the_search_says(
    model: VisionTransformer, calibration: np.ndarray, tmp_path: Path
) -> None:
    path = tmp_path / "all.toml"
    path.write_text(without_search(tmp_path, "int8-full").read_text() + "[search]\nnoise=0\nactivations=16\nshare=1\n")
    better = measured(model, tmp_path / "a.tflite", path, calibration)
    worse = measured(model, tmp_path / "b.tflite", without_search(tmp_path, "int8-full"), calibration)
    assert better > worse
    graph = FileGraph.read(np.fromfile(tmp_path / "a.tflite", np.uint8))
    kinds = [operator.kind for operator in graph.operators]
    assert kinds.count("DEQUANTIZE") == 1  # of the output: all else is integers
    assert kinds.count("QUANTIZE") > 1


def test_the_emulation_rounds_as_numpy_does(model: VisionTransformer, tmp_path: Path) -> None:
    builder = RoundingBuilder(mode=modes.load_mode("int8"))
    write_model(FileWriter(model, Operators(builder), Options()))
    builder.write(tmp_path / "out.tflite")
    shown = images(model.config, 2)
    emulation = Emulation(tmp_path / "out.tflite", {"head": 0.25})
    exact = emulation.run(shown, ())
    np.testing.assert_allclose(exact, model.predict_on_batch(shown), atol=1e-4)
    np.testing.assert_allclose(emulation.run(shown, ["head"]), 0.25 * np.rint(exact / 0.25), atol=1e-6)


@pytest.mark.parametrize(
    "kind", full_except(["pure", "rotary"], ["pure", "rotary", "gap", "map", "pre-norm", "hybrid", "normalized"])
)
@pytest.mark.parametrize("norms", ["int8", "int16"])
def test_norms_for_integers_compute_the_same_in_floats(tmp_path: Path, kind: str, norms: Any) -> None:
    model = built(**(VARIANTS | FAMILIES)[kind])
    scales = RANDOM.uniform(0.1, 1, model.config.hidden_size)
    build_file(model, Options(norms=norms, scales=scales, batch=None)).write(tmp_path / "out.tflite")
    shown = samples.images(model.config, 3)
    expected = model.predict_on_batch(shown)
    np.testing.assert_allclose(export.runner(tmp_path / "out.tflite")(shown), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("has_step", "least", "most"), [(False, 0.01, 0.1), (True, 0.0, 0.005)])
def test_a_newton_step_makes_roots_of_16_bits_exact(tmp_path: Path, has_step: bool, least: float, most: float) -> None:
    x = np.geomspace(0.01, 1, 100, dtype=np.float32).reshape(1, 1, 1, 100)
    ops = Operators(Builder())
    image = ops.builder.input("image", x.shape)
    same = ops.multiply(image, ops.constant(np.array(1.0), "one"), "x")
    result = ops.reciprocal_root(same, "norm", is_exact=has_step)
    ops.builder.signature({"image": image}, {"logits": result})
    ops.builder.write(tmp_path / "float.tflite")
    rules = (Rule(operators=("*",), weights=8, activations=16), Rule(operators=("INPUT", "OUTPUT"), weights=32))
    mode = Mode(name="all", summary="", devices="", least_cosine=0, least_agreement=0, rules=rules)
    quantize(tmp_path / "float.tflite", tmp_path / "out.tflite", mode, calibration=x)
    error = np.abs(export.runner(tmp_path / "out.tflite")(x) * np.sqrt(x) - 1).max()
    assert least <= error <= most
