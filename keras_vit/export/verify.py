"""The proof that what left is what was trained: the file is run, and its logits are compared with the model's."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.export.report import Report

Runner = Callable[[np.ndarray], np.ndarray]

LEAST_COSINE = 0.99  # 8-bit weights measure 0.999 and better; a broken file is far below


class VerificationError(ValueError):
    """An exported file whose outputs are not the model's."""


def verify(
    model: keras.Model,
    path: str | os.PathLike[str],
    images: Any = None,
    *,
    least_cosine: float = LEAST_COSINE,
) -> Report:
    """Runs an exported file beside the model it came from.

    Args:
        model: a VisionTransformer.
        path: of a SavedModel's folder or a .tflite file.
        images: prepared images (batch, height, width, channels); None means eight of noise.
        least_cosine: below which it is refused.

    Returns:
        what was measured.

    Raises:
        VerificationError: where an output is not finite, or an image's cosine is below `least_cosine`.
        ImportError: for a .tflite file without ai-edge-litert.
    """
    path = Path(path)
    images = _noise(model) if images is None else np.asarray(images, np.float32)
    expected = keras.ops.convert_to_numpy(model.predict_on_batch(images)).reshape(len(images), -1)
    run = runner(path)
    received, times = [], []
    for image in images:
        start = time.perf_counter()
        received.append(run(image[None]).ravel())
        times.append(time.perf_counter() - start)
    report = _compare(path, expected, np.array(received), 1000 * statistics.median(times))
    if not report.cosine >= least_cosine:  # so that NaN fails too
        raise VerificationError(f"{path} is not what the model computes: wanted cosine >= {least_cosine}. {report}")
    return report


def runner(path: str | os.PathLike[str]) -> Runner:
    """A function that runs an exported file: prepared images in, logits out. A .tflite file takes one image a call.

    Raises:
        ImportError: for a .tflite file without ai-edge-litert.
    """
    path = Path(path)
    return _saved_model_runner(path) if path.is_dir() else _tflite_runner(path)


def _compare(path: Path, expected: np.ndarray, received: np.ndarray, milliseconds: float) -> Report:
    norms = np.linalg.norm(expected, axis=1) * np.linalg.norm(received, axis=1)
    cosines = np.einsum("ij,ij->i", expected, received) / np.maximum(norms, np.finfo(np.float32).tiny)
    same = np.all(expected == received, axis=1)  # a new head's logits are all zero, and have no direction
    return Report(
        path=path,
        bytes=sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file()),
        images=len(expected),
        max_error=float(np.abs(expected - received).max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny)),
        cosine=float(np.where(same, 1.0, cosines).min()),
        agreement=float(np.mean(expected.argmax(axis=1) == received.argmax(axis=1))),
        milliseconds=milliseconds,
    )


def _noise(model: keras.Model) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (8, *model.input_shape[1:])).astype(np.float32)


def _saved_model_runner(path: Path) -> Runner:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))  # held by the closure: the signature alone does not keep its variables
    return lambda images: loaded.signatures["serving_default"](images=tf.constant(images))["logits"].numpy()


def _tflite_runner(path: Path) -> Runner:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        raise ImportError("Running .tflite files needs `pip install keras-vit[demo]`") from None
    interpreter = Interpreter(model_path=str(path), num_threads=2)
    interpreter.allocate_tensors()
    signature = interpreter.get_signature_runner()
    return lambda images: signature(images=images)["logits"]
