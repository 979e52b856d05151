"""SavedModels: every weight once, served by TensorFlow with neither Keras nor this package."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit import labels as label_lists
from keras_vit.export import samples, signatures
from keras_vit.export import warmup as warmup_requests
from keras_vit.export.report import Report, Watch
from keras_vit.export.running import classes
from keras_vit.export.verify import VerificationError, lowest_cosine, verify
from keras_vit.model import VisionTransformer

FILES = 4  # images that the path from image files is verified on
# Of a probability. float32: the same pixels and weights, in a graph that computes less. bfloat16: 8 bits, and the two
# graphs may round in other places.
LARGEST_ERROR = {"float32": 1e-5, "float64": 1e-5}
LARGEST_OTHERWISE = 0.05
LEAST_BFLOAT16 = 0.99  # cosine of the bfloat16 signatures' logits; 0.9999 was measured, a broken cast is far below


def saved_model(
    model: VisionTransformer,
    path: str | os.PathLike[str],
    *,
    labels: str | Sequence[str] | None = None,
    top: int = 5,
    warmup: Sequence[int] = (1,),
    bfloat16: bool = False,
) -> Report:
    """Writes a SavedModel as TensorFlow Serving takes it, and runs it.

    Its signatures (B images; N classes; N of each token for the unpooled classifiers; K is `top`, at most N):

    - serving_default: image_bytes, JPEG or PNG files (B,) -> classes, strings (B, K), their scores (B, K), and
      probabilities (B, N). A bad file fails the call with INVALID_ARGUMENT.
    - tolerant: the same, and valid (B,): a bad file has False there, zeros and empty strings.
    - features: image_bytes -> features (B, width), what the head sees.
    - float_images: images, prepared float32 (B, height, width, channels) -> as serving_default, and logits.
    - uint8_images: images, pixels 0..255 of any one size -> the same.

    A model without a head gives features everywhere.

    Args:
        model: a VisionTransformer, on Keras' TensorFlow back end.
        path: of the folder, whose name a server takes for the version: "models/vit/1". It appears complete and
            verified, or not at all.
        labels: name of a list in zoo/labels or the classes' names; None is the model's own list. Without any, classes
            go by their numbers. They also lie in assets/labels.txt.
        top: how many classes `classes` and `scores` have.
        warmup: batch sizes that a server tries before it serves (assets.extra/tf_serving_warmup_requests).
        bfloat16: whether there are serving_bfloat16 and float_images_bfloat16 too, whose products are in bfloat16.

    Returns:
        how it compares with the model.

    Raises:
        FileExistsError: where something is there already.
        ValueError: for labels of another number, top or warmup out of range, or another back end of Keras.
        VerificationError: where its outputs are not the model's.
    """
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"A SavedModel is written on Keras' TensorFlow back end. Received: {keras.backend.backend()}")
    if top < 1:
        raise ValueError(f"top is the number of classes to name, from 1. Received: {top}")
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} is there already: remove it, or write the next version beside it")
    names = _names(model, labels)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with Watch() as watch:
            _write(model, work, names=names, top=top, warmup=warmup, bfloat16=bfloat16)
        report = verify(model, work)
        _verify_files(model, work, path)
        half = _bfloat16_cosine(model, work, path) if bfloat16 else None
        work.chmod(0o755)  # mkdtemp's folders are private; a server runs as somebody else
        work.replace(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return dataclasses.replace(
        report, path=path, bfloat16_cosine=half, seconds=watch.seconds, peak_bytes=watch.peak_bytes
    )


def _names(model: VisionTransformer, labels: str | Sequence[str] | None) -> list[str] | None:
    """The classes' names in the order of the logits."""
    if labels is None:
        labels = model.config.labels
    if labels is None or not model.config.num_classes:
        return None
    known = labels if isinstance(labels, str) else tuple(labels)
    return [label for _, label in label_lists.names(known, model.config.num_classes)]


def _write(
    model: VisionTransformer,
    folder: Path,
    *,
    names: Sequence[str] | None,
    top: int,
    warmup: Sequence[int],
    bfloat16: bool,
) -> None:
    import tensorflow as tf

    holder, functions = signatures.module(model, labels=names, top=top, bfloat16=bfloat16)
    with tempfile.TemporaryDirectory() as scratch:
        if names is not None:
            listed = Path(scratch) / "labels.txt"
            listed.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
            holder.labels = tf.saved_model.Asset(str(listed))
        tf.saved_model.save(holder, str(folder), signatures=functions)
    takes_files = [name for name, function in functions.items() if function.input_signature[0].dtype == tf.string]
    warmup_requests.write(folder, takes_files, warmup)


def _verify_files(model: VisionTransformer, folder: Path, path: Path) -> None:
    """Compares what `serving_default` makes of PNG files with the model's answer to `preprocess` of their pixels.

    Raises:
        VerificationError: where they differ.
    """
    import tensorflow as tf

    config = model.config
    # Grey files for grey models: of a colour, TensorFlow's grey and the original are not the same.
    pixels = samples.pixels(config, FILES, size=(97, 131))
    if config.num_channels not in (1, 3):
        return  # there is no file of such images
    files = tf.constant([tf.io.encode_png(image).numpy() for image in pixels])
    serve = tf.saved_model.load(str(folder)).signatures["serving_default"]
    found: dict[str, Any] = serve(image_bytes=files)
    expected = keras.ops.convert_to_numpy(model.predict_on_batch(model.preprocess(pixels)))
    if config.num_classes:
        received, expected = found["probabilities"].numpy(), keras.ops.convert_to_numpy(keras.ops.softmax(expected))
    else:
        received = found["features"].numpy()
    error = float(np.abs(received - expected).max() / max(1.0, float(np.abs(expected).max())))
    largest = LARGEST_ERROR.get(model.get_layer("embedding").compute_dtype, LARGEST_OTHERWISE)
    if not error <= largest:  # so that NaN fails too
        raise VerificationError(
            f"{path} answers image files otherwise than the model: wanted a difference of {largest} at most. "
            f"Received: {error:.1e}"
        )


def _bfloat16_cosine(model: VisionTransformer, folder: Path, path: Path) -> float:
    """The lowest cosine between what the bfloat16 signature and the float32 one say of an image.

    Raises:
        VerificationError: where it is below LEAST_BFLOAT16.
    """
    import tensorflow as tf

    images = tf.constant(samples.images(model.config, FILES))
    call = tf.saved_model.load(str(folder)).signatures
    wide, half = (np.asarray(classes(call[f"float_images{end}"](images=images))) for end in ("", signatures.BFLOAT16))
    cosine = lowest_cosine(wide, half)
    if not cosine >= LEAST_BFLOAT16:
        raise VerificationError(
            f"{path} computes otherwise in bfloat16: wanted cosine >= {LEAST_BFLOAT16}. Received: {cosine:.4f}"
        )
    return cosine
