"""Recognise and load models of maps that `model.save` or a training run has written, as the commands are given them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.converters.containers import KerasContainer, read_keras_config
from keras_vit.converters.source import check_size, find_weights, is_keras_file, keras_errors, plain_arguments
from keras_vit.model.config import ViTConfig

if TYPE_CHECKING:
    from keras_vit.dense.model import DenseModel


def read_backbone_config(path: Path) -> ViTConfig | None:
    """Return the config of the backbone of a stored model of maps, from headers; None for other files."""
    file = find_weights(path)
    if not is_keras_file(file):
        return None
    values = read_keras_config(file)
    with keras_errors(file):
        if values.get("registered_name") != "keras_vit>DenseModel":
            return None
        return ViTConfig(**values["config"]["backbone"]["config"])


def load_stored(path: Path, changes: Mapping[str, Any]) -> DenseModel:
    """Load a stored model of maps; of the changes that a command may ask for, only `image_size` is possible."""
    from keras_vit.converters.loading import load_keras_weights
    from keras_vit.dense.model import DenseModel

    if others := changes.keys() - {"image_size"}:
        raise ValueError(f"A model of maps can change its image_size only. Received: {', '.join(sorted(others))}")
    file = find_weights(path)
    values = read_keras_config(file)
    with keras_errors(file), KerasContainer(file) as weights:
        backbone = plain_arguments(values["config"]["backbone"], "DenseModel")
        check_size(weights, ViTConfig(**backbone["config"]))
        model = DenseModel.from_config({**values["config"], "backbone": backbone})
        load_keras_weights(model, weights, allow_nonfinite=True)
    return model.resized(changes["image_size"]) if changes else model
