"""Every writer of LiteRT files declares the fields of its layers; what nobody has declared is refused by its name."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import export
from keras_vit.export.litert import head, writer
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.images import add_image_input
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.plan import FilePlan
from keras_vit.export.litert.writer import HONOURED
from keras_vit.model import layers as vit
from keras_vit.model.config import BlockConfig, Preprocessing, ViTConfig
from keras_vit.model.layers.position_variants import Rotary
from tiny_models import TINY, built, prepared

assert head.WRITERS  # importing it registers all writers
OURS = [kind for kind in HONOURED if kind.__module__.startswith("keras_vit") and issubclass(kind, keras.layers.Layer)]


def arguments(kind: type) -> set[str]:
    """Return the arguments of a class and of its bases that are not Keras' own."""
    kinds = [one for one in kind.__mro__ if one.__module__.startswith("keras_vit") and "__init__" in vars(one)]
    names = {name for one in kinds for name in inspect.signature(vars(one)["__init__"]).parameters}
    return {name for name in names - {"self", "kwargs"} if not name.endswith(writer.TRAINING_FIELDS)}


def test_the_arguments_of_every_layer_and_config_are_declared() -> None:
    for config in (BlockConfig, Preprocessing, Rotary):
        assert set(HONOURED[config]) == {one.name for one in dataclasses.fields(config)}, config
    missing, stale = {}, {}
    for kind in OURS:
        expected = arguments(kind)
        if kind is vit.EncoderBlock:
            expected = expected - {"config"} | set(HONOURED[BlockConfig])
        base = next(one for one in kind.__mro__ if one.__module__.startswith("keras."))
        missing[kind] = expected - set(HONOURED[kind])
        stale[kind] = set(HONOURED[kind]) - expected - set(inspect.signature(base).parameters)
        stale[kind] -= {"lora_rank", "lora_alpha", "rms_scaling", "seed", "noise_shape"}  # Keras', in some versions
    assert missing == stale == dict.fromkeys(OURS, set())
    assert set(writer._WRITERS) <= set(HONOURED) and len(OURS) > 20


# ---- trials: what a change of the model does to the writers


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostNormConfig(BlockConfig):
    """A block's config with a field that no writer knows."""

    post_norm: bool = False


class Reducing(vit.TokenPooling):
    """A pooling with an argument that no writer knows."""

    def __init__(self, *, reduce: Literal["mean", "max"] = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reduce = reduce


class Doubled(keras.layers.Layer):
    """A user's own layer."""

    def call(self, x: Any) -> Any:
        return 2 * x


def pooled(layer: keras.layers.Layer) -> keras.Model:
    """Return a model with another layer on the tokens of ours."""
    backbone = built(num_layers=1)
    return keras.Model(backbone.input, layer(backbone.get_layer("encoder_norm").output))


def test_a_new_field_argument_or_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.tflite"
    for post_norm in (True, False):
        model = built()
        block = model.get_layer("block_1")
        block.config = PostNormConfig(**block.config.to_dict(), post_norm=post_norm)
        with pytest.raises(ValueError, match=f"layer 'block_1', .* model: post_norm={post_norm}"):
            export.tflite(model, path, quantize="none")

    with pytest.raises(ValueError, match=r"no LiteRT writer for the layer 'pooled'.*Reducing"):
        export.tflite(pooled(Reducing(reduce="max", name="pooled")), path, quantize="none")
    # As if it were our class itself that has the new argument.
    monkeypatch.setitem(HONOURED, Reducing, HONOURED[vit.TokenPooling])
    monkeypatch.setitem(writer._WRITERS, Reducing, writer._WRITERS[vit.TokenPooling])
    with pytest.raises(ValueError, match="pooled', .*: reduce='max'"):
        export.tflite(pooled(Reducing(reduce="max", name="pooled")), path, quantize="none")

    model = built()
    mlp = model.get_layer("block_0").mlp
    mlp._tracker.unlock()
    mlp.extra = Doubled(name="doubled")
    with pytest.raises(ValueError, match=r"layer 'block_0' with a Doubled in it, 'doubled'"):
        export.tflite(model, path, quantize="none")
    assert not list(tmp_path.iterdir())


def test_what_keras_own_layers_can_do_and_files_cannot_is_refused(tmp_path: Path) -> None:
    for layer, said in (
        (keras.layers.ReLU(max_value=6.0), "max_value=6.0"),
        (keras.layers.ReLU(negative_slope=0.1), "negative_slope=0.1"),
        (vit.LayerNormalization(center=False), "center=False"),
        (vit.LayerNormalization(is_rms=True, scale=False), "scale=False"),
        (vit.LayerNormalization(axis=1), r"axis=\[?1"),
        (keras.layers.BatchNormalization(axis=1), "axis=1"),
        (keras.layers.Dense(3, activation="softmax"), "'softmax'"),
        (vit.MLP(8, activation="relu"), "no LiteRT writer for the layer 'mlp.*MLP"),
    ):
        with pytest.raises(ValueError, match=said):
            export.tflite(pooled(layer), tmp_path / "out.tflite", quantize="none")
    assert not list(tmp_path.iterdir())


def test_a_new_field_of_the_preprocessing_is_refused_for_files_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Gamma(Preprocessing):
        gamma: float = 1.0

    monkeypatch.setitem(HONOURED, Gamma, HONOURED[Preprocessing])
    config = ViTConfig(**TINY, preprocessing=Gamma(gamma=2.2))
    add_image_input(Operators(Builder()), config, FilePlan())
    with pytest.raises(ValueError, match="Preprocessing: {'gamma': 2.2}"):
        add_image_input(Operators(Builder()), config, FilePlan(input_dtype="uint8"))


# ---- models without writers


@pytest.mark.full
def test_the_lines_in_the_error_convert_and_verify_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a user's: a layer of its own around one of ours."""
    monkeypatch.chdir(tmp_path)
    image = keras.Input((32, 32, 3))
    vision = built(num_layers=1, num_classes=0)
    model = keras.Model(image, keras.layers.Dense(4, activation="tanh")(Doubled()(vision(image))))
    with pytest.raises(ValueError, match="no LiteRT writer for the layer") as caught:
        export.tflite(model, "out.tflite", quantize="none")
    lines = str(caught.value).partition("verify the file: ")[2]
    exec(lines, {"model": model, "pathlib": pathlib, "tf": tf, "keras_vit": keras_vit})
    images = prepared(vision.config, batch=3)
    received = export.runner("model.tflite")(images)
    # float32 in another order of additions: measured below 1e-6.
    np.testing.assert_allclose(received, model.predict_on_batch(images), atol=1e-5)
    report = export.verify(model, "model.tflite", images)
    assert (report.mode, report.agreement) == ("none", 1.0)


@pytest.mark.full
def test_the_converters_file_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    # If the converter also gets the Keras model, it does not find the variables, and gives no error.
    model = built(num_layers=1)
    call = tf.function(lambda image: {"logits": model(image)})
    concrete = call.get_concrete_function(tf.TensorSpec((1, 32, 32, 3), tf.float32, name="image"))
    lite = tf.lite.TFLiteConverter.from_concrete_functions([concrete], model)
    lite.optimizations = [tf.lite.Optimize.DEFAULT]
    path = tmp_path / "nan.tflite"
    path.write_bytes(lite.convert())
    with pytest.raises(export.VerificationError, match=r"nan.tflite reads variables.*READ_VARIABLE.*computes NaN"):
        export.verify(model, path)


class Subclassed(keras.Model):
    def call(self, x: Any) -> Any:
        return x


def test_a_model_that_cannot_be_written_is_told_why(tmp_path: Path) -> None:
    image, anything = keras.Input((8, 8, 3)), keras.Input((None, None, 3))
    flat = keras.layers.Reshape((-1,))(image)
    for model, said in (
        (Subclassed(), "Received: Subclassed"),
        (keras.Sequential([keras.layers.Flatten()]), "Received: Sequential with input shape None"),
        (keras.Model(anything, anything), r"input shape \(None, None, None, 3\)"),
        (keras.Model(image, [flat, flat]), "one output. Received: 2"),
    ):
        with pytest.raises(ValueError, match=said):
            export.tflite(model, tmp_path / "out.tflite", quantize="none")
    assert not list(tmp_path.iterdir())
