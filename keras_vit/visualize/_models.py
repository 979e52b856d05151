"""Find the VisionTransformer in a Keras model, and check the images for it."""

from typing import Any

import keras
import numpy as np

from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer

# Bytes of attention weights or tokens computed at once: the weights of 11 images of ViT-B/16 at 224 pixels.
MAX_BYTES = 2**28


def vision_transformer(model: Any) -> VisionTransformer:
    """Find the one VisionTransformer that a Keras model is or contains at any depth, or raise a ValueError."""
    if isinstance(model, VisionTransformer):
        return model
    parts = model._flatten_layers() if isinstance(model, keras.layers.Layer) else []
    found = list({id(part): part for part in parts if isinstance(part, VisionTransformer)}.values())
    if len(found) != 1:
        names = f" with {[part.name for part in found]}; pass one of them" if found else ""
        raise ValueError(
            "visualize takes a VisionTransformer, or a Keras model with exactly one among its layers. "
            f"Received: {type(model).__name__}{names}"
        )
    return found[0]


def check_inputs(model: Any, images: Any) -> tuple[VisionTransformer, np.ndarray]:
    """Find the VisionTransformer of a model, and check prepared images; raise a ValueError for others."""
    model = vision_transformer(model)
    expected = (*model.config.size, model.config.num_channels)
    try:
        array = keras.ops.convert_to_numpy(images)
    except (TypeError, ValueError):  # images of several sizes, or no images
        array = np.array(None)
    is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    if not is_float or array.ndim != 4 or array.shape[1:] != expected or not len(array):
        received = f"{array.dtype} of shape {array.shape}" if array.dtype.kind in "biufV" else type(images).__name__
        raise ValueError(
            f"images must be prepared floats (batch, {', '.join(map(str, expected))}): `model.preprocess(images)` "
            f"prepares one or several pictures. Received: {received}"
        )
    return model, array


def split_batch(config: ViTConfig, images: np.ndarray) -> list[np.ndarray]:
    """Split images into batches whose attention weights and tokens of all blocks have at most MAX_BYTES each."""
    numbers = config.num_tokens * max(config.hidden_size, config.num_heads * config.num_tokens)
    step = max(1, MAX_BYTES // (4 * max(1, config.num_layers) * numbers))
    return [images[start : start + step] for start in range(0, len(images), step)]


def to_float32(tensor: Any) -> np.ndarray:
    """Convert a tensor of any dtype to a float32 array."""
    return keras.ops.convert_to_numpy(tensor).astype(np.float32, copy=False)
