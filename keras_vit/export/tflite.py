"""TFLite files by TensorFlow's own converter, one image a call."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import keras

from keras_vit.export.report import Report
from keras_vit.export.saved_model import servable
from keras_vit.export.verify import verify as verify_file

MODES = ("none", "float16", "dynamic")


def tflite(
    model: keras.Model, path: str | os.PathLike[str], *, quantize: str = "dynamic", verify: Any = None
) -> Report:
    """Writes a TFLite file that takes one prepared image (1, height, width, channels) and returns logits, and runs it.

    Args:
        model: a VisionTransformer. The converter needs about 40 times its weights in memory.
        path: of the file; it appears complete and verified, or not at all.
        quantize: "none" (float32), "float16" (half the size, no faster) or "dynamic" (int8 weights, float activations).
        verify: prepared images to compare the file with the model on; None means noise.

    Returns:
        how it compares with the model.

    Raises:
        ValueError: for an unknown mode.
        VerificationError: where its outputs are not the model's.
    """
    import tensorflow as tf

    if quantize not in MODES:
        raise ValueError(f"quantize is one of {list(MODES)}. Received: {quantize!r}")
    module = servable(model)
    shape = (1, *model.input_shape[1:])
    concrete = module.serve.get_concrete_function(tf.TensorSpec(shape, tf.float32, name="images"))
    # The module, not the model: given a Keras 3 model the converter writes a small file whose outputs are NaN.
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], module)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    if quantize != "none":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if quantize == "float16":
        converter.target_spec.supported_types = [tf.float16]
    path = Path(path)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        work = Path(folder) / path.name
        work.write_bytes(converter.convert())
        report = verify_file(model, work, verify)
        work.replace(path)
    return dataclasses.replace(report, path=path)
