"""The proof that what left is what was trained: the file is run, and its outputs are compared with the model's."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.errors import VerificationError
from keras_vit.export.check import anatomy, inputs, samples
from keras_vit.export.check.report import Report
from keras_vit.export.check.running import BATCH, Running, classes, running
from keras_vit.export.quantization import modes
from keras_vit.export.quantization.modes import Mode
from keras_vit.model.vision_transformer import VisionTransformer

LEAST_COSINE = 0.99  # 8-bit weights measure 0.999 and better; a broken file is far below
FILES = 4  # image files that are sent to what takes those
# Between the answers of one graph to an image file and to its pixels, prepared here: those differ by a unit in the last
# place, which makes 1e-6 of a probability. In bfloat16 every layer may round it to another value.
LARGEST_ERROR = {"float32": 1e-5, "float64": 1e-5}
LARGEST_OTHERWISE = 0.05


@contextlib.contextmanager
def called(work: Path, path: Path) -> Iterator[None]:
    """A VerificationError speaks of the path that a file will have, not of where it is meanwhile.

    Args:
        work: where it is.
        path: where it will be.
    """
    try:
        yield
    except VerificationError as error:
        raise VerificationError(str(error).replace(os.fspath(work), os.fspath(path))) from None


def verify(
    model: keras.Model,
    path: str | os.PathLike[str],
    images: Any = None,
    *,
    mode: str | Mode | None = None,
    least_cosine: float | None = None,
    least_agreement: float | None = None,
    threads: int = 2,
    progress: bool = False,
) -> Report:
    """Runs an exported file beside the model it came from.

    Args:
        model: a VisionTransformer, or another Keras model of one input and one output.
        path: of a SavedModel's folder or a .tflite file. What a SavedModel makes of image files is compared too.
        images: prepared images, float32 (batch, height, width, channels), or what `model.preprocess` takes: pixels,
            PIL images, paths; None means a built-in set. A file that takes pixels is given those, and the model what
            `preprocess` makes of them.
        mode: by which the file was quantized; it gives the thresholds and the size that is expected.
        least_cosine: below which it is refused; None is the mode's, 0.99 without one.
        least_agreement: likewise; None is the mode's where images are given: what a classifier makes of the built-in
            ones is no decision.
        threads: for a .tflite file.
        progress: whether to show a bar.

    Returns:
        what was measured.

    Raises:
        VerificationError: where an output is not finite or too far from the model's, where a .tflite file has
            operators, dimensions or a size that the model does not explain, and where a SavedModel prepares image files
            otherwise than `model.preprocess`.
        ValueError: for images that do not fit.
        ImportError: for a .tflite file without ai-edge-litert.
    """
    path = Path(path)
    chosen = modes.mode(mode) if isinstance(mode, str) else mode
    litert = path.is_file()
    if litert:
        _refuse(path, anatomy.misfits(path))
    file = running(path, threads)
    given, prepared = inputs.pairs(model, file, images)
    if litert:
        _refuse(path, _size_misfit(path, anatomy.expected_bytes(model, chosen, given.shape[1:3])))
    received, milliseconds = _run(file, given, progress)
    _refuse(path, [f"computes NaN or infinity ({name})" for name, x in received.items() if not np.isfinite(x).all()])
    expected = _expected(model, prepared, list(received))
    mode_name = chosen.name if chosen else None
    report = _compare(path, expected, received, milliseconds=milliseconds, threads=file.threads, mode=mode_name)
    wanted = {
        "cosine": least_cosine if least_cosine is not None else chosen.least_cosine if chosen else LEAST_COSINE,
        "agreement": _least_agreement(model, least_agreement, chosen if images is not None else None),
    }
    missed = [f"{name} >= {least}" for name, least in wanted.items() if not getattr(report, name) >= least]
    if missed:
        raise VerificationError(
            f"{path} is not what the model computes: wanted {' and '.join(missed)}. {'; '.join(report.lines()[1:])}"
        )
    return dataclasses.replace(report, files_error=_files_error(model, path, file))


def _refuse(path: Path, reasons: list[str]) -> None:
    if reasons:
        raise VerificationError(f"{path} {'; it '.join(reasons)}")


def _size_misfit(path: Path, bounds: tuple[int, int]) -> list[str]:
    size = path.stat().st_size - anatomy.archive_bytes(path)
    fits = bounds[0] <= size <= bounds[1]
    return [] if fits else [f"has {size:,} bytes, where the model's weights explain {bounds[0]:,} to {bounds[1]:,}"]


def _least_agreement(model: keras.Model, given: float | None, mode: Mode | None) -> float:
    if given is not None:
        return given
    features = getattr(getattr(model, "config", None), "num_classes", 1) == 0  # and no classes
    return 0.0 if mode is None or features else mode.least_agreement


def _run(file: Running, images: np.ndarray, progress: bool) -> tuple[dict[str, np.ndarray], float]:
    """The file's outputs, and the median milliseconds of an image."""
    from rich.console import Console
    from rich.progress import track

    parts = list(file.parts(images, 1 if file.threads else BATCH))
    file.call(parts[0][0])  # memory is laid out and kernels are packed in the first call
    results, times = [], []
    bar = track(parts, "Verifying", console=Console(stderr=True), disable=not progress, transient=True)
    for part, count in bar:
        start = time.perf_counter()
        outputs = file.call(part)
        times.append((time.perf_counter() - start) / len(part))
        results.append({name: values[:count] for name, values in outputs.items()})
    together = {name: np.concatenate([result[name] for result in results]) for name in results[0]}
    return together, 1000 * statistics.median(times)


def _expected(model: keras.Model, images: np.ndarray, names: list[str]) -> dict[str, np.ndarray]:
    """What the model says to each of a file's outputs."""
    parts = np.array_split(images, math.ceil(len(images) / BATCH))
    to_array = keras.ops.convert_to_numpy
    logits = np.concatenate([to_array(model.predict_on_batch(part)) for part in parts])
    expected = {}
    for name in names:
        if name == "attention":
            prefix = model.config.num_prefix_tokens
            maps = [to_array(model.attention_maps(part)[-1]) for part in parts]
            expected[name] = np.concatenate(maps)[:, :, 0, prefix:]
        elif name == "features":
            features = [model.features(part, ["pre_logits"])["pre_logits"] for part in parts]
            expected[name] = np.concatenate([to_array(keras.ops.cast(part, "float32")) for part in features])
        elif name == "probabilities":
            raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
            expected[name] = raised / raised.sum(axis=-1, keepdims=True)
        else:
            expected[name] = logits
    return expected


def _files_error(model: keras.Model, path: Path, file: Running) -> float | None:
    """How far the answers to PNG files are from what the model makes of their pixels; None where no files are taken.

    Raises:
        VerificationError: where the files are prepared otherwise than by `model.preprocess`.
    """
    if file.files is None or file.dtype != "float32" or not isinstance(model, VisionTransformer):
        return None
    # Grey files for grey models: of a colour, TensorFlow's grey and the original are not the same.
    pixels = samples.pixels(model.config, FILES, size=(97, 131))
    prepared = model.preprocess(pixels)
    [(name, received)] = file.files([_png(image) for image in pixels]).items()
    error = _difference(received, file.call(prepared)[name])
    largest = LARGEST_ERROR.get(model.get_layer("embedding").compute_dtype, LARGEST_OTHERWISE)
    if not error <= largest:  # so that NaN fails too
        raise VerificationError(
            f"{path} prepares image files otherwise than the model: wanted answers within {largest} of those to their "
            f"prepared pixels. Received: {error:.1e}"
        )
    return _difference(received, _expected(model, prepared, [name])[name])


def _png(pixels: np.ndarray) -> bytes:
    import tensorflow as tf

    file: bytes = tf.io.encode_png(pixels).numpy()
    return file


def _difference(received: np.ndarray, expected: np.ndarray) -> float:
    """The largest, as it is of probabilities, and of larger values over the largest."""
    return float(np.abs(received - expected).max() / max(1.0, float(np.abs(expected).max())))


def _compare(
    path: Path,
    expected: dict[str, np.ndarray],
    received: dict[str, np.ndarray],
    *,
    milliseconds: float,
    threads: int | None = None,
    mode: str | None = None,
) -> Report:
    shapes = {name: (values.shape, received[name].shape) for name, values in expected.items()}
    _refuse(
        path, [f"gives {name} of shape {got}, the model {want}" for name, (want, got) in shapes.items() if want != got]
    )
    want, got = classes(expected).astype(np.float64), classes(received).astype(np.float64)
    tiny = float(np.finfo(np.float32).tiny)
    power, noise = float(np.sum(want**2)), float(np.sum((want - got) ** 2))
    return Report(
        path=path,
        bytes=sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file()),
        images=len(want),
        max_error=float(np.abs(want - got).max()) / max(float(np.abs(want).max()), tiny),
        cosine=min(lowest_cosine(values, received[name]) for name, values in expected.items()),
        sqnr=math.inf if noise == 0 else 10 * math.log10(max(power, tiny) / noise),
        agreement=float(np.mean(want.argmax(axis=-1) == got.argmax(axis=-1))),
        milliseconds=milliseconds,
        threads=threads,
        mode=mode,
    )


def lowest_cosine(want: np.ndarray, got: np.ndarray) -> float:
    """The lowest cosine similarity of an image's outputs, (images, ...) each; 1 for two that are equal, zeros too."""
    want, got = (values.reshape(len(values), -1).astype(np.float64) for values in (want, got))
    norms = np.linalg.norm(want, axis=1) * np.linalg.norm(got, axis=1)
    cosines = np.einsum("ij,ij->i", want, got) / np.maximum(norms, np.finfo(np.float32).tiny)
    same = np.all(want == got, axis=1)  # a new head's logits are all zero, and have no direction
    return float(np.where(same, 1.0, cosines.clip(-1, 1)).min())
