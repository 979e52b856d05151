"""Arrays that describe a model's weights without any image: embedding filters and position embeddings."""

from typing import Any

import numpy as np

from keras_vit._util.checks import check_counts, is_count
from keras_vit.model.config import ViTConfig
from keras_vit.visualize._models import to_float32, vision_transformer


def embedding_filters(model: Any, *, num_filters: int = 28) -> np.ndarray:
    """Compute the principal components of the patch embedding's filters as small images (paper, figure 7 left).

    The samples are the hidden_size filters, with their mean subtracted; of a hybrid, the filters of the ResNet's first
    7x7 convolution, standardised as the convolution uses them. A component's sign is arbitrary: here the entry of
    largest absolute value is positive, so that the same weights always give the same image. Each component is then
    scaled from its own range to 0..1; one with equal entries becomes 0.5.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        num_filters: largest number of components, from 1; those of the largest variance come first. There are never
            more than numbers in a patch, and always fewer than filters.

    Returns:
        float32 (num_filters, height, width, channels), 0..1.

    Raises:
        ValueError: if num_filters is not an integer >= 1.

    Example:
        >>> model = keras_vit.zoo.load("digits")
        >>> keras_vit.visualize.embedding_filters(model, num_filters=12).shape
        (12, 4, 4, 3)
    """
    check_counts(num_filters=num_filters)
    model = vision_transformer(model)
    is_hybrid = model.config.resnet is not None
    first = model.get_layer("root").conv.standardized_kernel() if is_hybrid else model.get_layer("embedding").kernel
    kernel = to_float32(first).astype(np.float64)
    *patch, filters = kernel.shape
    samples = kernel.reshape(-1, filters).T
    # The SVD needs no covariance matrix, which is large for large patches.
    _, _, components = np.linalg.svd(samples - samples.mean(axis=0), full_matrices=False)
    # Subtracting the mean leaves one dimension fewer than filters.
    components = components[: min(num_filters, filters - 1)]
    return np.array([_to_unit_range(component) for component in components], np.float32).reshape(-1, *patch)


def _to_unit_range(component: np.ndarray) -> np.ndarray:
    """Scale a component to 0..1, after making its entry of largest absolute value positive."""
    component = component * np.copysign(1.0, component[np.abs(component).argmax()])
    low, high = component.min(), component.max()
    return (component - low) / (high - low) if high > low else np.full_like(component, 0.5)


def position_similarity(model: Any, *, block: int = 0) -> np.ndarray:
    """Compute the cosine similarity of the position embeddings of any two patches (paper, figure 7 centre).

    Positions may be learned (for patches, or for rows and columns) or fixed sines and cosines. Prefix tokens are left
    out.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        block: index of the block whose embedding is taken if every block has its own (position_place "blocks").

    Returns:
        float32 (rows, columns, rows, columns), -1..1: [y, x] is the map of the patch at row y, column x over all
        patches. The similarity with an embedding of zeros is 0.

    Raises:
        ValueError: if the model has no position embedding (position "none" or "relative"), or no such block.

    Example:
        >>> model = keras_vit.zoo.load("digits")
        >>> similarity = keras_vit.visualize.position_similarity(model)
        >>> similarity.shape, float(similarity[3, 3].max().round(3))
        ((8, 8, 8, 8), 1.0)
    """
    model = vision_transformer(model)
    config = model.config
    if not has_position_embedding(config):
        raise ValueError(
            "position_similarity needs a position embedding that is added to the tokens: learned, learned2d or "
            f"sincos2d. Received: a model with position={config.position!r:.200}"
        )
    if not is_count(block, least=0) or block >= config.num_layers:
        raise ValueError(f"block must be an integer from 0 to {config.num_layers - 1}. Received: {block!r:.200}")
    name = f"position_{block}" if config.position_place == "blocks" else "position"
    layer = model.get_layer(name)
    table = to_float32(layer.table())[0, layer.prefix_tokens :].astype(np.float64)
    length = np.linalg.norm(table, axis=1, keepdims=True)
    unit = table / np.where(length > 0, length, 1.0)
    cosine = np.clip(unit @ unit.T, -1.0, 1.0)
    return cosine.astype(np.float32).reshape(*config.grid, *config.grid)


def has_position_embedding(config: ViTConfig) -> bool:
    """True if the model adds position embeddings, which have vectors to compare."""
    return config.position not in ("none", "relative")
