"""Recognise and load models of maps that `model.save` or a training run has written, as the commands are given them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.converters.containers.archive import open_keras_archive
from keras_vit.converters.source import find_weights, is_keras_file, keras_errors
from keras_vit.model.config import ViTConfig

if TYPE_CHECKING:
    from keras_vit.dense.model import DenseModel

_REGISTERED_NAME = "keras_vit>DenseModel"


def read_backbone_config(path: Path) -> ViTConfig | None:
    """Return the config of the backbone of a stored model of maps, from headers; None for other files."""
    file = find_weights(path)
    if not is_keras_file(file):
        return None
    values, weights = open_keras_archive(file)
    with weights, keras_errors(file):
        if values.get("registered_name") != _REGISTERED_NAME:
            return None
        return ViTConfig(**values["config"]["backbone"]["config"])


def load_stored(path: Path, changes: Mapping[str, Any]) -> DenseModel:
    """Load a stored model of maps; of the changes that a command may ask for, only `image_size` is possible."""
    import keras

    from keras_vit.dense.model import DenseModel

    if others := changes.keys() - {"image_size"}:
        raise ValueError(f"A model of maps can change its image_size only. Received: {', '.join(sorted(others))}")
    file = find_weights(path)
    with keras_errors(file):
        model = keras.saving.load_model(file, custom_objects={_REGISTERED_NAME: DenseModel})
    assert isinstance(model, DenseModel)
    return model.resized(changes["image_size"]) if changes else model
