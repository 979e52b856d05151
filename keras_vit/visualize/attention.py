"""Where a model looks: attention weights as maps over the image, followed through the blocks, measured in pixels."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_vit._util.checks import is_count, one_of
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize._models import float32, in_parts, ready

_FUSIONS: dict[str, Callable[..., Any]] = {"mean": np.mean, "max": np.max, "min": np.min}


def attention_maps(model: Any, images: Any) -> np.ndarray:
    """The attention weights of every block, as `VisionTransformer.attention_maps` computes them.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels), as the VisionTransformer itself takes them.

    Returns:
        float32 (layers, batch, heads, tokens, tokens), queries before keys; every row sums to 1 (of a model that
        computes in bfloat16 to 2e-3).

    Raises:
        ValueError: where the images are not prepared for this model.
    """
    return np.stack(block_maps(*ready(model, images)))


def attention_distance(model: Any, images: Any) -> np.ndarray:
    """How far every head of every block looks (paper, figure 7 right and appendix D.7).

    For each patch as the query, the distance from its centre to the centres of all patches, itself included, weighted
    by the attention they get; then the mean over queries and images. Class token and registers have no place in the
    image: they are left out as queries and as keys, and every row is scaled to sum to 1 over the patches.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels); the paper takes 128.

    Returns:
        float32 (layers, heads), pixels of the prepared image, from 0 to its diagonal.

    Raises:
        ValueError: where the images are not prepared for this model.
    """
    model, images = ready(model, images)
    parts = in_parts(model.config, images)
    found = [distances(model.config, block_maps(model, part)) for part in parts]
    return np.concatenate(found, axis=1).mean(axis=1).astype(np.float32)


def attention_rollout(
    model: Any, images: Any, *, head_fusion: str = "mean", discard_ratio: float = 0.0, start_layer: int = 0
) -> np.ndarray:
    """How much every patch flows into the head's feature through all blocks (Abnar & Zuidema, arXiv 2005.00928).

    The heads of a block are fused to one matrix A; 0.5 A + 0.5 I stands for attention and residual connection, its rows
    scaled to sum to 1; the product of all blocks' matrices, the last one leftmost, says what each token is made of. The
    result is the row of what the head reads: the class token (the mean of both tokens of a distilled model); the mean
    over the patches for "gap" and "unpooled"; for "map" the attention of its probe, fused likewise, times the product.
    Of that row the part of the patches is kept, scaled to sum to 1.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels).
        head_fusion: "mean" (the paper's), "max" or "min" of the heads.
        discard_ratio: share of the patches, in [0, 1), whose attention is set to zero in every row of the fused matrix
            before rows are scaled: floor(discard_ratio * patches) of them, the lowest; of equals the first. What a row
            gives to class token and registers always stays, so that no path through them is cut.
        start_layer: the first block that counts, from 0.

    Returns:
        float32 (batch, rows, columns), each image's summing to 1; all 0 in the rare case that nothing reaches a patch.

    Raises:
        ValueError: for an option outside of its range, and where the images are not prepared for this model.
    """
    model, images = ready(model, images)
    config = model.config
    _check_options(config, head_fusion, discard_ratio, start_layer)

    def of_part(part: np.ndarray) -> np.ndarray:
        maps, probe = block_maps(model, part)[start_layer:], probe_map(model, part)
        return rollout(config, maps, probe, head_fusion=head_fusion, discard_ratio=discard_ratio)

    return np.concatenate([of_part(part) for part in in_parts(config, images)])


def class_attention(model: Any, images: Any) -> np.ndarray:
    """What the head's feature attends to in every block, head by head, as maps over the image.

    The rows of the class token (the mean of both tokens of a distilled model); where no class token is read, the mean
    over the patches as queries. A map head's probe attends once, behind the blocks: its weights are one more layer, the
    last.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels).

    Returns:
        float32 (layers, batch, heads, rows, columns), of a map head (layers + 1, ...): the weights as they are; each
        map sums to 1 less what goes to class token and registers.

    Raises:
        ValueError: where the images are not prepared for this model.
    """
    model, images = ready(model, images)
    parts = in_parts(model.config, images)
    found = [class_maps(model.config, block_maps(model, part), probe_map(model, part)) for part in parts]
    return np.concatenate(found, axis=1)


# The same of maps that are there already, for callers that want several arrays of one image.


def block_maps(model: VisionTransformer, images: np.ndarray) -> list[np.ndarray]:
    """The attention weights of every block: float32 (batch, heads, tokens, tokens)."""
    return [float32(weights) for weights in model.attention_maps(images)]


def probe_map(model: VisionTransformer, images: np.ndarray) -> np.ndarray | None:
    """The attention of a map head's probe, float32 (batch, heads, 1, patches); None of another head."""
    config = model.config
    if not config.has_map_head:
        return None
    name = "encoder_norm" if config.final_norm == "tokens" else f"block_{config.num_layers - 1}"
    tokens = model.features(images, [name])[name]
    pool = model.get_layer("pool")
    probe = ops.repeat(ops.cast(pool.probe, tokens.dtype), len(images), axis=0)
    return float32(pool.attention.weights_of(probe, tokens[:, config.num_prefix_tokens :]))


def distances(config: ViTConfig, maps: Sequence[np.ndarray]) -> np.ndarray:
    """What `attention_distance` is the mean of, of `block_maps`: float64 (layers, batch, heads)."""
    corners = np.indices(config.grid).reshape(2, -1).T * np.array(config.stride)
    between = np.linalg.norm(corners[:, None] - corners, axis=-1)  # of any two patches, in pixels
    patches = slice(config.num_prefix_tokens, None)
    shares = (_shares(weights[:, :, patches, patches].astype(np.float64)) for weights in maps)
    return np.array([np.einsum("bhqk,qk->bhq", each, between).mean(axis=2) for each in shares])


def rollout(
    config: ViTConfig,
    maps: Sequence[np.ndarray],
    probe: np.ndarray | None,
    *,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
) -> np.ndarray:
    """What `attention_rollout` gives, of `probe_map` and of those of `block_maps` that count."""
    prefix = config.num_prefix_tokens

    def fused(weights: np.ndarray, first_patch: int) -> np.ndarray:
        one = _FUSIONS[head_fusion](weights.astype(np.float64), axis=1)
        return _without_least(one, first_patch, discard_ratio)

    flow = identity = np.eye(config.num_tokens)
    for weights in maps:
        flow = _shares(0.5 * fused(weights, prefix) + 0.5 * identity) @ flow
    if probe is None:
        pooled = flow[:, config.read_tokens].mean(axis=1, keepdims=True)
    else:
        pooled = _shares(fused(probe, 0)) @ flow[:, prefix:]
    return _shares(pooled[:, 0, prefix:]).astype(np.float32).reshape(-1, *config.grid)


def class_maps(config: ViTConfig, maps: Sequence[np.ndarray], probe: np.ndarray | None) -> np.ndarray:
    """What `class_attention` gives, of `block_maps` and `probe_map`."""
    queries, keys = config.read_tokens, slice(config.num_prefix_tokens, None)
    rows = [weights[:, :, queries, keys].mean(axis=2) for weights in maps]
    if probe is not None:
        rows.append(probe[:, :, 0])
    stacked = np.stack(rows)
    return stacked.reshape(*stacked.shape[:3], *config.grid)


def _check_options(config: ViTConfig, head_fusion: str, discard_ratio: float, start_layer: int) -> None:
    one_of("head_fusion", head_fusion, tuple(_FUSIONS))
    if not isinstance(discard_ratio, numbers.Real) or not 0 <= discard_ratio < 1:
        raise ValueError(f"discard_ratio is a share of the patches in [0, 1). Received: {discard_ratio!r}")
    if not is_count(start_layer, least=0) or start_layer >= config.num_layers:
        raise ValueError(f"start_layer is a block, 0 to {config.num_layers - 1}. Received: {start_layer!r}")


def _without_least(weights: np.ndarray, first_patch: int, ratio: float) -> np.ndarray:
    """The weights (..., keys), in every row the lowest of the patches' set to zero in place."""
    patches = weights[..., first_patch:]
    # 0.29 * 100 is 28.999999999999996 in floating point.
    count = math.floor(ratio * patches.shape[-1] + 1e-9)
    least = np.argsort(patches, axis=-1, kind="stable")[..., :count]
    np.put_along_axis(patches, least, 0.0, axis=-1)
    return weights


def _shares(weights: np.ndarray) -> np.ndarray:
    """Every row over its sum; a row of zeros, where a softmax gave all to other tokens, stays."""
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)
