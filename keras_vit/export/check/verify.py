"""Verify exported files: run them and compare their outputs with the model's."""

import dataclasses
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit._util.progress import track
from keras_vit.errors import VerificationError
from keras_vit.export.check import inputs, samples, structure
from keras_vit.export.check.report import Report
from keras_vit.export.check.running import BATCH, ExportedModel, Outputs, load_exported, main_output
from keras_vit.export.quantization import modes
from keras_vit.export.quantization.modes import Mode
from keras_vit.model.vision_transformer import VisionTransformer

LEAST_COSINE = 0.99  # of a file of unknown mode: 8-bit weights measure 0.999 and better, a broken file far less
NUM_IMAGE_FILES = 4  # sent to a SavedModel that takes image files
# Largest difference between a graph's outputs for an image file and for its pixels prepared here, by compute dtype.
# The images differ in the last place, which changes a probability by 1e-6; in bfloat16 every layer may add to it.
MAX_FILES_ERROR = {"float32": 1e-5, "float64": 1e-5}
MAX_FILES_ERROR_LOW_PRECISION = 0.05


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
    """Run an exported file and compare its outputs with its model's.

    Args:
        model: a VisionTransformer, or another Keras model with one input and one output.
        path: a SavedModel's folder or a .tflite file. If a SavedModel takes image files, they are compared too.
        images: prepared images, float32 (batch, height, width, channels), or anything that `model.preprocess` takes:
            pixels, PIL images, paths. None takes built-in patterns. A file that takes pixels receives these as pixels.
        mode: by which the file was quantized, a name or a path to a .toml file: sets thresholds and expected size.
        least_cosine: lowest accepted cosine similarity, -1 to 1. None for the mode's, or 0.99 without a mode.
        least_agreement: least share of images with the same best class, 0 to 1. None for the mode's, or 0 on the
            built-in patterns, whose classes mean little.
        threads: number of threads for a .tflite file.
        progress: whether to show a progress bar.

    Returns:
        The measurements.

    Raises:
        VerificationError: outputs are not finite or too far from the model's, a .tflite file has unexpected operators,
            dimensions or size, or a SavedModel prepares image files differently from `model.preprocess`.
        FileNotFoundError: there is nothing at `path`.
        ValueError: the file cannot be loaded, or images do not fit.
        ImportError: for a .tflite file without ai-edge-litert.

    Example:
        >>> from keras_vit import digits
        >>> model = keras_vit.zoo.load("digits")
        >>> report = keras_vit.export.tflite(model, "digits.tflite")
        >>> keras_vit.export.verify(model, "digits.tflite", digits.load().test_images[:50]).agreement
        1.0
    """
    path = Path(path)
    mode = modes.load_mode(mode) if isinstance(mode, str) else mode
    is_litert = path.is_file()
    if is_litert:
        _raise_problems(path, structure.find_problems(path))
    file = load_exported(path, threads)
    file_images, model_images = inputs.comparison_images(model, file, images)
    if is_litert:
        _raise_problems(path, structure.find_size_problems(path, model, mode, file_images.shape[1:3]))
    received, milliseconds = _run(file, file_images, progress)
    broken = [name for name, values in received.items() if not np.isfinite(values).all()]
    _raise_problems(path, [f"computes NaN or infinity ({name})" for name in broken])
    expected = _model_outputs(model, model_images, list(received))
    mode_name = None if mode is None else mode.name
    report = _compare(path, expected, received, milliseconds=milliseconds, threads=file.threads, mode=mode_name)
    if least_cosine is None:
        least_cosine = LEAST_COSINE if mode is None else mode.least_cosine
    if least_agreement is None:
        has_classes = getattr(getattr(model, "config", None), "num_classes", 1) != 0
        is_meaningful = images is not None and has_classes
        least_agreement = 0.0 if mode is None or not is_meaningful else mode.least_agreement
    wanted = {"cosine": least_cosine, "agreement": least_agreement}
    missed = [f"{name} >= {least}" for name, least in wanted.items() if not getattr(report, name) >= least]
    if missed:
        raise VerificationError(
            f"{path} differs from the model: wanted {' and '.join(missed)}. {'; '.join(report.lines()[1:])}"
        )
    return dataclasses.replace(report, files_error=_files_error(model, path, file))


def lowest_cosine(expected: np.ndarray, received: np.ndarray) -> float:
    """Return the lowest cosine similarity of an image's outputs, each (images, ...); 1 for equal ones, even zeros."""
    x, y = (values.reshape(len(values), -1).astype(np.float64) for values in (expected, received))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    cosines = np.einsum("ij,ij->i", x, y) / np.maximum(norms, np.finfo(np.float32).tiny)
    are_equal = np.all(x == y, axis=1)  # the logits of a new head are all zero, and have no direction
    return float(np.where(are_equal, 1.0, cosines.clip(-1, 1)).min())


def _raise_problems(path: Path, problems: list[str]) -> None:
    if problems:
        raise VerificationError(f"{path} {'; it '.join(problems)}")


def _run(file: ExportedModel, images: np.ndarray, progress: bool) -> tuple[Outputs, float]:
    """Return the file's outputs, and the median milliseconds of an image."""
    batches = list(file.batches(images, 1 if file.threads else BATCH))
    file.call(batches[0][0])  # the first call allocates memory and packs kernels
    results, times = [], []
    for batch, count in track(batches, "Verifying", show=progress):
        start = time.perf_counter()
        outputs = file.call(batch)
        times.append((time.perf_counter() - start) / len(batch))
        results.append({name: values[:count] for name, values in outputs.items()})
    joined = {name: np.concatenate([result[name] for result in results]) for name in results[0]}
    return joined, 1000 * statistics.median(times)


def _model_outputs(model: keras.Model, images: np.ndarray, names: list[str]) -> Outputs:
    """Return what the model computes for each of a file's outputs."""
    batches = np.array_split(images, math.ceil(len(images) / BATCH))
    to_array = keras.ops.convert_to_numpy
    logits = np.concatenate([to_array(model.predict_on_batch(batch)) for batch in batches])
    outputs = {}
    for name in names:
        if name == "attention":
            maps = np.concatenate([to_array(model.attention_maps(batch)[-1]) for batch in batches])
            outputs[name] = maps[:, :, 0, model.config.num_prefix_tokens :]
        elif name == "features":
            features = [model.features(batch, ["pre_logits"])["pre_logits"] for batch in batches]
            outputs[name] = np.concatenate([to_array(keras.ops.cast(part, "float32")) for part in features])
        elif name == "probabilities":
            exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
            outputs[name] = exponentials / exponentials.sum(axis=-1, keepdims=True)
        else:
            outputs[name] = logits
    return outputs


def _files_error(model: keras.Model, path: Path, file: ExportedModel) -> float | None:
    """Return the largest difference between a file's outputs for PNG files and the model's; None if it takes none."""
    if file.call_files is None or file.dtype != "float32" or not isinstance(model, VisionTransformer):
        return None
    import tensorflow as tf

    # As many channels as the model has: TensorFlow's grey of a colour file differs from the original grey.
    pixels = samples.pixels(model.config, NUM_IMAGE_FILES, size=(97, 131))
    prepared = model.preprocess(pixels)
    [(name, received)] = file.call_files([tf.io.encode_png(image).numpy() for image in pixels]).items()
    error = _difference(file.call(prepared)[name], received)
    limit = MAX_FILES_ERROR.get(model.layers[1].compute_dtype, MAX_FILES_ERROR_LOW_PRECISION)
    if not error <= limit:  # NaN fails too
        raise VerificationError(
            f"{path} prepares image files differently from the model: wanted outputs within {limit} of the "
            f"model's. Received: {error:.1e}"
        )
    return _difference(_model_outputs(model, prepared, [name])[name], received)


def _difference(expected: np.ndarray, received: np.ndarray) -> float:
    """Return the largest difference, divided by the largest value if that is above 1."""
    return float(np.abs(received - expected).max() / max(1.0, float(np.abs(expected).max())))


def _compare(
    path: Path,
    expected: Outputs,
    received: Outputs,
    *,
    milliseconds: float,
    threads: int | None = None,
    mode: str | None = None,
) -> Report:
    """Compare a file's outputs with the model's; raise a VerificationError if shapes differ."""
    pairs = [(name, values.shape, received[name].shape) for name, values in expected.items()]
    _raise_problems(
        path, [f"gives {name} of shape {got}, the model {want}" for name, want, got in pairs if want != got]
    )
    want, got = (main_output(outputs).astype(np.float64) for outputs in (expected, received))
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
