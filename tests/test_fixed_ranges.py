"""Fixed ranges of 8 and 16 bits: which layers have them in `int8`, and norms that integers keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import dense, export
from keras_vit.export import samples
from keras_vit.export.litert.builder import Builder, schema
from keras_vit.export.litert.emit import build_file
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.options import Options
from keras_vit.export.modes import Mode, Rule, load_mode
from keras_vit.export.quantize import quantize
from marks import full_except
from outlier_models import score
from tiny_models import FAMILIES, OTHERS, VARIANTS, built

pytest.importorskip("ai_edge_quantizer")

RANDOM = np.random.default_rng(3)
GATED = "rotary beside learned positions, gated, normed"
# Kind of model -> layers of the last block, or of the head, whose ranges are fixed in `int8`.
FIXED: dict[str, list[str]] = {
    "pure": ["attention/key", "attention/query", "attention/value", "mlp/dense1"],
    GATED: ["attention/key", "attention/query", "attention/value", "mlp/dense1", "mlp/gate"],
    "hybrid": ["attention/key", "attention/query", "attention/value", "mlp/dense1"],
    "mixer": ["mlp/dense1", "token_mlp/dense1"],
    "map": ["attention/key", "attention/query", "attention/value", "mlp/dense1"],
    "BiT": [],
}


def fixed_layers(path: Path) -> list[str]:
    """Return the names of the dense layers and convolutions of a file that take integers."""
    s = schema()
    model = s.ModelT.InitFromObj(s.Model.GetRootAs(path.read_bytes()))
    graph = model.subgraphs[0]
    kinds = {s.BuiltinOperator.FULLY_CONNECTED, s.BuiltinOperator.CONV_2D}
    layers = [one.inputs for one in graph.operators if model.operatorCodes[one.opcodeIndex].builtinCode in kinds]
    kernels = {graph.tensors[kernel]: graph.tensors[x] for x, kernel, *_ in layers}
    assert {kernel.type for kernel in kernels} == {s.TensorType.INT8}
    return sorted(
        kernel.name.decode().removesuffix("/kernel") for kernel, x in kernels.items() if x.type == s.TensorType.INT8
    )


@pytest.mark.parametrize("kind", full_except(["pure", "mixer", "BiT"], FIXED))
def test_int8_fixes_the_ranges_of_layers_that_read_a_norm(kind: str, tmp_path: Path) -> None:
    model, path = built(**(VARIANTS | FAMILIES | OTHERS)[kind]), tmp_path / "out.tflite"
    images = samples.images(model.config, 8)
    export.tflite(model, path, quantize="int8", calibration=images, least_cosine=-1, least_agreement=0)
    names = [f"block_{number}/{layer}" for number in (0, 1) for layer in FIXED[kind]]
    assert fixed_layers(path) == sorted([*names, *(["pool/attention/value", "pool/mlp/dense1"] * (kind == "map"))])


@pytest.mark.parametrize("name", ["embedding", "block_0/attention/out", "block_0/mlp/dense2", "head", "stage_0/conv1"])
def test_other_layers_have_ranges_at_run_time(name: str) -> None:
    rule = load_mode("int8").rule("FULLY_CONNECTED", name)
    assert rule is not None and (rule.weights, rule.activations) == (8, 32)


@pytest.mark.parametrize("head", full_except(["multiscale"], ["multiscale", "dpt"]))
def test_heads_that_read_a_tensor_twice_have_fixed_ranges(head: str, tmp_path: Path) -> None:
    """Both heads have tensors of equal names: a norm of several blocks, a convolution with and without its ReLU."""
    model = dense.segmenter(built(num_classes=0, num_layers=4), 3, head=head)
    images = samples.images(model.config, 8)
    options: dict[str, Any] = {"calibration": images, "least_cosine": -1, "least_agreement": 0}
    export.tflite(model, tmp_path / "out.tflite", quantize="int8", **options)
    expected, received = model.predict_on_batch(images), export.runner(tmp_path / "out.tflite")(images)
    assert score(expected.reshape(8, -1), received.reshape(8, -1)) > 0.99


@pytest.mark.parametrize(
    "kind", full_except(["pure", "rotary"], ["pure", "rotary", "gap", "map", "pre-norm", "hybrid", "normalized"])
)
@pytest.mark.parametrize("norms", ["float", "int16"])
def test_norms_of_a_scaled_stream_compute_the_same_in_floats(tmp_path: Path, kind: str, norms: Any) -> None:
    model = built(**(VARIANTS | FAMILIES)[kind])
    scales = RANDOM.uniform(0.1, 1, model.config.hidden_size)
    build_file(model, Options(norms=norms, scales=scales, batch=None)).write(tmp_path / "out.tflite")
    shown = samples.images(model.config, 3)
    expected = model.predict_on_batch(shown)
    np.testing.assert_allclose(export.runner(tmp_path / "out.tflite")(shown), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("norms", "least", "most"), [("float", 0.01, 0.1), ("int16", 0.0, 0.005)])
def test_a_newton_step_makes_roots_of_16_bits_exact(tmp_path: Path, norms: str, least: float, most: float) -> None:
    x = np.geomspace(0.01, 1, 100, dtype=np.float32).reshape(1, 1, 1, 100)
    ops = Operators(Builder(), norms=norms)
    image = ops.builder.input("image", x.shape)
    same = ops.multiply(image, ops.constant(np.array(1.0), "one"), "x")
    result = ops.reciprocal_root(same, "norm")
    ops.builder.signature({"image": image}, {"logits": result})
    ops.builder.write(tmp_path / "float.tflite")
    rules = (Rule(operators=("*",), weights=8, activations=16), Rule(operators=("INPUT", "OUTPUT"), weights=32))
    mode = Mode(name="all", summary="", devices="", least_cosine=0, least_agreement=0, rules=rules)
    quantize(tmp_path / "float.tflite", tmp_path / "out.tflite", mode, calibration=x)
    error = np.abs(export.runner(tmp_path / "out.tflite")(x) * np.sqrt(x) - 1).max()
    assert least <= error <= most
