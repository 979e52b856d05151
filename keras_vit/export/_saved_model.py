"""Write SavedModels, which TensorFlow serves without Keras and without this package."""

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_vit._util.checks import as_path, check_counts, is_count, one_of
from keras_vit._util.files import check_folder_path, temporary_path
from keras_vit.export import samples, server, verification
from keras_vit.export.report import Report, measure_resources
from keras_vit.model.config import ViTConfig
from keras_vit.model.labels import single_lines
from keras_vit.model.vision_transformer import VisionTransformer

DTYPES = ("float32", "bfloat16")
MAX_WARMUP_REQUESTS = 1000  # that a server accepts
WARMUP_FILE = Path("assets.extra") / "tf_serving_warmup_requests"


def saved_model(
    model: VisionTransformer,
    path: str | os.PathLike[str],
    *,
    labels: str | Sequence[str] | None = None,
    top: int = 5,
    warmup: Iterable[int] = (1,),
    dtype: str | None = None,
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

    All inputs and outputs are float32. A model without a head returns features everywhere, one whose
    head is a projection logits. A DenseModel answers with
    classes, uint8 (B, height, width) of the image's size, or depth (B, rows, columns), and has no features. A model of
    other than 1 or 3 channels takes no image files: it has float_images, also as serving_default, and uint8_images.

    Args:
        model: on Keras' TensorFlow back end.
        path: the folder, such as "models/vit/1" (servers take its name as the version). It appears complete and
            verified, or not at all.
        labels: name of a list in zoo/labels, or the class names (also written to assets/labels.txt); None for the
            model's own list. Without any, classes are named by their numbers.
        top: number of classes in `classes` and `scores`, from 1.
        warmup: batch sizes, from 1, which a server runs before it serves (assets.extra/tf_serving_warmup_requests); ()
            means none.
        dtype: "float32" or "bfloat16", of weights and matrix products; None for the model's own. "bfloat16" halves the
            folder and the memory, and is fast on processors with AMX or AVX512_BF16 only.
        verify: images for the comparison, as for `export.verify`; None for built-in patterns.

    Returns:
        The comparison of the SavedModel with the model, and the time and memory that the export took.

    Raises:
        FileExistsError: there is something at `path`.
        ValueError: labels, top, warmup or dtype do not fit, or model or back end are of another kind.
        VerificationError: the outputs are not those of the model.

    Example:
        >>> model = keras_vit.zoo.load("digits")
        >>> report = keras_vit.export.saved_model(model, "vit/1", labels=list("abcdefghij"), warmup=())
        >>> report.cosine > 0.9999
        True
    """
    _check_model(model, top)
    if dtype is not None:
        one_of("dtype", dtype, DTYPES)
    batch_sizes = _warmup_sizes(warmup)
    names = model.task.class_names(labels)
    samples.labelled_images(model, verify)  # an error comes before anything is written
    path = Path(as_path(path, "path"))
    check_folder_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_path(path) as work:
        with measure_resources() as used:
            served = model.with_config(model.config, dtype=dtype) if dtype else model
            file_signatures = _write_graph(served, work, names=names, top=int(top))
            _write_warmup(work, file_signatures, batch_sizes)
        report = verification.verify(model, work, verify)
        try:
            work.replace(path)
        except OSError:
            check_folder_path(path)  # another export was faster
            raise
    sizes = tuple(batch_sizes) if file_signatures else ()
    return dataclasses.replace(report, path=path, warmup=sizes, seconds=used.seconds, peak_bytes=used.peak_bytes)


def _check_model(model: VisionTransformer, top: int) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "saved_model needs KERAS_BACKEND=tensorflow: save a .keras file, and load it in a new process with it. "
            f"Received: KERAS_BACKEND={keras.backend.backend()}"
        )
    if not isinstance(getattr(model, "config", None), ViTConfig):
        raise ValueError(
            "saved_model writes VisionTransformers and DenseModels; `model.export(path)` writes other Keras models. "
            f"Received: {type(model).__name__}"
        )
    check_counts(top=top)


def _warmup_sizes(warmup: Iterable[int]) -> list[int]:
    """Check the batch sizes of the warm-up requests."""
    sizes: list[Any] = list(warmup) if isinstance(warmup, Iterable) else [None]
    if not all(is_count(size, least=1) for size in sizes):
        raise ValueError(f"warmup must be batch sizes >= 1, such as (1, 8); () means none. Received: {warmup!r:.200}")
    return [int(size) for size in sizes]


def _write_graph(model: VisionTransformer, folder: Path, *, names: Sequence[str] | None, top: int) -> list[str]:
    """Write the SavedModel; return the signatures that take image files."""
    module, functions = server.build(model, labels=names, top=top)
    with tempfile.TemporaryDirectory() as scratch:
        if names is not None:
            asset = Path(scratch) / "labels.txt"
            asset.write_text("".join(f"{name}\n" for name in single_lines(names)), encoding="utf-8")
            module.labels = tf.saved_model.Asset(str(asset))
        tf.saved_model.save(module, str(folder), signatures=functions)
    return [name for name, function in functions.items() if function.input_signature[0].dtype == tf.string]


def _write_warmup(folder: Path, signatures: Sequence[str], sizes: Sequence[int]) -> None:
    """Write a request of tiny JPEG files for every signature and batch size; the first call of each size is slow."""
    if len(sizes) * len(signatures) > MAX_WARMUP_REQUESTS:
        limit = MAX_WARMUP_REQUESTS // len(signatures)
        raise ValueError(f"warmup must be at most {limit} batch sizes. Received: {len(sizes)}")
    if not sizes or not signatures:
        return
    image = tf.io.encode_jpeg(tf.fill((8, 8, 3), tf.constant(128, tf.uint8))).numpy()
    path = folder / WARMUP_FILE
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as records:
        for name, size in itertools.product(signatures, sizes):
            records.write(_prediction_log(name, tf.make_tensor_proto([image] * size).SerializeToString()))


def _prediction_log(signature: str, images: bytes) -> bytes:
    """Serialize a PredictionLog of TensorFlow Serving (apis/prediction_log.proto); the server adds the model's name."""
    model_spec = _field(3, signature.encode())  # signature_name
    entry = _field(1, b"image_bytes") + _field(2, images)  # of the map `inputs`
    predict_log = _field(1, _field(1, model_spec) + _field(2, entry))  # request: model_spec, inputs
    return _field(6, predict_log)


def _field(number: int, content: bytes) -> bytes:
    """Encode a field of text, bytes or a message in the format of protocol buffers: key, length, content."""
    length, left = b"", len(content)
    while left > 0x7F:
        length, left = length + bytes([left & 0x7F | 0x80]), left >> 7
    return bytes([number << 3 | 2]) + length + bytes([left]) + content
