"""Keras' own tools on our models: `quantize` and `enable_lora`, saved, loaded, converted and exported."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_vit import VisionTransformer, converters, export, train
from keras_vit.model.layers.base import load_quantization, quick_collections
from keras_vit.train.loop.prepare import adapt_model
from marks import full_except
from tiny_models import built, prepared, tiny

# Every kind of dense layer, and layers without weights.
RICH: dict[str, Any] = {
    "classifier": "map",
    "position_prefix": False,
    "representation_size": 24,
    "stochastic_depth": 0.1,
    "layer_scale": 0.1,
}
# Relative to the largest logit: 8, 4 and 8 bits (3 of them mantissa) for kernels of random numbers.
MODES = {"int8": 0.1, "int4": 0.6, "float8": 0.3}


@pytest.fixture(autouse=True, scope="module")
def no_collections() -> Iterator[None]:
    """Keep Keras from collecting garbage for each kernel that it quantizes: beside other tests, that takes minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)
        yield


def outputs(model: keras.Model) -> np.ndarray:
    return np.asarray(model(prepared(tiny())))


def quantized(mode: str = "int8", **changes: Any) -> VisionTransformer:
    """Return a model quantized by Keras, without a warning about the layers that have no kernel."""
    model = built(**changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.quantize(mode)
    return model


# ---- quantize


@pytest.mark.parametrize("mode", full_except(["int8"], MODES))
def test_a_quantized_model_is_saved_and_loaded(tmp_path: Path, mode: str) -> None:
    model, exact = quantized(mode, **RICH), outputs(built(**RICH))
    found = outputs(model)
    assert {layer.quantization_mode for layer in model._flatten_layers()} == {None, mode}
    assert 0 < np.abs(found - exact).max() < MODES[mode] * np.abs(exact).max()
    model.save(tmp_path / "vit.keras")
    model.save_weights(tmp_path / "vit.weights.h5")
    weights_only = built(**RICH)
    weights_only.load_weights(tmp_path / "vit.weights.h5")
    for other in (
        keras.models.load_model(tmp_path / "vit.keras"),
        converters.load(tmp_path / "vit.keras"),
        model.with_config(model.config),
        weights_only,
    ):
        np.testing.assert_array_equal(outputs(other), found)


@pytest.mark.parametrize("part", [False, True])
def test_a_model_around_a_quantized_one_is_saved_and_loaded(tmp_path: Path, part: bool) -> None:
    vit = built()
    output = vit.get_layer("block_0").output if part else keras.layers.Dense(3)(vit(vit.input))
    model = keras.Model(vit.input, output)
    with warnings.catch_warnings(), quick_collections():
        warnings.simplefilter("ignore")  # Keras names every layer without a dense kernel
        model.quantize("int8", filters="^(?!.*(key|block_0.mlp)).*$")
    model.save(tmp_path / "around.keras")
    np.testing.assert_array_equal(outputs(keras.models.load_model(tmp_path / "around.keras")), outputs(model))


@pytest.fixture(scope="module")
def int8() -> VisionTransformer:
    return quantized()


def test_the_settings_of_a_quantizer_are_saved(tmp_path: Path, int8: VisionTransformer) -> None:
    model = built()
    model.quantize(config=keras.quantizers.Int8QuantizationConfig(activation_quantizer=None), filters="dense|head")
    model.save(tmp_path / "vit.keras")
    again = keras.models.load_model(tmp_path / "vit.keras")
    np.testing.assert_array_equal(outputs(again), outputs(model))
    assert again.get_layer("block_0").attention.query.quantization_mode is None
    assert np.abs(outputs(again) - outputs(int8)).max() > 0


def test_another_head_of_a_quantized_model_is_new_and_not_quantized(int8: VisionTransformer) -> None:
    other = int8.with_config(int8.config.replace(num_classes=3, image_size=48))
    assert other.get_layer("head").quantization_mode is None
    kernel = other.get_layer("block_1").mlp.dense2._kernel
    np.testing.assert_array_equal(kernel, int8.get_layer("block_1").mlp.dense2._kernel)


def test_only_keras_quantizers_are_loaded() -> None:
    saved = {"dense1": {"module": "keras.layers", "class_name": "Dense", "config": {"units": 9}}}
    store = {"quantization": np.frombuffer(json.dumps(saved).encode(), np.uint8)}
    with pytest.raises(ValueError, match=r"Only the quantizers in keras.quantizers .* Received: 'Dense'"):
        load_quantization(store, [keras.layers.Dense(3, name="dense1")])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda model, path: converters.save(model, path, format="google"), "The google format holds floating-point"),
        (lambda model, path: export.tflite(model, path, quantize="none"), "tflite: quantize='none' starts from float"),
        (export.saved_model, "saved_model starts from floating-point"),
        (lambda model, _: adapt_model(train.recipe("digits"), model, num_classes=5), "A recipe trains floating-point"),
    ],
)
def test_what_needs_floats_refuses_a_quantized_model(
    tmp_path: Path, int8: VisionTransformer, task: Callable[[VisionTransformer, Path], object], message: str
) -> None:
    with pytest.raises(ValueError, match=f"{message}.*block_0/"):
        task(int8, tmp_path / "vit")
    assert not list(tmp_path.iterdir())


def test_modes_that_images_cannot_use_are_refused_before_anything_changes() -> None:
    model = built()
    before = outputs(model)
    with pytest.raises(ValueError, match=r"Received: 'gptq'. For .* export.tflite\(model, path, quantize=\"int8\""):
        model.quantize(config=keras.quantizers.GPTQConfig(dataset=["text"], tokenizer=None))
    assert {layer.quantization_mode for layer in model._flatten_layers()} == {None}
    np.testing.assert_array_equal(outputs(model), before)
    with pytest.raises(ValueError, match=r"then model.quantize\('int8'\) .* Received: 'int8_from_float32'"):
        VisionTransformer(tiny(), dtype="int8_from_float32")


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


def test_a_model_with_lora_is_saved_with_its_updates(tmp_path: Path, lora: VisionTransformer) -> None:
    lora.save(tmp_path / "vit.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer of the saved model had other variables
        loaded = keras.models.load_model(tmp_path / "vit.keras")
    others = [loaded, converters.load(tmp_path / "vit.keras"), lora.with_config(lora.config)]
    for format in ("google", "timm"):  # separate and joined kernels of the attention
        file = tmp_path / ("vit.npz" if format == "google" else "vit.safetensors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # timm's file does not say the GELU
            others.append(converters.load(converters.save(lora, file, format=format), config={"num_heads": 4}))
    for other in others:
        assert len(other.weights) == len(built().weights)
        np.testing.assert_allclose(outputs(other), outputs(lora), rtol=1e-5, atol=1e-5)  # float32, other order of sums


def test_a_model_with_lora_is_exported_with_its_updates(tmp_path: Path, lora: VisionTransformer) -> None:
    report = export.tflite(lora, tmp_path / "vit.tflite", quantize="none", verify=prepared(lora.config))
    assert report.cosine > 0.99999  # verified against the model with LoRA, from which the one without differs


def test_a_recipe_refuses_lora_rather_than_train_all_weights(lora: VisionTransformer) -> None:
    with pytest.raises(ValueError, match=r"model.fit trains LoRA.* Received: .*block_0/attention/out"):
        adapt_model(train.recipe("digits"), lora, num_classes=5)
