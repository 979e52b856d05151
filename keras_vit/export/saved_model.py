"""SavedModels: every weight once, served by TensorFlow with neither Keras nor this package."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import keras

from keras_vit.config import pair
from keras_vit.export.report import Report
from keras_vit.export.verify import verify


def servable(model: keras.Model) -> Any:
    """A tf.Module with the model's weights and one function of prepared images, batch open.

    It holds the TensorFlow variables themselves: behind Keras's wrappers the C++ loader does not find them, and
    `model.export` stores each of them twice (keras issue 23553).

    Returns:
        the module; its `serve` takes float32 images (batch, height, width, channels) and returns {"logits": ...}.
    """
    import tensorflow as tf

    height, width = pair(model.config.image_size, "image_size")
    spec = tf.TensorSpec((None, height, width, model.config.num_channels), tf.float32, name="images")
    module = tf.Module()
    module.weights = [variable.value for variable in model.variables]
    module.serve = tf.function(lambda images: {"logits": model(images, training=False)}, input_signature=[spec])
    return module


def saved_model(model: keras.Model, path: str | os.PathLike[str]) -> Report:
    """Writes a SavedModel whose signature `serving_default` takes prepared images and returns logits, and runs it.

    Args:
        model: a VisionTransformer.
        path: of the folder; it appears complete and verified, or not at all.

    Returns:
        how it compares with the model.

    Raises:
        FileExistsError: where something is there already.
        VerificationError: where its outputs are not the model's.
    """
    import tensorflow as tf

    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} is there already: remove it, or write the next version beside it")
    path.parent.mkdir(parents=True, exist_ok=True)
    module = servable(model)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        tf.saved_model.save(module, str(work), signatures={"serving_default": module.serve})
        report = verify(model, work)
        work.chmod(0o755)  # mkdtemp's folders are private; a server runs as somebody else
        work.replace(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return dataclasses.replace(report, path=path)
