"""Write SavedModels, which TensorFlow serves without Keras and without this package."""

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit._util.checks import as_path, check_counts, one_of
from keras_vit.errors import VerificationError
from keras_vit.export._temporary import check_folder_path, temporary_path
from keras_vit.export.check import samples
from keras_vit.export.check import verify as verification
from keras_vit.export.check.report import Report, measure_resources
from keras_vit.export.check.running import main_output
from keras_vit.export.server import signatures
from keras_vit.export.server import warmup as warmup_requests
from keras_vit.model.config import ViTConfig
from keras_vit.model.labels import single_lines
from keras_vit.model.layers.base import quantization_problem
from keras_vit.model.vision_transformer import VisionTransformer

NUM_BFLOAT16_IMAGES = 4  # number of images for comparing the bfloat16 signatures
LEAST_BFLOAT16_COSINE = 0.99  # 0.9999 was measured; a broken cast is far below
DTYPES = ("float32", "bfloat16")


def saved_model(
    model: VisionTransformer,
    path: str | os.PathLike[str],
    *,
    labels: str | Sequence[str] | None = None,
    top: int = 5,
    warmup: Sequence[int] = (1,),
    dtype: str | None = None,
    bfloat16: bool = False,
    verify: Any = None,
) -> Report:
    """Write a SavedModel for TensorFlow Serving, run it, and compare it with the model.

    Signatures (B images; N classes, of each token for unpooled classifiers; K is `top`, at most N):

    - serving_default: image_bytes, JPEG or PNG files as strings (B,) -> classes, strings (B, K); their scores (B, K);
      probabilities (B, N). A bad file fails the call with INVALID_ARGUMENT.
    - tolerant: the same, and valid, bool (B,). For a bad file it is False, with zeros and empty strings.
    - features: image_bytes -> features (B, width), the input of the head.
    - float_images: images, prepared float32 (B, height, width, channels) -> as serving_default, and logits (B, N).
    - uint8_images: images, pixels 0..255 of any one size -> as float_images.

    All inputs and outputs are float32. A model without a head returns features everywhere. A model of maps answers with
    classes, uint8 (B, height, width) of the image's size, or depth (B, rows, columns), and has no features. A model of
    other than 1 or 3 channels takes no image files: it has float_images, also as serving_default, and uint8_images.

    Args:
        model: on Keras' TensorFlow back end.
        path: the folder, such as "models/vit/1" (servers take its name as the version). It appears complete and
            verified, or not at all.
        labels: name of a list in zoo/labels, or the class names (also written to assets/labels.txt); None for the
            model's own list. Without any, classes are named by their numbers.
        top: number of classes in `classes` and `scores`, from 1.
        warmup: batch sizes, from 1, which a server runs before it serves (assets.extra/tf_serving_warmup_requests).
        dtype: "float32" or "bfloat16", of weights and matrix products; None for the model's own. "bfloat16" halves the
            folder and the memory, and is fast on processors with AMX or AVX512_BF16 only.
        bfloat16: whether to add serving_bfloat16 and float_images_bfloat16 to a float32 SavedModel, with matrix
            products in bfloat16. Each call converts the float32 weights, so they are slower than with `dtype`.
        verify: images for the comparison, as for `export.verify`; None for built-in patterns.

    Returns:
        The comparison of the SavedModel with the model, and the time and memory that the export took.

    Raises:
        FileExistsError: there is something at `path`.
        ValueError: labels, top, warmup or dtype do not fit, or model or back end are of another kind.
        VerificationError: the outputs are not those of the model.

    Example:
        >>> size = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "mlp_dim": 16, "num_heads": 2, "num_layers": 1}
        >>> model = keras_vit.VisionTransformer(keras_vit.ViTConfig(**size, num_classes=3))
        >>> report = keras_vit.export.saved_model(model, "vit/1", labels=["ant", "bee", "cat"], warmup=())
        >>> report.cosine > 0.9999
        True
    """
    _check(model, top)
    _check_dtypes(dtype, bfloat16=bfloat16)
    if bfloat16 and not isinstance(model, VisionTransformer):
        raise ValueError(
            f"bfloat16=True is for VisionTransformers; pass dtype='bfloat16'. Received: {type(model).__name__}"
        )
    batch_sizes = warmup_requests.check_batch_sizes(warmup)
    names = model.task.class_names(labels)
    path = Path(as_path(path, "path"))
    check_folder_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_path(path) as work:
        with measure_resources() as used:
            served = model.with_config(model.config, dtype=dtype) if dtype else model
            file_signatures = _write(served, work, names=names, top=int(top), bfloat16=bfloat16)
            warmup_requests.write(work, file_signatures, batch_sizes)
        report = verification.verify(model, work, verify)
        bfloat16_cosine = _bfloat16_cosine(model, work) if bfloat16 else None
        try:
            work.replace(path)
        except OSError:
            check_folder_path(path)  # another export was faster
            raise
    return dataclasses.replace(
        report, path=path, bfloat16_cosine=bfloat16_cosine, seconds=used.seconds, peak_bytes=used.peak_bytes
    )


def _check(model: VisionTransformer, top: int) -> None:
    """Raise a ValueError if no SavedModel can be written."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"A SavedModel is written on Keras' TensorFlow back end. Received: {keras.backend.backend()}")
    if not isinstance(getattr(model, "config", None), ViTConfig):
        raise ValueError(
            "saved_model writes VisionTransformers and models of maps; `model.export(path)` writes other Keras models. "
            f"Received: {type(model).__name__}"
        )
    if problem := quantization_problem(model):
        raise ValueError(f"saved_model starts from floating-point weights; `model.export(path)` does not. {problem}")
    check_counts(top=top)


def _check_dtypes(dtype: str | None, *, bfloat16: bool) -> None:
    if dtype is not None:
        one_of("dtype", dtype, DTYPES)
    if bfloat16 and dtype == "bfloat16":
        raise ValueError(
            'bfloat16=True adds signatures to a float32 SavedModel; with dtype="bfloat16" all signatures compute in '
            "bfloat16. Received: both"
        )


def _write(
    model: VisionTransformer, folder: Path, *, names: Sequence[str] | None, top: int, bfloat16: bool
) -> list[str]:
    """Write the SavedModel; return the signatures that take image files."""
    module, functions = signatures.build(model, labels=names, top=top, bfloat16=bfloat16)
    with tempfile.TemporaryDirectory() as scratch:
        if names is not None:
            asset = Path(scratch) / "labels.txt"
            asset.write_text("".join(f"{name}\n" for name in single_lines(names)), encoding="utf-8")
            module.labels = tf.saved_model.Asset(str(asset))
        tf.saved_model.save(module, str(folder), signatures=functions)
    return [name for name, function in functions.items() if function.input_signature[0].dtype == tf.string]


def _bfloat16_cosine(model: VisionTransformer, folder: Path) -> float:
    """Return the lowest cosine similarity of the outputs in bfloat16 with those in float32; raise if it is too low."""
    images = tf.constant(samples.images(model.config, NUM_BFLOAT16_IMAGES))
    call = tf.saved_model.load(str(folder)).signatures
    float32, bfloat16 = (
        np.asarray(main_output(call[f"float_images{suffix}"](images=images))) for suffix in ("", signatures.BFLOAT16)
    )
    cosine = float(verification.image_cosines(float32, bfloat16).min())
    if not cosine >= LEAST_BFLOAT16_COSINE:
        raise VerificationError(
            f"{folder} differs from the model in bfloat16: wanted cosine >= {LEAST_BFLOAT16_COSINE}. "
            f"Received: {cosine:.4f}"
        )
    return cosine
