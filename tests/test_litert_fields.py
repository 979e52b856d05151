"""Every writer of LiteRT files declares the fields of its layers; what nobody has declared is refused by its name."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import pytest

from keras_vit import export
from keras_vit.export.litert import emit, writer
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.images import add_image_input
from keras_vit.export.litert.operators import Operators
from keras_vit.export.litert.options import Options
from keras_vit.export.litert.writer import HONOURED
from keras_vit.model import layers as vit
from keras_vit.model.config import BlockConfig, Preprocessing, ViTConfig
from keras_vit.model.layers.position_variants import Rotary
from tiny_models import TINY, built, prepared

assert emit.WRITERS  # importing it registers all writers
CONFIGS = [BlockConfig, Preprocessing, Rotary]
OURS = [kind for kind in HONOURED if kind.__module__.startswith("keras_vit") and issubclass(kind, keras.layers.Layer)]


def arguments(kind: type) -> set[str]:
    """Return the arguments of a class and of its bases that are not Keras' own."""
    kinds = [one for one in kind.__mro__ if one.__module__.startswith("keras_vit") and "__init__" in vars(one)]
    names = {name for one in kinds for name in inspect.signature(vars(one)["__init__"]).parameters}
    return {name for name in names - {"self", "kwargs"} if not name.endswith(writer.TRAINING_FIELDS)}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_fields_of_a_config_are_all_declared(kind: type) -> None:
    assert set(HONOURED[kind]) == {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", OURS)
def test_the_arguments_of_a_layer_are_all_declared(kind: type) -> None:
    expected = arguments(kind)
    if kind is vit.EncoderBlock:
        expected = expected - {"config"} | set(HONOURED[BlockConfig])
    missing = expected - set(HONOURED[kind])
    base = next(one for one in kind.__mro__ if one.__module__.startswith("keras."))
    stale = set(HONOURED[kind]) - expected - set(inspect.signature(base).parameters)
    assert not missing
    assert not stale - {"lora_rank", "lora_alpha", "rms_scaling", "seed", "noise_shape"}  # Keras' own, in some versions


def test_every_layer_that_has_a_writer_is_declared() -> None:
    assert set(writer._WRITERS) <= set(HONOURED)
    assert len(OURS) > 20


# ---- trials: what a change of the model does to the writers


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostNormConfig(BlockConfig):
    """A block's config with a field that no writer knows."""

    post_norm: bool = False


@pytest.mark.parametrize("post_norm", [True, False])
def test_a_new_field_of_a_block_is_refused(post_norm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    block = model.get_layer("block_1")
    block.config = PostNormConfig(**block.config.to_dict(), post_norm=post_norm)
    with pytest.raises(
        ValueError, match=f"EncoderBlock does not know .* layer 'block_1', .* model: post_norm={post_norm}"
    ):
        export.tflite(model, tmp_path / "out.tflite", quantize="none")
    assert not list(tmp_path.iterdir())


class Reducing(vit.TokenPooling):
    """A pooling with an argument that no writer knows."""

    def __init__(self, *, reduce: Literal["mean", "max"] = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reduce = reduce


def pooled(layer: keras.layers.Layer) -> keras.Model:
    """Return a model with another layer on the tokens of ours."""
    backbone = built(num_layers=1)
    return keras.Model(backbone.input, layer(backbone.get_layer("encoder_norm").output))


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_new_layer_or_argument_is_refused(
    is_registered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_registered:  # as if it were our class itself that has the new argument
        monkeypatch.setitem(HONOURED, Reducing, HONOURED[vit.TokenPooling])
        monkeypatch.setitem(writer._WRITERS, Reducing, writer._WRITERS[vit.TokenPooling])
    said = "pooled', .*: reduce='max'" if is_registered else r"no LiteRT writer for the layer 'pooled'.*Reducing"
    with pytest.raises(ValueError, match=said):
        export.tflite(pooled(Reducing(reduce="max", name="pooled")), tmp_path / "out.tflite", quantize="none")


def test_a_new_part_of_a_layer_is_refused(tmp_path: Path) -> None:
    class Doubled(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return 2 * x

    model = built()
    mlp = model.get_layer("block_0").mlp
    mlp._tracker.unlock()
    mlp.extra = Doubled(name="doubled")
    with pytest.raises(ValueError, match=r"layer 'block_0' with a Doubled in it, 'doubled'"):
        export.tflite(model, tmp_path / "out.tflite", quantize="none")


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (keras.layers.ReLU(max_value=6.0), "max_value=6.0"),
        (keras.layers.ReLU(negative_slope=0.1), "negative_slope=0.1"),
        (vit.LayerNormalization(center=False), "center=False"),
        (vit.LayerNormalization(axis=1), r"axis=\[?1"),
        (keras.layers.BatchNormalization(axis=1), "axis=1"),
        (keras.layers.Dense(3, activation="softmax"), "with the activation 'softmax'"),
        (vit.MLP(8, activation="relu"), None),
    ],
)
def test_what_keras_own_layers_can_do_and_files_cannot_is_refused(layer: Any, said: str | None, tmp_path: Path) -> None:
    model = pooled(layer)
    if said is None:
        said = "no LiteRT writer for the layer 'mlp.*'. Received: MLP"
    with pytest.raises(ValueError, match=said):
        export.tflite(model, tmp_path / "out.tflite", quantize="none")


def test_a_new_field_of_the_preprocessing_is_refused_for_files_of_pixels() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Gamma(Preprocessing):
        gamma: float = 1.0

    HONOURED[Gamma] = HONOURED[Preprocessing]
    config = ViTConfig(**TINY, preprocessing=Gamma(gamma=2.2))
    add_image_input(Operators(Builder()), config, Options())
    with pytest.raises(ValueError, match=r"cannot prepare pixels with these fields of Preprocessing: \{'gamma': 2.2\}"):
        add_image_input(Operators(Builder()), config, Options(input_dtype="uint8"))
    del HONOURED[Gamma]


# ---- models without writers


def test_the_lines_in_the_error_convert_and_verify_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a user's: a layer of its own around one of ours."""
    import pathlib

    import tensorflow as tf

    import keras_vit

    class Doubled(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return 2 * x

    monkeypatch.chdir(tmp_path)
    image = keras.Input((32, 32, 3))
    vision = built(num_layers=1, num_classes=0)
    model = keras.Model(image, keras.layers.Dense(4, activation="tanh")(Doubled()(vision(image))))
    with pytest.raises(ValueError, match="no LiteRT writer for the layer") as caught:
        export.tflite(model, "out.tflite", quantize="none")
    lines = str(caught.value).partition("verify the file: ")[2]
    names = {"model": model, "pathlib": pathlib, "tf": tf, "keras_vit": keras_vit}
    exec(lines, names)
    images = prepared(vision.config, batch=3)
    received = export.runner("model.tflite")(images)
    # float32 in another order of additions: measured below 1e-6.
    np.testing.assert_allclose(received, model.predict_on_batch(images), atol=1e-5)
    report = export.verify(model, "model.tflite", images)
    assert (report.mode, report.agreement) == ("none", 1.0)


def test_the_converters_file_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    # If the converter also gets the Keras model, it does not find the variables, and gives no error.
    import tensorflow as tf

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


def two_outputs() -> keras.Model:
    image = keras.Input((8, 8, 3))
    flat = keras.layers.Reshape((-1,))(image)
    return keras.Model(image, [flat, flat])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Subclassed, "must take one image .* of a known size; `keras.Model.*Received: Subclassed"),
        (lambda: keras.Sequential([keras.layers.Flatten()]), "Received: Sequential with input shape None"),
        (lambda: keras.Model(image := keras.Input((None, None, 3)), image), r"input shape \(None, None, None, 3\)"),
        (two_outputs, "the model must have one output. Received: 2"),
    ],
)
def test_a_model_that_cannot_be_written_is_told_why(model: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        export.tflite(model(), tmp_path / "out.tflite", quantize="none")
    assert not list(tmp_path.iterdir())
