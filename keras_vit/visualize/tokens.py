"""What becomes of the tokens from block to block: their lengths, their dimensions, what the head makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize._models import float32, ready


def token_norms(model: Any, images: Any) -> np.ndarray:
    """The length of every token behind every block: registers and artefacts stand out (arXiv 2309.16588, figure 3).

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels), as the VisionTransformer itself takes them.

    Returns:
        float32 (layers, batch, tokens): Euclidean norms; class token and registers in front of the patches.

    Raises:
        ValueError: where the images are not prepared for this model.
    """
    return norms(block_tokens(*ready(model, images)))


def effective_rank(model: Any, images: Any) -> np.ndarray:
    """How many dimensions the tokens of an image fill behind every block (Roy & Vetterli, EUSIPCO 2007).

    exp of the entropy of the singular values, scaled to sum to 1, of the matrix (tokens, hidden_size) of one image, all
    its tokens, no mean taken off; then the mean over the images. 1 where all tokens are multiples of one, at most
    min(tokens, hidden_size).

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels).

    Returns:
        float32 (layers,); NaN where the model's tokens are not finite.

    Raises:
        ValueError: where the images are not prepared for this model.
    """
    return ranks(block_tokens(*ready(model, images))).mean(axis=1).astype(np.float32)


def _rank(matrix: np.ndarray) -> float:
    if not np.isfinite(matrix).all():
        return np.nan
    # The singular values as roots of the eigenvalues of the smaller product, several times faster than the SVD. In
    # float64 what is lost lies below 1e-7 of the largest, where float32 tokens have nothing but rounding.
    product = matrix @ matrix.T if len(matrix) < matrix.shape[1] else matrix.T @ matrix
    squares = np.linalg.eigvalsh(product)
    values = np.sqrt(squares[squares > squares[-1] * len(squares) * np.finfo(np.float64).eps])
    shares = values / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def logit_lens(model: Any, images: Any) -> np.ndarray:
    """What the head would say behind every block: the model's own end, applied to the tokens of each.

    The end is all that follows the last block: LayerNorm, pooling, pre_logits and head (both heads of a distilled
    model). Without pooling each token has logits; then these are the class token's, or the mean of the patches'.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels).

    Returns:
        float32 (layers, batch, num_classes); the last layer's are the model's own.

    Raises:
        ValueError: for a model without a head, and where the images are not prepared for this model.
    """
    model, images = ready(model, images)
    if not model.config.num_classes:
        raise ValueError(
            "logit_lens needs a model with a head; load it with its classes, or look at its tokens by "
            "`model.features`. Received: num_classes=0"
        )
    return lens(model, block_tokens(model, images))


# The same of tokens that are there already, for callers that want several arrays of one image.


def block_tokens(model: VisionTransformer, images: np.ndarray) -> list[Any]:
    """The tokens behind every block: tensors (batch, tokens, hidden_size)."""
    names = [f"block_{i}" for i in range(model.config.num_layers)]
    found = model.features(images, names)
    return [found[name] for name in names]


def norms(blocks: Sequence[Any]) -> np.ndarray:
    """What `token_norms` gives, of `block_tokens`."""
    return np.stack([np.linalg.norm(float32(tokens), axis=-1) for tokens in blocks])


def ranks(blocks: Sequence[Any]) -> np.ndarray:
    """What `effective_rank` is the mean of, of `block_tokens`: float64 (layers, batch)."""
    return np.array([[_rank(image.astype(np.float64)) for image in float32(tokens)] for tokens in blocks])


def lens(model: VisionTransformer, blocks: Sequence[Any]) -> np.ndarray:
    """What `logit_lens` gives, of `block_tokens`."""
    config = model.config
    last_block = model.get_layer(f"block_{config.num_layers - 1}")
    # Not a keras.Model, which would add nodes to the layers of the model that is looked at.
    end = keras.Function(last_block.output, model.outputs[0])
    logits = [float32(end(tokens)) for tokens in blocks]
    if config.is_unpooled:
        logits = [each[:, config.read_tokens].mean(axis=1) for each in logits]
    return np.stack(logits)
