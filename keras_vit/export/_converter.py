"""TFLite files by TensorFlow's own converter: for Keras models of one's own around ours, and to compare ours with.

It runs in a process of its own: it takes some 40 times the weights in memory, which it does not give back, and a call
that hangs can be ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import keras

from keras_vit.errors import ConverterError
from keras_vit.export.check import inputs

MODES = ("none", "float16", "dynamic")  # what the converter can do without calibration
OTHER_FLOATS = {"bfloat16", "float16", "float64"}  # operators on these are not builtin ones
TIMEOUT = 1800  # seconds

# The process needs TensorFlow alone, not Keras and not the classes of the model. What it prints is its peak memory.
_CONVERT = """
import sys

import tensorflow as tf

folder, target, mode = sys.argv[1:]
converter = tf.lite.TFLiteConverter.from_saved_model(folder)
converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
if mode != "none":
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
if mode == "float16":
    converter.target_spec.supported_types = [tf.float16]
with open(target, "wb") as file:
    file.write(converter.convert())
"""


def misfits(model: keras.Model) -> Iterator[str]:
    """What keeps a model from being converted: one sentence each."""
    if not isinstance(model, keras.Model):
        yield f"model is a Keras model. Received: {type(model).__name__}"
        return
    try:
        inputs.image_shape(model)
    except ValueError as error:
        yield str(error)
        return
    if len(model.outputs) != 1:
        yield f"a model gives one output, the logits. Received: {len(model.outputs)} outputs"
    if others := {layer.compute_dtype for layer in model._flatten_layers()} & OTHER_FLOATS:
        yield f"TensorFlow's converter takes layers that compute in float32. Received: some in {sorted(others)}"


def convert(
    model: keras.Model, path: str | os.PathLike[str], *, mode: str, batch: int | None = 1, timeout: float = TIMEOUT
) -> None:
    """Converts a Keras model of one image input and one output; the file's signature is `image` -> `logits`.

    Args:
        model: any, on Keras' TensorFlow back end.
        path: of the file to write. The caller sees to it that an interrupted one is not taken for a whole one.
        mode: one of MODES.
        batch: images a call; None for any number.
        timeout: seconds, after which the converter is ended.

    Raises:
        ConverterError: where it fails or takes longer; with the converter's own last words.
        ValueError: on another back end.
    """
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f'route="converter" needs Keras\' TensorFlow back end. Received: {keras.backend.backend()!r}; '
            'route="direct" works on every one'
        )
    path = Path(path).absolute()
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        _save(model, folder, batch)
        command = [sys.executable, "-c", _CONVERT, folder, str(path), mode]
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONWARNINGS": "ignore"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **quiet}, cwd=folder
            )
        except subprocess.TimeoutExpired:
            raise ConverterError(f"TensorFlow's converter was not done after {timeout:g} seconds") from None
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}, by memory or a signal"]
        raise ConverterError(f"TensorFlow's converter failed: {words[-1]}")


def _save(model: keras.Model, folder: str, batch: int | None) -> None:
    """A SavedModel of a tf.Module that holds the TensorFlow variables themselves.

    Given the Keras 3 model, the converter does not find its variables and writes a small file whose outputs are NaN.
    """
    import tensorflow as tf

    spec = tf.TensorSpec((batch, *model.input_shape[1:]), model.inputs[0].dtype, name="image")
    module = tf.Module()
    module.weights = [variable.value for variable in model.variables]
    module.serve = tf.function(lambda image: {"logits": model(image, training=False)}, input_signature=[spec])
    tf.saved_model.save(module, folder, signatures={"serving_default": module.serve})
