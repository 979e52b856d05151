"""Classify or embed any number of images, in batches of one shape: memory is bounded, and TensorFlow compiles once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_vit._util.checks import check_counts
from keras_vit._util.files import image_files
from keras_vit.model.task import Prediction

BATCH = 16  # images in a call; larger batches gain little on a CPU
IMAGE_ERRORS = (OSError, ValueError, ArithmeticError, MemoryError)  # of one image that cannot be prepared


def classify_each(
    model: Any, images: Any, *, top: int, batch_size: int = BATCH
) -> Iterator[list[Prediction] | Exception]:
    """Predict the classes of each image, or yield the error of one that cannot be read; arguments as for `classify`."""
    check_counts(top=top, batch_size=batch_size)
    single = single_images(images)
    size = 0
    while group := list(itertools.islice(single, batch_size)):
        size = size or len(group)  # the first group's: smaller ones are padded
        prepared = [prepare(model, image) for image in group]
        readable = [image for image in prepared if not isinstance(image, Exception)]
        rankings: Iterator[list[Prediction]] = iter(())
        if readable:
            batch = np.concatenate(readable + readable[-1:] * (size - len(readable)))
            # predict_on_batch keeps one compiled function; the data adapter of predict() adds 25-40 ms to every call.
            logits = model.predict_on_batch(batch)[: len(readable)]
            check_outputs(logits, are_logits=True)
            rankings = iter(model.decode_predictions(logits, top))
        yield from (image if isinstance(image, Exception) else next(rankings) for image in prepared)


def embed_all(model: Any, images: Any, *, batch_size: int) -> np.ndarray:
    """Compute the normalized embeddings of images; arguments and errors as for `embed`."""
    from keras import ops

    layer = "logits" if model.task.embedding_output() == "logits" else "pre_logits"
    check_counts(batch_size=batch_size)
    single = single_images(images)
    features = []
    while group := list(itertools.islice(single, batch_size)):
        batch = np.concatenate([model.preprocess(image) for image in group])
        features.append(ops.convert_to_numpy(model.features(batch, [layer])[layer]))
    if not features:
        raise ValueError("embed needs at least one image. Received: an empty list")
    joined = np.concatenate(features)
    check_outputs(joined)
    return unit_length(joined)


def find_broken(outputs: Any, *, are_logits: bool = False) -> Any:
    """Find the images, bool (batch,), whose outputs (batch, ...) are not finite: of arrays in NumPy, also in a graph.

    Of logits of whole images or tokens, -inf alone is a class that is never predicted. In a map it is refused:
    interpolation makes NaN of it.
    """
    xp: Any = np
    if not isinstance(outputs, np.ndarray):
        from keras import ops

        xp = ops
    is_good = xp.isfinite(outputs)
    if are_logits:
        is_good = (is_good | (outputs == -np.inf)) & xp.any(is_good, axis=-1, keepdims=True)
    return xp.any(~is_good, axis=tuple(range(1, len(is_good.shape))))


def check_outputs(outputs: Any, *, are_logits: bool = False) -> None:
    """Raise a ValueError if a model computes NaN or infinity for finite inputs; arguments as for `find_broken`.

    Everything that makes results of a model's outputs calls it first, or in a graph `find_broken`.
    """
    check_unbroken(np.any(find_broken(outputs, are_logits=are_logits)))


def check_unbroken(is_broken: Any) -> None:
    """Raise the ValueError of `check_outputs` if `find_broken` has found something."""
    if is_broken:
        raise ValueError(
            "The model must compute finite numbers. Received: NaN or infinity. Its weights are damaged or diverged: "
            'load them again without allow_nonfinite. If float16 is too small for them: dtype="float32"'
        )


def unit_length(features: np.ndarray) -> np.ndarray:
    """Divide rows by their lengths, float32."""
    vectors = features.astype(np.float64)
    return (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)).astype(np.float32)


def prepare(model: Any, image: Any) -> np.ndarray | Exception:
    """Prepare an image by `model.preprocess`, or return the error of one that cannot be read."""
    try:
        return model.preprocess(image)
    except IMAGE_ERRORS as error:
        return error


def single_images(images: Any) -> Iterator[Any]:
    """Iterate over the images of nested lists, batches, folders and patterns."""
    if isinstance(images, str | os.PathLike):
        yield from image_files([images])
    elif isinstance(images, list | tuple):
        for image in images:
            yield from single_images(image)
    elif len(getattr(images, "shape", ())) == 4:
        yield from images
    else:
        yield images
