"""What every array starts from: the VisionTransformer in a Keras model, and images as it takes them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer

AT_ONCE = 2**28  # bytes: 11 images of ViT-B/16 at 224 pixels; an image of ViT-L/16 at 384 pixels takes twice as many


def vision_transformer(model: Any) -> VisionTransformer:
    """The VisionTransformer that a Keras model is or contains.

    Args:
        model: a VisionTransformer, or a Keras model with exactly one among its layers, however deep.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(model, VisionTransformer):
        return model
    parts = model._flatten_layers() if isinstance(model, keras.layers.Layer) else []
    found = list({id(part): part for part in parts if isinstance(part, VisionTransformer)}.values())
    if len(found) != 1:
        names = f" with {[part.name for part in found]}; pass the one to look at" if found else ""
        raise ValueError(
            "visualize takes a VisionTransformer, or a Keras model with exactly one among its layers. "
            f"Received: {type(model).__name__}{names}"
        )
    return found[0]


def ready(model: Any, images: Any) -> tuple[VisionTransformer, np.ndarray]:
    """The VisionTransformer of a model, and the images, found to be what it takes.

    Args:
        model: as for `vision_transformer`.
        images: prepared floats (batch, height, width, channels), of the VisionTransformer's own size. Layers that a
            wrapping model has in front of it are not applied.

    Raises:
        ValueError: where the images are not prepared for this model.
    """
    model = vision_transformer(model)
    wanted = (*model.config.size, model.config.num_channels)
    try:
        array = keras.ops.convert_to_numpy(images)
    except (TypeError, ValueError):  # images of several sizes, or none
        array = np.array(None)
    floats = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    if not floats or array.ndim != 4 or array.shape[1:] != wanted or not len(array):
        received = f"{array.dtype} of shape {array.shape}" if array.dtype.kind in "biufV" else type(images).__name__
        raise ValueError(
            f"images are prepared floats (batch, {', '.join(map(str, wanted))}): `model.preprocess(images)` makes them "
            f"of pictures, of one or several. Received: {received}"
        )
    return model, array


def in_parts(config: ViTConfig, images: np.ndarray) -> list[np.ndarray]:
    """Images in batches of which the attention weights take AT_ONCE bytes at most: of a large model, one by one."""
    of_one = 4 * config.num_layers * config.num_heads * config.num_tokens**2
    step = max(1, AT_ONCE // of_one)
    return [images[start : start + step] for start in range(0, len(images), step)]


def float32(tensor: Any) -> np.ndarray:
    """A tensor of the model, of whatever dtype policy, as a float32 array."""
    return keras.ops.convert_to_numpy(tensor).astype(np.float32, copy=False)
