"""Models saved with Keras' own `model.save("vit.keras")`, opened as what they are."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import keras

from keras_vit.errors import CheckpointError
from keras_vit.model.vision_transformer import VisionTransformer

SUFFIX = ".keras"


def load(
    path: Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    dtype: Any = None,
) -> VisionTransformer:
    """Opens a .keras file that holds a VisionTransformer; arguments as for `converters.load`.

    Raises:
        FileNotFoundError: where there is no file.
        CheckpointError: where it is damaged or holds another model.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no model file {str(path)!r}")
    try:
        model = keras.saving.load_model(path, compile=False)
    except (ValueError, TypeError, KeyError, OSError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} cannot be opened as a Keras model: {reason}") from error
    if not isinstance(model, VisionTransformer):
        raise CheckpointError(
            f"{path} holds no VisionTransformer. Received: {type(model).__name__}; keras.saving.load_model opens it"
        )
    sizes = {"image_size": image_size, "num_classes": num_classes}
    config = model.config.replace(**{name: value for name, value in sizes.items() if value is not None})
    return model if config == model.config and dtype is None else model.rebuilt(config, dtype=dtype)
