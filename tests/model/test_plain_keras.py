"""Keras' own tools on our models: `enable_lora`, saved, loaded, converted and exported; `quantize` is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_vit import VisionTransformer, converters, export, train
from keras_vit.train.prepare import adapt_model
from tiny_models import built, prepared, tiny

# Every kind of dense layer, and layers without weights.
RICH: dict[str, Any] = {
    "classifier": "map",
    "position_prefix": False,
    "representation_size": 24,
    "stochastic_depth": 0.1,
    "layer_scale": 0.1,
}


def outputs(model: keras.Model) -> np.ndarray:
    return np.asarray(model(prepared(tiny())))


# ---- quantize


def test_quantize_is_refused_before_anything_changes() -> None:
    model = built()
    before = outputs(model)
    with pytest.raises(NotImplementedError, match="export.tflite"):
        model.quantize("int8")
    np.testing.assert_array_equal(outputs(model), before)
    with pytest.raises(ValueError, match="int8_from_float32"):
        VisionTransformer(tiny(), dtype="int8_from_float32")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")  # of Keras
@pytest.mark.filterwarnings("ignore:Keras' `quantize` is not for keras_vit's:UserWarning")
def test_in_a_model_around_ours_only_its_own_layers_are_quantized(tmp_path: Path) -> None:
    vit = built(**RICH)
    model = keras.Model(vit.input, keras.layers.Dense(3, name="mine")(vit(vit.input)))
    exact, before = outputs(vit), outputs(model)
    model.quantize("int8", type_check=False)
    assert [layer.name for layer in model._flatten_layers() if layer.quantization_mode] == ["mine"]
    np.testing.assert_array_equal(outputs(vit), exact)
    assert 0 < np.abs(outputs(model) - before).max() < 0.1 * np.abs(before).max()
    model.save(tmp_path / "around.keras")
    np.testing.assert_array_equal(outputs(keras.models.load_model(tmp_path / "around.keras")), outputs(model))


# ---- LoRA


@pytest.fixture(scope="module")
def lora() -> VisionTransformer:
    """Return a model of which only LoRA's weights and the head were trained."""
    model = built()
    for layer in model.layers:
        layer.trainable = layer.name == "head" or layer.name.startswith("block_")
    for block in (model.get_layer("block_0"), model.get_layer("block_1")):
        for part in block._flatten_layers():
            part.trainable = part in (block, block.attention, block.mlp)
        for part in (block.attention.query, block.attention.value, block.attention.out, block.mlp.dense1):
            part.trainable = True
            part.enable_lora(rank=2)
    before = [np.array(weight) for weight in model.non_trainable_weights]
    model.compile("adam", "mse", run_eagerly=True)
    model.optimizer.learning_rate = 0.05
    model.fit(prepared(model.config), np.zeros((2, 5)), epochs=2, verbose=0)
    for weight, value in zip(model.non_trainable_weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)
    assert np.abs(outputs(model) - outputs(built())).max() > 0.01
    return model


def test_a_checkpoint_has_the_updates_of_lora(tmp_path: Path, lora: VisionTransformer) -> None:
    for format in ("google", "timm"):  # separate and joined kernels of the attention
        file = tmp_path / ("vit.npz" if format == "google" else "vit.safetensors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # timm's file does not say the GELU
            other = converters.load(converters.save(lora, file, format=format), config={"num_heads": 4})
        np.testing.assert_allclose(outputs(other), outputs(lora), rtol=1e-5, atol=1e-5)  # float32, other order of sums


@pytest.mark.full
def test_a_model_with_lora_is_saved_and_exported_with_its_updates(tmp_path: Path, lora: VisionTransformer) -> None:
    lora.save(tmp_path / "vit.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer of the saved model had other variables
        loaded = keras.models.load_model(tmp_path / "vit.keras")
    for other in (loaded, converters.load(tmp_path / "vit.keras"), lora.with_config(lora.config)):
        assert len(other.weights) == len(built().weights)
        np.testing.assert_allclose(outputs(other), outputs(lora), rtol=1e-5, atol=1e-5)  # float32, other order of sums
    # An export is verified against the model with LoRA, from which the one without differs.
    report = export.tflite(lora, tmp_path / "vit.tflite", quantize="none", verify=prepared(lora.config))
    assert report.cosine > 0.99999


def test_a_recipe_trains_a_model_with_lora_from_its_folded_weights(lora: VisionTransformer) -> None:
    adapted = adapt_model(train.recipe("digits", image_size=None), lora, num_classes=5)
    np.testing.assert_allclose(outputs(adapted), outputs(lora), rtol=1e-5, atol=1e-5)
    assert len(adapted.weights) == len(built().weights)
