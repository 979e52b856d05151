"""Make zero-shot classifiers from an image encoder and text embeddings that are computed elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from keras_vit.model.vision_transformer import VisionTransformer

_LARGEST = 1e30  # far below the largest number of float32


def zero_shot_head(
    model: VisionTransformer, text_embeddings: Any, labels: Sequence[str], logit_scale: float, bias: float = 0.0
) -> VisionTransformer:
    """Return a classifier of texts: logits = logit_scale * image embedding @ text embedding + bias, both of length 1.

    Args:
        model: an image encoder such as CLIP's or SigLIP's: without a head, or with a projection as its head.
        text_embeddings: numbers (classes, width of `model.embed`) from the same checkpoint's text encoder, one row for
            each class, of any length. A class with several prompts has the mean of their normalized embeddings.
        labels: names of the classes, in the order of the rows.
        logit_scale: the factor itself, above 0 (100 for OpenAI's CLIP). Checkpoints store its logarithm, as
            "logit_scale" (Hugging Face, OpenAI) or "t" (big_vision): pass `np.exp` of the stored value.
        bias: number added to all logits: SigLIP's "logit_bias" or "b" as stored; 0 for CLIP.

    Returns:
        A new model. SigLIP's probabilities are the sigmoids of its logits; `classify` returns the softmax.

    Raises:
        ValueError: the model has a head of classes, or arguments have wrong shapes or values (all in one message).

    Example:
        >>> from keras_vit import digits
        >>> encoder, data = keras_vit.zoo.load("digits", num_classes=0), digits.load()
        >>> prototypes = [encoder.embed(data.train_images[data.train_labels == n][:20]).mean(0) for n in (3, 7)]
        >>> model = keras_vit.zoo.zero_shot_head(encoder, prototypes, ["three", "seven"], logit_scale=20)
        >>> model.classify(data.test_images[0], top=1)[0][0].label
        'seven'
    """
    config = model.config
    text, scale, offset = (_numbers(value) for value in (text_embeddings, logit_scale, bias))
    problems = list(_class_problems(text, labels, model.output_shape[-1]))
    if config.num_classes and not config.projection_head:
        problems = [
            f"the model has a head of {config.num_classes} classes. Load it with num_classes=0, or, if its head is a "
            "projection, pass model.with_config(model.config.replace(projection_head=True, labels=None))"
        ]
    if scale.size != 1 or not 0 < scale[0] < _LARGEST or offset.size != 1 or not abs(offset[0]) < _LARGEST:
        problems.append(
            f"logit_scale must be a number above 0, and bias a number. Received: {logit_scale!r:.200}, {bias!r:.200}"
        )
    if problems:
        raise ValueError("zero_shot_head: " + "; ".join(problems))
    changes: dict[str, Any] = {"num_classes": len(text), "labels": labels, "normalize_features": True}
    if config.projection_head:
        changes |= {"representation_size": config.num_classes, "representation_activation": "linear"}
    result = model.with_config(config.replace(projection_head=False, **changes))
    if config.projection_head:
        projection: dict[str, Any] = {}
        model.get_layer("head").save_own_variables(projection)
        result.get_layer("pre_logits").load_own_variables(projection)
    text = text / np.abs(text).max(axis=1, keepdims=True)  # squares of large numbers overflow
    text *= scale / np.linalg.norm(text, axis=1, keepdims=True)
    result.get_layer("head").set_weights([text.T, offset.repeat(len(text))])
    return result


def _numbers(value: Any) -> np.ndarray:
    """Return numbers as float64, and an empty array for anything else."""
    try:
        return np.atleast_1d(np.asarray(value, np.float64))
    except (RuntimeError, TypeError, ValueError):
        return np.empty(0)


def _class_problems(text: np.ndarray, labels: Any, width: int) -> Iterator[str]:
    if text.ndim != 2 or text.shape[1] != width or not text.size:
        yield f"text_embeddings must be numbers (classes, {width}). Received: shape {text.shape}"
    elif (rows := np.flatnonzero(~np.isfinite(text).all(axis=1) | ~text.any(axis=1))).size:
        yield f"text_embeddings must be finite, and no row zero. Received: others in rows {rows[:5]}"
    are_names = isinstance(labels, list | tuple) and all(isinstance(label, str) for label in labels)
    if not are_names or not len(text) == len(labels) == len(set(labels)):
        yield f"labels must be a list of {len(text)} different names, one for each row. Received: {labels!r:.200}"
