"""Write LiteRT files with TensorFlow's converter: for Keras models around a VisionTransformer, and for comparison."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import keras

from keras_vit.errors import ConverterError
from keras_vit.export.check import inputs
from keras_vit.export.quantization.modes import Mode

MODES = ("none", "float16", "dynamic")  # modes that the converter supports without calibration
UNSUPPORTED_DTYPES = {"bfloat16", "float16", "float64"}  # TFLite has no builtin operators for them
TIMEOUT = 1800  # seconds

# Needs only TensorFlow, neither Keras nor the classes of the model.
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


def problems(model: keras.Model, mode: Mode | None) -> Iterator[str]:
    """Yield one sentence for each reason why the converter cannot write the model; `mode` is None if unknown."""
    if keras.backend.backend() != "tensorflow":
        yield (
            f'route="converter" needs Keras\' TensorFlow back end. Received: {keras.backend.backend()!r}; '
            'route="direct" works on every one'
        )
    if mode is not None and mode.name not in MODES:
        yield f'route="converter" supports the modes {list(MODES)}. Received: {mode.name!r}'
    if not isinstance(model, keras.Model):
        yield f"model must be a Keras model. Received: {type(model).__name__}"
        return
    try:
        inputs.image_shape(model)
    except ValueError as error:
        yield str(error)
        return
    if len(model.outputs) != 1:
        yield f"the model must have one output, the logits. Received: {len(model.outputs)} outputs"
    if dtypes := {layer.compute_dtype for layer in model._flatten_layers()} & UNSUPPORTED_DTYPES:
        yield f"TensorFlow's converter needs layers that compute in float32. Received: some in {sorted(dtypes)}"


def convert(
    model: keras.Model, path: str | os.PathLike[str], *, mode: str, batch: int | None = 1, timeout: float = TIMEOUT
) -> None:
    """Run the converter in its own process; raise a ConverterError if it fails or takes more than `timeout` seconds.

    It needs about 40 times the memory of the weights and does not free it. `batch=None` means any number of images.
    """
    path = Path(path).absolute()
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        _save(model, folder, batch)
        command = [sys.executable, "-c", _CONVERT, folder, str(path), mode]
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONWARNINGS": "ignore"}
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **quiet}, cwd=folder
            )
        except subprocess.TimeoutExpired:
            raise ConverterError(f"TensorFlow's converter was not done after {timeout:g} seconds") from None
    if process.returncode:
        reasons = process.stderr.strip().splitlines()
        reason = reasons[-1] if reasons else f"exit status {process.returncode}, out of memory or by a signal"
        raise ConverterError(f"TensorFlow's converter failed: {reason}")


def _save(model: keras.Model, folder: str, batch: int | None) -> None:
    """Write a SavedModel of a tf.Module that holds the TensorFlow variables.

    In a Keras 3 model the converter does not find them, and writes a small file whose outputs are NaN.
    """
    import tensorflow as tf

    spec = tf.TensorSpec((batch, *model.input_shape[1:]), model.inputs[0].dtype, name="image")
    module = tf.Module()
    module.weights = [variable.value for variable in model.variables]
    module.serve = tf.function(lambda image: {"logits": model(image, training=False)}, input_signature=[spec])
    tf.saved_model.save(module, folder, signatures={"serving_default": module.serve})
