"""What a model's weights show without any image: its first filters and its positions (paper, figure 7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_vit._util.checks import is_count
from keras_vit.model import layers as vit
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize._models import float32, vision_transformer


def embedding_filters(model: Any, *, num_filters: int = 28) -> np.ndarray:
    """The principal components of the filters that make tokens of patches (paper, figure 7 left).

    The hidden_size filters of the patch embedding are the samples, less their mean; each component is a patch of
    pixels. Of a hybrid they are the filters of the 7x7 convolution at its root, standardised as the convolution uses
    them. A component's sign is arbitrary: here its entry of largest absolute value is positive, so that the same
    weights always give the same picture. Each component is then scaled by itself, its least entry to 0 and its
    largest to 1; one whose entries are all alike becomes 0.5.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        num_filters: how many components at most, those of the largest variance first; there are no more than the
            patch has numbers, and fewer than there are filters.

    Returns:
        float32 (num_filters, height, width, channels), 0..1.

    Raises:
        ValueError: for another num_filters than a whole number from 1.
    """
    if not is_count(num_filters, least=1):
        raise ValueError(f"num_filters is a whole number from 1. Received: {num_filters!r}")
    kernel = _first_kernel(vision_transformer(model)).astype(np.float64)
    *patch, filters = kernel.shape
    samples = kernel.reshape(-1, filters).T
    # Not the covariance's eigenvectors: the patches of 32x32 pixels have 3,072 numbers, a covariance of 75 MB.
    _, _, components = np.linalg.svd(samples - samples.mean(axis=0), full_matrices=False)
    # The mean is gone, and with it one dimension of what the filters span.
    components = components[: min(num_filters, filters - 1)]
    scaled = [_scaled(component) for component in components]
    return np.array(scaled, np.float32).reshape(-1, *patch)


def _first_kernel(model: VisionTransformer) -> np.ndarray:
    """(height, width, channels, filters) of the first layer that sees pixels."""
    if model.config.resnet is None:
        return float32(model.get_layer("embedding").kernel)
    return float32(model.get_layer("root").conv.standardized_kernel())


def _scaled(component: np.ndarray) -> np.ndarray:
    """The component, its largest absolute entry made positive, over its own range as 0..1."""
    component = component * np.copysign(1.0, component[np.abs(component).argmax()])
    low, high = component.min(), component.max()
    return (component - low) / (high - low) if high > low else np.full_like(component, 0.5)


def position_similarity(model: Any, *, block: int = 0) -> np.ndarray:
    """How alike the position embeddings of any two patches are: their cosine (paper, figure 7 centre).

    Learned, of two dimensions or sine and cosine; rows of prefix tokens are left out.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        block: whose, where every block has a position embedding of its own (position_place "blocks").

    Returns:
        float32 (rows, columns, rows, columns), -1..1: [y, x] is the map of the patch at row y, column x over all
        patches; 0 against an embedding of zeros.

    Raises:
        ValueError: for a model without absolute positions (position "none" or "relative"), or no such block.
    """
    model = vision_transformer(model)
    config = model.config
    if not has_position_embedding(config):
        raise ValueError(
            "position_similarity needs a position embedding that is added to the tokens: learned, learned2d or "
            f"sincos2d. Received: a model with position={config.position!r}"
        )
    if not is_count(block, least=0) or block >= config.num_layers:
        raise ValueError(f"block is a whole number from 0 to {config.num_layers - 1}. Received: {block!r}")
    name = f"position_{block}" if config.position_place == "blocks" else "position"
    table = _patch_positions(model.get_layer(name)).astype(np.float64)
    length = np.linalg.norm(table, axis=1, keepdims=True)
    unit = table / np.where(length > 0, length, 1.0)
    cosine = np.clip(unit @ unit.T, -1.0, 1.0)
    return cosine.astype(np.float32).reshape(*config.grid, *config.grid)


def has_position_embedding(config: ViTConfig) -> bool:
    """Whether positions have vectors that can be compared."""
    return config.position not in ("none", "relative")


def _patch_positions(layer: vit.PositionEmbedding) -> np.ndarray:
    """(patches, hidden_size): what the layer adds to each patch."""
    patches = slice(layer.prefix_tokens, None)
    if layer.kind != "learned2d":
        return float32(layer.fixed if layer.kind == "sincos2d" else layer.embedding)[0, patches]
    rows, columns = layer.grid
    along_x, along_y = (float32(table)[0, patches] for table in (layer.x_embedding, layer.y_embedding))
    return np.concatenate([np.tile(along_x, (rows, 1)), np.repeat(along_y, columns, axis=0)], axis=1)
