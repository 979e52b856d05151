"""What a report shows of a model and some images, gathered before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import Prediction, VisionTransformer
from keras_vit.visualize import attention, tokens, weights
from keras_vit.visualize._models import in_parts


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Arrays and rankings, images in the order they came.

    Attributes:
        config: of the model.
        parameters: how many numbers the model has.
        names: of the images.
        pictures: as the model sees them, uint8 (height, width, 3) or (height, width).
        filters: as `embedding_filters` gives them.
        similarity: as `position_similarity` gives it; None where no position has an embedding.
        rollout: (batch, rows, columns), each image's sums to 1.
        attention: the last of `class_attention`, (batch, heads, rows, columns).
        distance: (layers, heads), pixels.
        norms: (layers, batch, tokens).
        rank: (layers,).
        predictions: for each image the likeliest classes, best first; None for a model without a head.
        leaders: for each block, for each image, the class that leads after it; None likewise.
    """

    config: ViTConfig
    parameters: int
    names: tuple[str, ...]
    pictures: tuple[np.ndarray, ...]
    filters: np.ndarray
    similarity: np.ndarray | None
    rollout: np.ndarray
    attention: np.ndarray
    distance: np.ndarray
    norms: np.ndarray
    rank: np.ndarray
    predictions: list[list[Prediction]] | None
    leaders: list[list[Prediction]] | None


def look(
    model: VisionTransformer, images: np.ndarray, names: Sequence[str], *, top: int, progress: bool = False
) -> Inside:
    """Computes all that a report shows, in parts that memory holds.

    Args:
        model: to look into.
        images: prepared, float32 (batch, height, width, channels).
        names: one an image.
        top: classes to name for each image.
        progress: whether to show a bar on standard error.

    Raises:
        ValueError: where the model computes NaN or infinity.
    """
    from rich.console import Console
    from rich.progress import track

    config = model.config
    console = Console(stderr=True)
    parts = track(in_parts(config, images), "Looking inside", console=console, disable=not progress, transient=True)
    seen = [_look_at(model, part) for part in parts]
    arrays: dict[str, Any] = {name: np.concatenate([one[name] for one in seen], _AXES[name]) for name in seen[0]}
    if not np.isfinite(arrays["norms"]).all():
        raise ValueError(
            f"{model.name!r} computes NaN or infinity from these images: there is nothing to draw. Received: "
            f"tokens that are not finite, computed in {model.get_layer('block_0').compute_dtype}"
        )
    distance, rank = (arrays.pop(name).mean(axis=1) for name in ("distance", "rank"))
    lens = arrays.pop("lens", None)
    return Inside(
        config=config,
        parameters=model.count_params(),
        names=tuple(names),
        pictures=tuple(unprepared(config, image) for image in images),
        filters=weights.embedding_filters(model),
        similarity=weights.position_similarity(model) if weights.has_position_embedding(config) else None,
        distance=distance,
        rank=rank,
        predictions=None if lens is None else model.decode_predictions(lens[-1], top),
        leaders=None if lens is None else [[best for [best] in model.decode_predictions(x, 1)] for x in lens],
        **arrays,
    )


# Which axis of an array counts the images.
_AXES = {"rollout": 0, "attention": 0, "distance": 1, "norms": 1, "rank": 1, "lens": 1}


def _look_at(model: VisionTransformer, images: np.ndarray) -> dict[str, np.ndarray]:
    config = model.config
    maps, probe = attention.block_maps(model, images), attention.probe_map(model, images)
    blocks = tokens.block_tokens(model, images)
    found = {
        "rollout": attention.rollout(config, maps, probe),
        "attention": attention.class_maps(config, maps, probe)[-1],
        "distance": attention.distances(config, maps),
        "norms": tokens.norms(blocks),
        "rank": tokens.ranks(blocks),
    }
    return found | ({"lens": tokens.lens(model, blocks)} if config.num_classes else {})


def unprepared(config: ViTConfig, image: np.ndarray) -> np.ndarray:
    """A prepared image as a picture again: the mean and deviation of its preparation undone.

    Args:
        config: whose preprocessing it was.
        image: float (height, width, channels).

    Returns:
        uint8 (height, width, 3) in colour, (height, width) for any other number of channels: their mean.
    """
    shares = image * np.array(config.preprocessing.std) + np.array(config.preprocessing.mean)
    pixels = np.rint(255 * np.clip(shares, 0, 1))
    return (pixels if pixels.shape[-1] == 3 else np.rint(pixels.mean(axis=-1))).astype(np.uint8)
