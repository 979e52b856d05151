"""Arrays that describe the attention weights: maps over the image, rollout through the blocks, distances in pixels."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from keras_vit._util.checks import is_count, one_of
from keras_vit.model.config import check_attention
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize._models import check_inputs, split_batch, to_float32

_FUSIONS: dict[str, Callable[..., Any]] = {"mean": np.mean, "max": np.max, "min": np.min}


def attention_maps(model: Any, images: Any) -> np.ndarray:
    """Compute the attention weights of every block as one array.

    `model.attention_maps` returns the same weights as a list of tensors, one per block, in the model's compute dtype.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels), as the VisionTransformer itself takes them.

    Returns:
        float32 (layers, batch, heads, tokens, tokens), queries before keys. Every row sums to 1 (within 2e-2 if the
        model computes in bfloat16).

    Raises:
        ValueError: if the images are not prepared for this model.

    Example:
        >>> model = keras_vit.zoo.load("digits")
        >>> keras_vit.visualize.attention_maps(model, np.zeros((2, 32, 32, 3), "float32")).shape
        (4, 2, 4, 65, 65)
    """
    return np.stack(_block_maps(*check_inputs(model, images)))


def attention_distance(model: Any, images: Any) -> np.ndarray:
    """Compute the mean attention distance of every head of every block (paper, figure 7 right and appendix D.7).

    For each patch as the query, this is the distance between its centre and the centres of all patches, weighted by
    their attention; then the mean over queries and images. Class token and registers have no position in the image:
    they are left out as queries and as keys, and every row is scaled to sum to 1 over the patches.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels), as the VisionTransformer itself takes them. The
            paper takes 128.

    Returns:
        float32 (layers, heads), in pixels of the prepared image, from 0 to its diagonal.

    Raises:
        ValueError: if the images are not prepared for this model.

    Example:
        >>> model = keras_vit.zoo.load("digits")
        >>> keras_vit.visualize.attention_distance(model, np.zeros((2, 32, 32, 3), "float32")).shape
        (4, 4)
    """
    model, images = check_inputs(model, images)
    config = model.config
    corners = np.indices(config.grid).reshape(2, -1).T * np.array(config.stride)
    pixels = np.linalg.norm(corners[:, None] - corners, axis=-1)  # between any two patches
    patches = slice(config.num_prefix_tokens, None)

    def distances(batch: np.ndarray) -> np.ndarray:
        maps = _block_maps(model, batch)
        shares = (_normalize_rows(weights[:, :, patches, patches].astype(np.float64)) for weights in maps)
        return np.array([np.einsum("bhqk,qk->bhq", block, pixels).mean(axis=2) for block in shares])

    parts = [distances(batch) for batch in split_batch(config, images)]
    return np.concatenate(parts, axis=1).mean(axis=1).astype(np.float32)


def attention_rollout(
    model: Any, images: Any, *, head_fusion: str = "mean", discard_ratio: float = 0.0, start_layer: int = 0
) -> np.ndarray:
    """Compute the share of every patch in the model's feature, through all blocks (Abnar & Zuidema, arXiv 2005.00928).

    The heads of a block are fused to one matrix A. 0.5 A + 0.5 I stands for attention and residual connection, with
    rows scaled to sum to 1. The product of these matrices over the blocks, the last one leftmost, says how much each
    token depends on each patch. The result is the row of the token that the head reads: the class token (the mean of
    both tokens of a distilled model); the mean over the patches for "gap" and "unpooled"; for "map" the fused
    attention of its probe times the product. Only the patches of that row are kept, scaled to sum to 1.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels), as the VisionTransformer itself takes them.
        head_fusion: how heads are fused: "mean" (the paper's), "max" or "min".
        discard_ratio: in [0, 1). In every row of the fused matrix the floor(discard_ratio * patches) lowest patches
            are set to zero before the row is scaled; of equal values the first. The attention to class token and
            registers always stays, because paths to patches lead through them.
        start_layer: first block to include, from 0.

    Returns:
        float32 (batch, rows, columns), each image's summing to 1; all 0 in the rare case that no patch is reached.

    Raises:
        ValueError: if an option is outside its range, or if the images are not prepared for this model.

    Example:
        >>> model = keras_vit.zoo.load("digits")
        >>> rollout = keras_vit.visualize.attention_rollout(model, np.zeros((2, 32, 32, 3), "float32"))
        >>> rollout.shape, rollout.sum(axis=(1, 2)).round(3).tolist()
        ((2, 8, 8), [1.0, 1.0])
    """
    model, images = check_inputs(model, images)
    config = model.config
    one_of("head_fusion", head_fusion, tuple(_FUSIONS))
    if not isinstance(discard_ratio, numbers.Real) or not 0 <= discard_ratio < 1:
        raise ValueError(f"discard_ratio must be in [0, 1). Received: {discard_ratio!r:.200}")
    if not is_count(start_layer, least=0) or start_layer >= config.num_layers:
        raise ValueError(
            f"start_layer must be an integer from 0 to {config.num_layers - 1}. Received: {start_layer!r:.200}"
        )
    prefix = config.num_prefix_tokens

    def fuse_heads(weights: np.ndarray, first_patch: int) -> np.ndarray:
        fused = _FUSIONS[head_fusion](weights.astype(np.float64), axis=1)
        return _discard_lowest(fused, first_patch, discard_ratio)

    def roll_out(batch: np.ndarray) -> np.ndarray:
        flow = identity = np.eye(config.num_tokens)
        for weights in _block_maps(model, batch)[start_layer:]:
            flow = _normalize_rows(0.5 * fuse_heads(weights, prefix) + 0.5 * identity) @ flow
        if (probe := _probe_map(model, batch)) is None:
            return flow[:, config.read_tokens].mean(axis=1)[:, prefix:]
        attended = flow[:, -probe.shape[-1] :]
        return (_normalize_rows(fuse_heads(probe, prefix if config.pool_prefix else 0)) @ attended)[:, 0, prefix:]

    rows = np.concatenate([roll_out(batch) for batch in split_batch(config, images)])
    return _normalize_rows(rows).astype(np.float32).reshape(-1, *config.grid)


def class_attention(model: Any, images: Any) -> np.ndarray:
    """Compute the attention that the model's feature pays to the patches, in every block and head.

    These are the rows of the class token (the mean of both tokens of a distilled model), or the mean over the patches
    as queries if the model reads no class token. The probe of a map head attends once, after the blocks: its weights
    are one more layer at the end. If it has another number of heads, that layer has their mean for every head.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: prepared floats (batch, height, width, channels), as the VisionTransformer itself takes them.

    Returns:
        float32 (layers, batch, heads, rows, columns), layers + 1 for a map head. The weights are not scaled: a map
        sums to 1 minus the attention to class token and registers.

    Raises:
        ValueError: if the images are not prepared for this model.

    Example:
        >>> model = keras_vit.zoo.load("digits")
        >>> keras_vit.visualize.class_attention(model, np.zeros((2, 32, 32, 3), "float32")).shape
        (4, 2, 4, 8, 8)
    """
    model, images = check_inputs(model, images)
    config = model.config
    queries, keys = config.read_tokens, slice(config.num_prefix_tokens, None)

    def class_rows(batch: np.ndarray) -> np.ndarray:
        rows = [weights[:, :, queries, keys].mean(axis=2) for weights in _block_maps(model, batch)]
        probe = _probe_map(model, batch)
        if probe is not None:
            rows.append(probe[:, :, 0, -math.prod(config.grid) :])
            if rows[-1].shape != rows[0].shape:
                rows[-1] = np.broadcast_to(rows[-1].mean(axis=1, keepdims=True), rows[0].shape)
        return np.stack(rows)

    stacked = np.concatenate([class_rows(batch) for batch in split_batch(config, images)], axis=1)
    return stacked.reshape(*stacked.shape[:3], *config.grid)


def _block_maps(model: VisionTransformer, images: np.ndarray) -> list[np.ndarray]:
    """Attention weights of every block: float32 (batch, heads, tokens, tokens)."""
    check_attention(model.config)
    return [to_float32(weights) for weights in model.attention_maps(images)]


def _probe_map(model: VisionTransformer, images: np.ndarray) -> np.ndarray | None:
    """Attention of a map head's probe, float32 (batch, heads, 1, attended tokens); None for other heads."""
    config = model.config
    if not config.has_map_head:
        return None
    name = "encoder_norm" if config.final_norm == "tokens" else f"block_{config.num_layers - 1}"
    tokens = model.features(images, [name])[name]
    pool = model.get_layer("pool")
    probe = ops.repeat(ops.cast(pool.probe, tokens.dtype), len(images), axis=0)
    return to_float32(pool.attention.weights_of(probe, tokens[:, pool.prefix_tokens :]))


def _discard_lowest(weights: np.ndarray, first_patch: int, ratio: float) -> np.ndarray:
    """Set the lowest patches of every row of weights (..., keys) to zero, in place."""
    patches = weights[..., first_patch:]
    # 0.29 * 100 is 28.999999999999996 in floating point.
    count = math.floor(ratio * patches.shape[-1] + 1e-9)
    lowest = np.argsort(patches, axis=-1, kind="stable")[..., :count]
    np.put_along_axis(patches, lowest, 0.0, axis=-1)
    return weights


def _normalize_rows(weights: np.ndarray) -> np.ndarray:
    """Divide every row by its sum; a row of zeros (all attention went to other tokens) stays zero."""
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)
