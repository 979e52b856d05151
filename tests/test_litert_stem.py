"""A hybrid's ResNet in a LiteRT file gives the outputs of the Keras layers and of the official code."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_vit import VisionTransformer, converters
from keras_vit.export.litert.builder import Tensor
from keras_vit.export.litert.operators import FLOAT32, INT8, Operators, Storage
from keras_vit.export.litert.stem import group_norm, standardized_kernel
from keras_vit.export.litert.writer import FileWriter
from keras_vit.model.config import Preprocessing
from keras_vit.model.layers.resnet import GroupNormalization, StandardizedConv2D
from litert_graph import options, run, written
from reference_cases import checkpoint, distance, expected, tolerance
from tiny_models import built, prepared

# float32 through up to 12 convolutions and norms: measured at most 3e-6 against float64. An epsilon in the wrong place
# gives 1e-4 and more (test below), a wrong border 1e-2.
NOISE = 1e-5
STEMS: dict[str, dict[str, Any]] = {
    "root": {"image_size": 32},
    "root, odd sides": {"image_size": (45, 38)},
    "root, grey": {"image_size": 32, "num_channels": 1},
    "units": {"num_layers": (2, 1, 1), "image_size": 64},
    "units, odd sides": {"num_layers": (1, 2), "image_size": (45, 71)},
    "variance": {"num_layers": (1, 1), "image_size": 32, "conv_epsilon_place": "variance", "conv_epsilon": 1e-2},
    "std": {"num_layers": (1, 1), "image_size": 32, "conv_epsilon_place": "std", "conv_epsilon": 1e-2},
    "norm epsilon": {"num_layers": (1,), "image_size": 32, "norm_epsilon": 0.1},
}
RESNET = ("num_layers", "conv_epsilon_place", "conv_epsilon", "norm_epsilon")


@functools.cache
def hybrid(kind: str, dtype: str = "float64") -> VisionTransformer:
    values = dict(STEMS[kind])
    resnet = {"width_factor": 0.5, **{name: values.pop(name) for name in RESNET if name in values}}
    return built(dtype, resnet=resnet, patch_size=1, **values)


def from_keras(model: VisionTransformer, batch: np.ndarray) -> np.ndarray:
    units = model.config.resnet.num_layers  # type: ignore[union-attr]
    return np.asarray(model.features(batch, layers=[f"stage_{len(units)}" if units else "root"]).popitem()[1])


def file_of(model: VisionTransformer, path: Path, storage: Storage = FLOAT32, **changes: Any) -> Any:
    def layers(ops: Operators) -> tuple[Tensor, Tensor]:
        file = FileWriter(model, ops, options(**changes))
        feature_map = file.read(model.get_layer("embedding").input).tensor
        return file.inputs["image"], feature_map

    return written(layers, path / "stem.tflite", storage)


@pytest.mark.parametrize("batch", [1, 2, None])
@pytest.mark.parametrize("kind", STEMS)
def test_the_map_is_that_of_the_keras_layers(tmp_path: Path, kind: str, batch: int | None) -> None:
    model = hybrid(kind)
    given = prepared(model.config, batch=batch or 3)
    assert distance(run(file_of(model, tmp_path, batch=batch), given), from_keras(model, given)) < NOISE


@pytest.mark.parametrize("case", ["hybrid_eps", "hybrid_r26", "hybrid_r50", "hybrid_stem_only"])
def test_patches_of_the_map_are_those_of_the_official_code(tmp_path: Path, case: str) -> None:
    model, want = converters.load(checkpoint(case)), expected(case)
    embedding = model.get_layer("embedding")
    made = run(file_of(model, tmp_path, batch=2), want["input"])
    patches = keras.ops.conv(made, embedding.kernel, strides=embedding.patch_size) + embedding.bias
    assert distance(patches, want["grid/embedding"]) < tolerance(case)


def test_units_are_those_of_the_official_code(tmp_path: Path) -> None:
    model, want = converters.load(checkpoint("hybrid_r26")), expected("hybrid_r26")
    made = run(file_of(model, tmp_path, batch=2), want["input"])
    assert distance(made, want["resnet/block4"]) < tolerance("hybrid_r26")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("batch", [1, None])
def test_pixels_are_normalised_before_the_border_is_padded(tmp_path: Path, channels: int, batch: int | None) -> None:
    mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
    resnet = {"num_layers": (1,), "width_factor": 0.5}
    model = built(resnet=resnet, patch_size=1, num_channels=channels, preprocessing=Preprocessing(mean=mean, std=std))
    pixels = np.random.default_rng(0).integers(0, 256, (1, 32, 32, channels), np.uint8)
    made = run(file_of(model, tmp_path, batch=batch, input_dtype="uint8"), pixels)
    assert distance(made, from_keras(model, model.preprocess(pixels))) < NOISE


def test_a_large_mean_costs_no_accuracy(tmp_path: Path) -> None:
    # mean(x^2) - mean(x)^2 cancels: with a mean of 100 deviations only three digits remain.
    x = np.random.default_rng(0).normal(100, 1, (1, 28, 28, 64)).astype(np.float32)
    norm = GroupNormalization()
    norm.build(x.shape)

    def layers(ops: Operators) -> tuple[Tensor, Tensor]:
        image = ops.builder.input("image", x.shape)
        return image, ops.add(*group_norm(ops, norm, image, "norm"), "sum")

    made = run(written(layers, tmp_path / "norm.tflite"), x)
    groups = x.astype(np.float64).reshape(28 * 28, 32, 2)
    want = (groups - groups.mean((0, 2), keepdims=True)) / np.sqrt(groups.var((0, 2), keepdims=True) + norm.epsilon)
    # The last bit of a value near 100 is 8e-6, in x * scale, the mean and the sum. The one-pass formula gives 5e-4.
    assert distance(made, want.reshape(x.shape)) < 3e-5


def test_a_standardised_kernel_is_what_the_layer_uses() -> None:
    for place in ("std", "variance"):
        layer = StandardizedConv2D(8, 3, epsilon=1e-2, epsilon_place=place)
        layer.build((None, 8, 8, 4))
        np.testing.assert_allclose(standardized_kernel(layer), layer.standardized_kernel(), rtol=1e-5, atol=1e-6)


def test_quantized_kernels_keep_the_map(tmp_path: Path) -> None:
    model = hybrid("units", dtype="float32")
    given = prepared(model.config, batch=1)
    made, want = run(file_of(model, tmp_path, INT8), given), from_keras(model, given)
    # 8 bits of weights and of activations through 12 convolutions of random weights
    assert np.sum(made * want) / np.sqrt(np.sum(made**2) * np.sum(want**2)) > 0.99


def test_nothing_has_a_fifth_dimension_and_the_batch_stays_open(tmp_path: Path) -> None:
    details = file_of(hybrid("units"), tmp_path, batch=None).get_tensor_details()
    assert max(len(row["shape"]) for row in details) <= 4
    maps = [row for row in details if row["name"].endswith("conv2")]
    assert maps and all(row["shape_signature"][0] == -1 for row in maps)


def test_names_are_the_layers(tmp_path: Path) -> None:
    names = {row["name"] for row in file_of(hybrid("units"), tmp_path).get_tensor_details()}
    layers = {f"stage_2_unit_1/{name}" for name in ("conv1", "conv2", "conv3", "conv_proj", "gn1", "gn2")}
    assert layers | {"root/conv", "root/gn", "root/conv/kernel", "stage_1_unit_2"} <= names
