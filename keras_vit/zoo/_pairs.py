"""Load the text towers of the zoo's models, and make zero-shot classifiers of pairs or of any embeddings of texts."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit._util.checks import given
from keras_vit.zoo.cards import families
from keras_vit.zoo.pretrained import ResolvedModel, fetch_source, load_resolved, resolve

if TYPE_CHECKING:
    from keras_vit.model.vision_transformer import VisionTransformer
    from keras_vit.text import TextEncoder

TEMPLATE = "a photo of a {}."  # for a model without a card (CLIP, arXiv 2103.00020, section 3.1.4)
_CONFIG = "open_clip_config.json"
_TOKENIZER_FILES = ("spiece.model", "tokenizer.json", "tokenizer_config.json")
_LARGEST = 1e30  # far below the largest number of float32


def text_encoder(
    name_or_path: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    which: str | None = None,
    dtype: Any = None,
) -> TextEncoder:
    """Load the text tower that belongs to an image encoder, with its tokenizer.

    Args:
        name_or_path: name of a model with a text tower ("CLIP-B/16", "SigLIP-B/16", "SigLIP2-B/16"), or the path or URL
            of a file or folder, as for `text.load`.
        weights: a tag of the model's card; None means the recommended weights. A path has none.
        which: the model that is meant, if a file has several, as for `text.load`.
        dtype: Keras dtype policy, such as "mixed_bfloat16"; None means the global one.

    Raises:
        UnknownModelError: no card has this name; the message lists the nearest.
        ValueError: the model has no text tower; the message lists those that have one.
        FileNotFoundError: the path does not exist.
        DownloadError: a file could not be downloaded completely and verified.
        CheckpointError: a file is damaged, or has no text tower.
        ImportError: the packages of the extra "text" are missing.

    Example:
        >>> keras_vit.zoo.text_encoder("digits").embed(["seven", "a photo of a three."]).shape
        (2, 64)
    """
    from keras_vit import text
    from keras_vit.converters.containers import is_keras_file

    resolved = resolve(name_or_path, weights)
    files = fetch_text(resolved)
    if resolved.is_file:
        return text.load(files[0], which=which, dtype=dtype)
    row = resolved.published
    if row is None or not files:
        known = dict.fromkeys(row.architecture for family in families() for row in family.weights if row.text_location)
        raise ValueError(f"{resolved.name} has no text tower. Models that have one: {list(known)}")
    if is_keras_file(files[0]):  # has the tokenizer inside
        return text.load(files[0], dtype=dtype)
    activation = given(activation=row.config.get("activation"))
    return text.load(files[0], tokenizer=files[-1], config=activation, dtype=dtype)


def fetch_text(resolved: ResolvedModel) -> list[Path]:
    """Fetch the files of a text tower: the weights first, a published tokenizer last; [] if the card has no tower."""
    from keras_vit._util.downloads import fetch, fetch_beside, fetch_with

    row, source = resolved.published, resolved.source or ""
    if resolved.is_file:
        return [fetch_source(resolved), *fetch_beside(source, (_CONFIG, *_TOKENIZER_FILES))]
    location = row.text_location if row else None
    if row is None or location is None:
        return []
    files = [fetch_source(resolved)] if row.text is None else fetch_with(location, [_CONFIG], needed=_CONFIG)
    return [*files, fetch(row.tokenizer)] if row.tokenizer else files


def zero_shot(
    name_or_path: str | os.PathLike[str] | VisionTransformer,
    classes: Sequence[str],
    *,
    templates: Sequence[str] | None = None,
    text_encoder: str | os.PathLike[str] | TextEncoder | None = None,
    weights: str | None = None,
    which: str | None = None,
    accept_license: bool = False,
    **config_changes: Any,
) -> VisionTransformer:
    """Load a pair of an image and a text encoder as a classifier whose classes are texts.

    The logits are the pair's own: its logit scale times the cosine of image and text, plus its bias. Probabilities are
    their softmax (CLIP), or, for a pair that was trained with the sigmoid loss (SigLIP), the sigmoid of each: then they
    need not add up to 1, and all are small if no class fits. `config.probabilities` says which.

    Args:
        name_or_path: a model of the zoo, such as "CLIP-B/16" or "SigLIP2-B/16", a file or folder with both encoders and
            the tokenizer, or the image encoder alone, also as a model.
        classes: different names of the classes, such as ["cat", "dog"]; they become the labels.
        templates: texts with "{}" in place of a name, such as ["a photo of a {}."]. A class has the mean of its texts'
            embeddings. None takes the card's templates, or "a photo of a {}." for a folder; ["{}"] the names alone.
        text_encoder: the other half of the pair, if it is elsewhere: a TextEncoder, or as for `zoo.text_encoder`.
        weights: for a name: a tag of its card.
        which: the model that is meant, if a file has several, as for `load`.
        accept_license: as for `load`.
        **config_changes: as for `load`, such as image_size.

    Returns:
        An ordinary classifier, which is trained, evaluated, saved, exported and quantized as any other.

    Raises:
        ValueError: wrong classes or templates, or the model has no text encoder, or another's.
        FileNotFoundError: the path does not exist, or there is no tokenizer.
        ImportError: the packages of the extra "text" are missing.

    Example:
        >>> from keras_vit import digits
        >>> model = keras_vit.zoo.zero_shot("digits", ["three", "seven"])
        >>> model.classify(digits.load().test_images[0], top=1)[0][0].label
        'seven'
    """
    names = _checked_names(classes)
    texts = [templates] if isinstance(templates, str) else templates
    are_texts = isinstance(texts, list | tuple) and all(isinstance(text, str) and "{}" in text for text in texts)
    if texts is not None and not (texts and are_texts):
        raise ValueError(f'templates must be texts with "{{}}" in place of a name. Received: {templates!r:.200}')
    encoder = _text_half(name_or_path, weights, which) if text_encoder is None else _text_half(text_encoder)
    scale, bias = encoder.config.logit_scale, encoder.config.logit_bias
    if scale is None:
        raise ValueError("The text encoder has no logit_scale: use zoo.zero_shot_head, with a scale of your choice")
    if bias is None and len(names) == 1:
        raise ValueError(f"The softmax of one class is always 1: pass several classes. Received: {names}")
    model, defaults = _image_half(name_or_path, weights, which, accept_license, config_changes)
    texts = texts or defaults
    config, width = model.config, encoder.config.width
    if config.num_classes and not config.projection_head:
        # Files of timm and big_vision do not state that a head is the projection; a head of classes is left out.
        is_projection = config.num_classes == width and config.labels is None
        model = model.with_config(config.replace(**{"projection_head": True} if is_projection else {"num_classes": 0}))
    if model.output_shape[-1] != width:
        raise ValueError(
            "The encoders are no pair: embeddings must have the same width. "
            f"Received: {model.output_shape[-1]} of images and {width} of texts"
        )
    prompts = [template.replace("{}", name) for name in names for template in texts]
    means = encoder.embed(prompts).reshape(len(names), len(texts), -1).mean(axis=1)
    result = zero_shot_head(model, means, names, float(np.exp(scale)), bias or 0.0)
    if bias is None:
        return result
    return result.with_config(result.config.replace(probabilities="sigmoid"))


def _image_half(
    model: Any, weights: str | None, which: str | None, accept_license: bool, changes: Any
) -> tuple[VisionTransformer, Any]:
    """Load the image encoder, and look up the templates of its card."""
    from keras_vit.model.vision_transformer import VisionTransformer

    if isinstance(model, VisionTransformer):
        return model, [TEMPLATE]
    resolved = replace(resolve(model, weights), accept_license=accept_license)
    stated = resolved.published.templates if resolved.published else ()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "keras_vit: .* has other parts")  # which are the text encoder
        return load_resolved(resolved, changes, which=which), stated or [TEMPLATE]


def _text_half(source: Any, weights: str | None = None, which: str | None = None) -> TextEncoder:
    from keras_vit.model.vision_transformer import VisionTransformer
    from keras_vit.text import TextEncoder

    if isinstance(source, VisionTransformer):
        raise ValueError("A model needs its text_encoder: a name, a path or a TextEncoder. Received: None")
    return source if isinstance(source, TextEncoder) else text_encoder(source, weights=weights, which=which)


def _checked_names(classes: Any) -> list[str]:
    """Check the names of classes."""
    names = list(classes) if isinstance(classes, list | tuple) else []
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError(f"classes must be a list of names, none of them empty. Received: {classes!r:.200}")
    if len(names) != len(set(names)):
        [(twice, _)] = Counter(names).most_common(1)
        raise ValueError(f"classes must be different names. Received {twice!r:.200} twice")
    return names


def zero_shot_head(
    model: VisionTransformer, text_embeddings: Any, labels: Sequence[str], logit_scale: float, bias: float = 0.0
) -> VisionTransformer:
    """Build a classifier of texts: logits = logit_scale * image embedding @ text embedding + bias, both of length 1.

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
        result.get_layer("pre_logits").load_own_variables(
            {name: np.array(value) for name, value in projection.items()}  # not JAX's arrays themselves
        )
    text = text / np.abs(text).max(axis=1, keepdims=True)  # squares of large numbers overflow
    text *= scale / np.linalg.norm(text, axis=1, keepdims=True)
    result.get_layer("head").set_weights([text.T, offset.repeat(len(text))])
    return result


def _numbers(value: Any) -> np.ndarray:
    """Convert numbers to float64, and anything else to an empty array."""
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
