"""Compute everything that a report shows of a model and some images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_vit._util.progress import track
from keras_vit.model.config import ViTConfig
from keras_vit.model.task import Prediction
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize import attention, tokens, weights
from keras_vit.visualize._models import split_batch

# The axis of each array that counts the images.
_AXES = {"patches": 0, "rollout": 0, "attention": 0, "distance": 1, "norms": 1, "rank": 1, "lens": 1}


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """The arrays and predictions of a report; images keep their order."""

    config: ViTConfig
    parameters: int
    names: tuple[str, ...]
    pictures: tuple[np.ndarray, ...]  # results of `undo_preprocessing`
    filters: np.ndarray  # result of `embedding_filters`
    similarity: np.ndarray | None  # result of `position_similarity`; None without position embeddings
    # The next three are None without attention.
    rollout: np.ndarray | None = None  # (batch, rows, columns), result of `attention_rollout`
    attention: np.ndarray | None = None  # (batch, heads, rows, columns), the last layer of `class_attention`
    distance: np.ndarray | None = None  # (layers, heads), result of `attention_distance`, in pixels
    colours: np.ndarray  # uint8 (batch, rows, columns, 4): `patch_components`, transparent in the background
    norms: np.ndarray  # (layers, batch, tokens), result of `token_norms`
    rank: np.ndarray  # (layers,), result of `effective_rank`
    predictions: list[list[Prediction]] | None  # for each image the likeliest classes; None without a head
    leaders: list[list[Prediction]] | None  # for each block each image's best class; None without a head


def collect(
    model: VisionTransformer, images: np.ndarray, names: Sequence[str], *, top: int, progress: bool = False
) -> ReportData:
    """Compute the data of a report on prepared images, a few at a time so that the attention weights fit in memory.

    Raise a ValueError if the model computes NaN or infinity.
    """
    config = model.config
    batches = split_batch(config, images) if config.has_attention else [images]
    parts = [_arrays(model, batch) for batch in track(batches, "Computing attention", show=progress)]
    arrays: dict[str, Any] = {name: np.concatenate([part[name] for part in parts], _AXES[name]) for name in parts[0]}
    if not np.isfinite(arrays["norms"]).all():
        raise ValueError(
            f"{model.name!r} computes NaN or infinity from these images: there is nothing to draw. Received: "
            f"tokens that are not finite, computed in {model.layers[1].compute_dtype}"
        )
    arrays |= {name: arrays[name].mean(axis=1) for name in ("distance", "rank") if name in arrays}
    lens = arrays.pop("lens", None)
    colours, foreground = tokens.components(arrays.pop("patches"))
    return ReportData(
        config=config,
        parameters=model.count_params(),
        names=tuple(names),
        pictures=tuple(undo_preprocessing(config, image) for image in images),
        colours=np.rint(255 * np.concatenate([colours, foreground[..., None]], axis=-1)).astype(np.uint8),
        filters=weights.embedding_filters(model),
        similarity=weights.position_similarity(model) if weights.has_position_embedding(config) else None,
        predictions=None if lens is None else model.decode_predictions(lens[-1], top),
        leaders=None if lens is None else [[best for [best] in model.decode_predictions(x, 1)] for x in lens],
        **arrays,
    )


def _arrays(model: VisionTransformer, images: np.ndarray) -> dict[str, np.ndarray]:
    config = model.config
    blocks = tokens.block_tokens(model, images)
    arrays = {"norms": tokens.norms(blocks), "rank": tokens.ranks(blocks)}
    arrays["patches"] = tokens.patch_features(model, images)
    if config.has_attention:
        maps, probe = attention.block_maps(model, images), attention.probe_map(model, images)
        arrays["rollout"] = attention.rollout(config, maps, probe)
        arrays["attention"] = attention.class_maps(config, maps, probe)[-1]
        arrays["distance"] = attention.distances(config, maps)
    return arrays | ({"lens": tokens.block_logits(model, blocks)} if config.num_classes else {})


def undo_preprocessing(config: ViTConfig, image: np.ndarray) -> np.ndarray:
    """Return a prepared image (height, width, channels) as the uint8 picture that the model sees.

    It has the shape (height, width, 3), or (height, width), the channels' mean, if there are not three channels.
    """
    shares = image * np.array(config.preprocessing.std) + np.array(config.preprocessing.mean)
    pixels = np.rint(255 * np.clip(shares, 0, 1))
    return (pixels if pixels.shape[-1] == 3 else np.rint(pixels.mean(axis=-1))).astype(np.uint8)
