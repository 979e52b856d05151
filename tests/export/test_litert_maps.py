"""LiteRT files of models that return maps, and of other functional Keras models on a backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dense_cases
from keras_vit import VisionTransformer, dense, export
from keras_vit.export.exported import load_exported
from marks import full_except
from tiny_models import built, prepared, randomised, tiny

pytest.importorskip("ai_edge_litert")

FOUR = {"num_layers": 4}
HEADS: dict[str, dict[str, Any]] = {
    "linear": {"num_classes": 3, "output": "classes", "blocks": (3,), "batch_norm": True},
    "multiscale": {"num_classes": 3, "output": "classes", "blocks": (0, 1, 2, 3), "batch_norm": True},
    "bins": {"output": "depth", "blocks": (1, 3), "norm": False, "readout": "concat", "upsample": 4, "max_depth": 9.0},
    "normed class token": {"num_classes": 3, "output": "classes", "blocks": (3,), "readout": "concat"},
    "added class token": {"num_classes": 3, "output": "classes", "blocks": (3,), "readout": "add"},
}
DPT: dict[str, Any] = {"kind": "dpt", "blocks": (0, 1, 2, 3), "widths": (4, 6, 8, 12), "fusion_width": 8}
HEADS |= {
    "dpt": {**DPT, "output": "depth"},
    "dpt of classes": {**DPT, "num_classes": 3, "batch_norm": True, "residual_bias": False, "head_size": "double"},
    "metric": {**DPT, "output": "depth", "activation": "sigmoid", "max_depth": 20.0},
    "projected": {**DPT, "output": "depth", "readout": "project", "projection": True, "norm": False, "min_depth": 0.1},
}


def model_with(head: dict[str, Any]) -> dense.DenseModel:
    """Return a tiny model with a head, and random weights and statistics."""
    model = dense.DenseModel(randomised(VisionTransformer(tiny(**FOUR))), dense.MapConfig(**head))
    randomised(model)
    draw = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.moving_variance.assign(draw.uniform(0.5, 2, layer.moving_variance.shape))
    return model


@pytest.mark.parametrize("name", full_except(["dpt of classes"], HEADS))
def test_files_compute_the_maps_of_every_head_for_any_number_of_images(name: str, tmp_path: Path) -> None:
    model = model_with(HEADS[name])
    images = prepared(model.config, 3)
    report = export.tflite(model, tmp_path / "model.tflite", quantize="none", batch=None, verify=images)
    assert report.max_error < 1e-4  # float32, another order of the sums
    [maps] = load_exported(tmp_path / "model.tflite").call(images).values()
    want = np.asarray(model(images))
    np.testing.assert_allclose(maps, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.full  # other groups in test_litert.py, "units, odd sides"
@pytest.mark.parametrize("mode", ["none", "dynamic"])
def test_files_of_a_hybrid_with_other_groups_of_channels_compute_its_depth(mode: str, tmp_path: Path) -> None:
    model = dense_cases.load("hf_dpt_hybrid")
    images = dense_cases.expected("hf_dpt_hybrid")["input_nhwc"]
    report = export.tflite(model, tmp_path / "model.tflite", quantize=mode, verify=images)
    assert report.relative_error is not None
    # Kernels of 8 bits, and depths next to 0, by which errors are divided: 0.07.
    assert report.relative_error < (1e-4 if mode == "none" else 0.15)


def test_a_file_of_classes_has_the_best_class_of_every_pixel(tmp_path: Path) -> None:
    model = model_with(HEADS["multiscale"])
    images = prepared(model.config, 3)
    logits = np.asarray(model(images[:1]))
    bias = model.get_layer("map_logits").bias
    bias.assign(bias - np.median(logits, axis=(0, 1, 2)))  # so that every class is somewhere
    report = export.tflite(model, tmp_path / "model.tflite", quantize="none", output="classes", verify=images)
    assert report.agreement == 1
    classes = load_exported(tmp_path / "model.tflite").call(images[:1])["classes"]
    assert classes.shape == (1, 32, 32)
    assert classes.dtype == np.uint8
    assert len(np.unique(classes)) > 1


def own_model(*layers: keras.layers.Layer) -> keras.Model:
    """Return a Keras model of one's own, with these layers on the patches of a classifier with a class token."""
    backbone = built()
    x = dense.PatchMap(backbone.config.grid, prefix_tokens=1)(backbone.get_layer("encoder_norm").output)
    for layer in layers:
        x = layer(x)
    return randomised(keras.Model(backbone.input, x))


def test_a_keras_model_on_a_backbone_is_written_and_verified(tmp_path: Path) -> None:
    layers = keras.layers
    model = own_model(
        layers.Conv2DTranspose(6, 4, 2, padding="same"),  # cells overlap
        layers.ReLU(),
        layers.Conv2DTranspose(5, 3, 2),
        layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
        dense.ResizeBilinear((32, 32)),
        layers.Conv2D(1, 1, activation="sigmoid"),
    )
    images = prepared(tiny(), 3)
    for mode, most in (("none", 1e-5), ("dynamic", 0.1)):
        assert export.tflite(model, tmp_path / "own.tflite", quantize=mode, verify=images).max_error < most


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    layers = keras.layers
    wrong: list[tuple[keras.layers.Layer, dict[str, Any], str]] = [
        (layers.Softmax(), {}, "no LiteRT writer for the layer 'softmax"),
        (layers.Conv2D(4, 3, dilation_rate=2, padding="same"), {}, "dilation_rate"),
        (layers.Conv2D(4, 3, activation="selu"), {}, "activation 'selu'"),
        (layers.Conv2DTranspose(4, 4, 2), {"batch": None}, "batch=None"),
        (layers.ReLU(), {"attention": True}, "attention=True"),
        (layers.ReLU(), {"output": "classes"}, "a class for every pixel"),
        (layers.ReLU(), {"image_size": 64}, "image_size"),
    ]
    for layer, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            export.tflite(own_model(layer), tmp_path / "own.tflite", **{"quantize": "none", **options})
    assert not list(tmp_path.iterdir())
