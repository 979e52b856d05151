"""What Keras and TensorFlow restore is what they saved: every variable of every kind of model, and LoRA that learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dense_cases import MAPS
from dense_cases import load as load_maps
from keras_vit import VisionTransformer, dense
from keras_vit.model.layers.attention import MergeHeads, SplitHeads
from keras_vit.model.layers.block import Dense
from marks import full_except
from places import DATA
from text_cases import small_encoder
from tiny_models import FAMILIES, OTHERS, VARIANTS, built, prepared, tiny

CONFIGS = {**VARIANTS, **FAMILIES, **OTHERS}
EOMT = DATA / "eomt" / "eomt_2"


class Around(keras.Model):
    """A user's model around ours."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = built(distilled=True)
        self.mine = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.mine(self.vit(x))


def around_subclassed() -> keras.Model:
    model = Around()
    model(prepared(tiny()))
    return model


def around_functional() -> keras.Model:
    model = built(**FAMILIES["several class tokens"])
    images = keras.Input(model.input_shape[1:])
    return keras.Model(images, keras.layers.Dense(3)(model(images)))


def with_lora() -> VisionTransformer:
    model = built()
    enable_lora(model)
    return model


def enable_lora(model: Any) -> list[Any]:
    """Enable LoRA in layers of each class that has it."""
    block = model.get_layer("block_0")
    layers = [block.attention.query, block.attention.out, block.mlp.dense1, model.get_layer("head")]
    assert [type(layer) for layer in layers] == [SplitHeads, MergeHeads, Dense, keras.layers.Dense]
    for layer in layers:
        layer.enable_lora(rank=2)
    return layers


MODELS: dict[str, Callable[[], keras.Model]] = {
    **{name: lambda fields=fields: built(**fields) for name, fields in CONFIGS.items()},
    **{f"text, {text}": lambda text=text: small_encoder(text) for text in ("tok_clip", "tok_siglip2")},
    **{f"maps, {name}": lambda name=name: load_maps(name) for name in MAPS},
    "maps, new": lambda: dense.segmenter(built(num_registers=2, position_prefix=False), 3),
    "segments": lambda: dense.load(EOMT),
    "LoRA": with_lora,
    "around, functional": around_functional,
    "around, subclassed": around_subclassed,
}
QUICK = ["distilled", "registers", "several class tokens", "hybrid", "text, tok_clip", "maps, new", "segments"]
QUICK += ["LoRA", "around, functional", "around, subclassed"]


@pytest.mark.parametrize("kind", full_except(QUICK, MODELS))
def test_a_checkpoint_of_tensorflow_holds_every_variable(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    before = [np.array(variable) for variable in model.weights]
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    stored = [name for name, _ in tf.train.list_variables(path) if name.startswith("model/")]
    assert len(stored) >= len(before)
    for variable in model.weights:
        variable.assign(variable + 1)
    tf.train.Checkpoint(model=model).read(path).assert_existing_objects_matched().assert_consumed()
    for variable, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(variable, value, err_msg=variable.path)


# ---- LoRA


def learned(model: keras.Model, layers: list[Any]) -> None:
    """Check that three steps of training change both matrices of LoRA."""
    before = [np.array(matrix) for layer in layers for matrix in (layer.lora_kernel_a, layer.lora_kernel_b)]
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(prepared(tiny()), np.zeros((2, *model.output_shape[1:])), epochs=3, verbose=0)
    after = [matrix for layer in layers for matrix in (layer.lora_kernel_a, layer.lora_kernel_b)]
    for then, now in zip(before, after, strict=True):
        assert (np.asarray(now) != then).mean() > 0.9


def test_lora_learns_after_load_weights_which_changes_no_output(tmp_path: Path) -> None:
    model, images = built(), prepared(tiny())
    layers = enable_lora(model)
    learned(model, layers)
    expected = np.asarray(model(images))
    model.save_weights(tmp_path / "model.weights.h5")
    for layer in layers:
        layer.lora_kernel_a.assign(np.full(layer.lora_kernel_a.shape, np.nan))  # of a run that failed
    model.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(model(images), expected, atol=1e-5)  # float32: the kernels have the updates now
    for layer in layers:
        np.testing.assert_array_equal(layer.lora_kernel_b, 0)
        np.testing.assert_array_equal(layer.kernel, layer._kernel)
    learned(model, layers)


@pytest.mark.full
def test_lora_learns_after_load_model(tmp_path: Path) -> None:
    model, images = with_lora(), prepared(tiny())
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(images), model(images), atol=1e-5)
    learned(loaded, enable_lora(loaded))
    # A layer that is loaded by its own config has its LoRA again.
    layer = Dense(3)
    alone = keras.Sequential([keras.Input((32, 32, 3)), layer])
    layer.enable_lora(rank=2)
    alone.save(tmp_path / "alone.keras")
    again = keras.models.load_model(tmp_path / "alone.keras")
    np.testing.assert_allclose(again(images), alone(images), atol=1e-5)
    learned(again, again.layers)
