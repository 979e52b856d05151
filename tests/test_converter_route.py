"""TensorFlow's own converter runs in another process with a time limit, and its files are verified."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_vit import export
from keras_vit.errors import ConverterError
from keras_vit.export import _converter
from keras_vit.export.check import inputs
from keras_vit.export.check.structure import read_structure
from tiny_models import built, prepared


@pytest.fixture(scope="module")
def own() -> keras.Model:
    """Return a user's Keras model around one of ours: no config, and a layer that another process does not know."""
    vit = built(num_layers=1, num_classes=0)

    class Doubled(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return 2 * x

    image = keras.Input((32, 32, 3))
    return keras.Model(image, keras.layers.Dense(4, activation="tanh")(Doubled()(vit(image))))


def test_a_model_of_ones_own_is_converted_and_proven(tmp_path: Path, own: keras.Model) -> None:
    path = tmp_path / "own.tflite"
    report = export.tflite(own, path, quantize="none", route="converter")
    images = prepared(built().config, batch=3)
    received = export.runner(path)(images)
    # float32 in another order of additions: measured below 1e-6.
    np.testing.assert_allclose(received, own.predict_on_batch(images), atol=1e-5)
    assert (report.mode, report.images, report.agreement) == ("none", inputs.NUM_SAMPLES, 1.0)
    assert report.max_error < 1e-5
    assert [file.name for file in tmp_path.iterdir()] == ["own.tflite"]
    assert read_structure(path).max_rank <= 4


def test_a_route_of_no_name_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"route must be one of \['direct', 'converter'\]. Received: 'onnx'"):
        export.tflite(built(num_layers=1), tmp_path / "out.tflite", route="onnx")


def test_all_that_the_converter_cannot_do_is_said_at_once(tmp_path: Path, own: keras.Model) -> None:
    with pytest.raises(ValueError, match="input_dtype='uint8', output='probabilities', attention, labels.*'int8'"):
        export.tflite(
            own,
            tmp_path / "out.tflite",
            route="converter",
            quantize="int8",
            input_dtype="uint8",
            output="probabilities",
            attention=True,
            labels=["a", "b", "c", "d"],
        )
    assert not list(tmp_path.iterdir())


def test_a_model_of_ones_own_has_no_other_size(tmp_path: Path, own: keras.Model) -> None:
    with pytest.raises(ValueError, match="image_size is for VisionTransformers. Received: "):
        export.tflite(own, tmp_path / "out.tflite", image_size=64)


class Subclassed(keras.Model):
    def call(self, x: Any) -> Any:
        return x


def two_outputs() -> keras.Model:
    image = keras.Input((8, 8, 3))
    flat = keras.layers.Flatten()(image)
    return keras.Model(image, [flat, flat])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Subclassed, "must take one image .* of a known size; `keras.Model.*Received: Subclassed"),
        (lambda: keras.Sequential([keras.layers.Flatten()]), "Received: Sequential with input shape None"),
        (lambda: keras.Model(image := keras.Input((None, None, 3)), image), r"input shape \(None, None, None, 3\)"),
        (two_outputs, "the model must have one output, the logits. Received: 2"),
        (lambda: built("mixed_bfloat16", num_layers=1), r"compute in float32. Received: some in \['bfloat16'\]"),
        (lambda: "vit.keras", "model must be a Keras model. Received: str"),
    ],
)
def test_a_model_that_cannot_be_converted_is_told_why(model: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        export.tflite(model(), tmp_path / "out.tflite", quantize="none", route="converter")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "timeout", "said"),
    [
        ("import time; time.sleep(60)", 0.5, "was not done after 0.5 seconds"),
        ("raise SystemExit('no room')", 60, "failed: no room"),
        ("import os; os.abort()", 60, "failed: exit status -6"),
    ],
)
def test_a_converter_that_fails_is_one_error(
    script: str, timeout: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_converter, "_save", lambda *_: None)
    monkeypatch.setattr(_converter, "_CONVERT", script)
    with pytest.raises(ConverterError, match=said):
        _converter.convert(built(num_layers=1), tmp_path / "out.tflite", mode="none", timeout=timeout)
    assert not list(tmp_path.iterdir())


def test_an_interrupt_ends_the_converter_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_converter, "_save", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export.tflite(built(num_layers=1), tmp_path / "out.tflite", quantize="none", route="converter")
    assert not list(tmp_path.iterdir())


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
