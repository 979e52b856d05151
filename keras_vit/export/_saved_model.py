"""SavedModels: every weight once, served by TensorFlow with neither Keras nor this package."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np

from keras_vit._util.checks import is_count
from keras_vit.errors import VerificationError
from keras_vit.export.check import samples
from keras_vit.export.check.report import Report, Watch
from keras_vit.export.check.running import classes
from keras_vit.export.check.verify import called, lowest_cosine, verify
from keras_vit.export.server import signatures
from keras_vit.export.server import warmup as warmup_requests
from keras_vit.model import class_names
from keras_vit.model.vision_transformer import VisionTransformer

IMAGES = 4  # that the bfloat16 signatures are compared on
NAMED = 32  # letters of a name that its temporary folder has too: the longest names have no room for more
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

    A model without a head gives features everywhere. One of other channels than grey or colour, of which there are no
    files, has float_images, which is serving_default too, and uint8_images.

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
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            "saved_model writes VisionTransformers; `model.export(path)` writes a Keras model around one. "
            f"Received: {type(model).__name__}"
        )
    if not is_count(top, least=1):
        raise ValueError(f"top is the number of classes to name, from 1. Received: {top!r}")
    sizes = warmup_requests.sizes(warmup)
    names = class_names.names(model.config, labels)
    path = Path(path)
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} is there already: remove it, or write the next version beside it")
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name[:NAMED]}.", dir=path.parent))
    try:
        with Watch() as watch:
            _write(model, work, names=names, top=int(top), warmup=sizes, bfloat16=bfloat16)
        with called(work, path):
            report = verify(model, work)
        half = _bfloat16_cosine(model, work, path) if bfloat16 else None
        work.chmod(0o755)  # mkdtemp's folders are private; a server runs as somebody else
        work.replace(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return dataclasses.replace(
        report, path=path, bfloat16_cosine=half, seconds=watch.seconds, peak_bytes=watch.peak_bytes
    )


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
            listed.write_text("".join(f"{name}\n" for name in class_names.lines(names)), encoding="utf-8")
            holder.labels = tf.saved_model.Asset(str(listed))
        tf.saved_model.save(holder, str(folder), signatures=functions)
    takes_files = [name for name, function in functions.items() if function.input_signature[0].dtype == tf.string]
    warmup_requests.write(folder, takes_files, warmup)


def _bfloat16_cosine(model: VisionTransformer, folder: Path, path: Path) -> float:
    """The lowest cosine between what the bfloat16 signature and the float32 one say of an image.

    Raises:
        VerificationError: where it is below LEAST_BFLOAT16.
    """
    import tensorflow as tf

    images = tf.constant(samples.images(model.config, IMAGES))
    call = tf.saved_model.load(str(folder)).signatures
    wide, half = (np.asarray(classes(call[f"float_images{end}"](images=images))) for end in ("", signatures.BFLOAT16))
    cosine = lowest_cosine(wide, half)
    if not cosine >= LEAST_BFLOAT16:
        raise VerificationError(
            f"{path} computes otherwise in bfloat16: wanted cosine >= {LEAST_BFLOAT16}. Received: {cosine:.4f}"
        )
    return cosine
