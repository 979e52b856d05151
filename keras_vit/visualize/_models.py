"""Find the VisionTransformer in a Keras model, and check the images for it."""

from typing import Any

import keras
import numpy as np

from keras_vit.model.config import ViTConfig, check_attention
from keras_vit.model.vision_transformer import VisionTransformer

# Bytes of attention weights computed at once: those of 11 images of ViT-B/16 at 224 pixels. One image of ViT-L/16 at
# 384 pixels takes twice as many.
MAX_ATTENTION_BYTES = 2**28


def vision_transformer(model: Any) -> VisionTransformer:
    """Return the one VisionTransformer that a Keras model is or contains at any depth, or raise a ValueError."""
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
    """Return the VisionTransformer of a model, and the images as an array.

    Raise a ValueError unless the images are prepared floats (batch, height, width, channels) of the
    VisionTransformer's own size. Layers before it in a model that contains it are not applied.
    """
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
    """Split images into batches of at most MAX_ATTENTION_BYTES of weights; raise for a model without attention."""
    check_attention(config)
    bytes_per_image = 4 * config.num_layers * config.num_heads * config.num_tokens**2
    step = max(1, MAX_ATTENTION_BYTES // bytes_per_image)
    return [images[start : start + step] for start in range(0, len(images), step)]


def to_float32(tensor: Any) -> np.ndarray:
    """Return a tensor, whatever its dtype, as a float32 array."""
    return keras.ops.convert_to_numpy(tensor).astype(np.float32, copy=False)
