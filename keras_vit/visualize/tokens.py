"""Arrays that describe the tokens after each block: their norms, their rank, and the logits they would give.

A ResNet without blocks (BiT) has one layer: the cells of its last map.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize._models import check_inputs, split_batch, to_float32


def token_norms(model: Any, images: Any) -> np.ndarray:
    """Compute the Euclidean norm of every token after every block.

    Registers and high-norm artifacts stand out (arXiv 2309.16588, figure 3).

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels), as the VisionTransformer itself takes them.

    Returns:
        float32 (layers, batch, tokens), from 0. Class token and registers come before the patches.

    Raises:
        ValueError: if the images are not prepared for this model.

    Example:
        >>> model = keras_vit.zoo.load("digits")
        >>> keras_vit.visualize.token_norms(model, np.zeros((2, 32, 32, 3), "float32")).shape
        (4, 2, 65)
    """
    return _apply_to_blocks(model, images, lambda tokens: np.linalg.norm(to_float32(tokens), axis=-1))


def effective_rank(model: Any, images: Any) -> np.ndarray:
    """Compute the effective rank of an image's tokens after every block (Roy & Vetterli, EUSIPCO 2007).

    The singular values of the matrix (tokens, hidden_size) of one image, all tokens and no mean subtracted, are scaled
    to sum to 1; the rank is exp of their entropy. It is 1 if all tokens are multiples of one vector, and at most
    min(tokens, hidden_size).

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels), as the VisionTransformer itself takes them.

    Returns:
        float32 (layers,), the mean over the images; NaN if the model's tokens are not finite.

    Raises:
        ValueError: if the images are not prepared for this model.

    Example:
        >>> model = keras_vit.zoo.load("digits")
        >>> keras_vit.visualize.effective_rank(model, np.zeros((2, 32, 32, 3), "float32")).shape
        (4,)
    """
    ranks = _apply_to_blocks(model, images, lambda tokens: np.array([_rank(image) for image in to_float32(tokens)]))
    return ranks.mean(axis=1).astype(np.float32)


def logit_lens(model: Any, images: Any) -> np.ndarray:
    """Compute logits from the tokens after every block, by the model's last part.

    The last part is everything after the last block: LayerNorm, pooling, pre_logits and head (both heads of a
    distilled model). A model without pooling has logits for each token; the result is then the class token's, or the
    mean of the patches'.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels), as the VisionTransformer itself takes them.

    Returns:
        float32 (layers, batch, num_classes); the last layer's are the model's own logits.

    Raises:
        ValueError: if the model has no head or one that reads several blocks, or if the images are not prepared for
            this model.

    Example:
        >>> model = keras_vit.zoo.load("digits")
        >>> keras_vit.visualize.logit_lens(model, np.zeros((2, 32, 32, 3), "float32")).shape
        (4, 2, 10)
    """
    vit, images = check_inputs(model, images)
    if not vit.config.num_classes:
        raise ValueError(
            "logit_lens needs a model with a head; load it with its classes, or get its tokens with "
            "`model.features`. Received: num_classes=0"
        )
    if vit.config.num_read_blocks > 1:
        raise ValueError(
            "logit_lens needs a head that reads the last block alone. Received: one that reads the last "
            f"{vit.config.num_read_blocks} blocks (token_blocks, mean_blocks)"
        )
    # A keras.Model would add nodes to the layers of the user's model; a Function does not.
    last_part = keras.Function(vit.get_layer(_token_layers(vit)[-1]).output, vit.outputs[0])
    return _apply_to_blocks(vit, images, lambda tokens: vit.task.image_logits(to_float32(last_part(tokens))))


def _apply_to_blocks(model: Any, images: Any, function: Callable[[Any], np.ndarray]) -> np.ndarray:
    """Apply a function to the tokens (batch, tokens, hidden_size) after every block: (layers, batch, ...)."""
    model, images = check_inputs(model, images)
    names = _token_layers(model)
    parts = []
    for batch in split_batch(model.config, images):
        features = model.features(batch, names)
        parts.append(np.stack([function(features[name]) for name in names]))
    return np.concatenate(parts, axis=1)


def _token_layers(model: VisionTransformer) -> list[str]:
    """Names of the blocks; of a ResNet without blocks that of its tokens, the cells of its map."""
    return [f"block_{i}" for i in range(model.config.num_layers)] or ["tokens"]


def _rank(matrix: np.ndarray) -> float:
    matrix = matrix.astype(np.float64)
    if not np.isfinite(matrix).all():
        return np.nan
    # The roots of the smaller product's eigenvalues are the singular values, faster than an SVD. The
    # error of float64 is below the rounding errors of float32 tokens.
    product = matrix @ matrix.T if len(matrix) < matrix.shape[1] else matrix.T @ matrix
    squares = np.linalg.eigvalsh(product)
    values = np.sqrt(squares[squares > squares[-1] * len(squares) * np.finfo(np.float64).eps])
    shares = values / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def patch_components(model: Any, images: Any) -> tuple[np.ndarray, np.ndarray]:
    """Show the first three principal components of the patches after the last block as colours.

    The components are fitted to the patches of all images together: parts of objects that the model takes for the same
    have the same colour in every image (DINOv2, arXiv 2304.07193, figure 1). Patches above the mean of the first
    component, with the sign that the middle of the images has rather than the border, are taken as foreground.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels), as the VisionTransformer itself takes them.

    Returns:
        float32 (batch, rows, columns, 3), red, green and blue from 0 to 1: each the range of a component over the
        foreground; and bool (batch, rows, columns), whether a patch is foreground.

    Raises:
        ValueError: if the images are not prepared for this model.

    Example:
        >>> model = keras_vit.zoo.load("digits")
        >>> images = model.preprocess(keras_vit.digits.load().test_images[:3])
        >>> colours, foreground = keras_vit.visualize.patch_components(model, images)
        >>> colours.shape, foreground.shape
        ((3, 8, 8, 3), (3, 8, 8))
    """
    model, images = check_inputs(model, images)
    patches = np.concatenate([to_float32(model.feature_maps(batch)[0]) for batch in split_batch(model.config, images)])
    rows = patches.reshape(-1, patches.shape[-1]).astype(np.float64)
    rows -= rows.mean(axis=0)
    _, axes = np.linalg.eigh(rows.T @ rows)  # eigenvalues ascend
    scores: np.ndarray = np.zeros((len(rows), 3))
    scores[:, : axes.shape[1]] = rows @ axes[:, :-4:-1]
    scores = scores.reshape(*patches.shape[:-1], 3)
    _, height, width, _ = scores.shape
    middle = scores[:, height // 4 : -(height // 4) or None, width // 4 : -(width // 4) or None]
    scores *= np.where(middle.mean(axis=(0, 1, 2)) < 0, -1, 1)  # the sign of an eigenvector is arbitrary
    foreground = scores[..., 0] > 0
    shown = scores[foreground] if foreground.any() else scores.reshape(-1, 3)
    low, high = np.quantile(shown, (0.01, 0.99), axis=0)
    colours = np.clip((scores - low) / np.maximum(high - low, 1e-12), 0, 1)
    return colours.astype(np.float32), foreground
