"""Verify exported files: run them and compare their outputs with the model's."""

import dataclasses
import math
import os
import statistics
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit._util.checks import as_path, given
from keras_vit._util.progress import track
from keras_vit.errors import VerificationError as VerificationError
from keras_vit.export.check import inputs, samples, structure
from keras_vit.export.check.accelerators import check_accelerator, run_on_gpu
from keras_vit.export.check.half_precision import check_half_precision, half_precision_figures
from keras_vit.export.check.measures import compare
from keras_vit.export.check.report import Report
from keras_vit.export.check.running import BATCH, ExportedModel, Outputs, load_exported, main_output
from keras_vit.export.check.thresholds import check_thresholds
from keras_vit.export.quantization import modes
from keras_vit.export.quantization.modes import Mode
from keras_vit.model import task as tasks

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
    accelerator: str | None = None,
    half_precision: bool = False,
    threads: int = 2,
    progress: bool = False,
) -> Report:
    """Run an exported file and compare its outputs with its model's.

    Args:
        model: a VisionTransformer, or another Keras model with one input and one output.
        path: a SavedModel's folder or a .tflite file. If a SavedModel takes image files, they are compared too. A
            SavedModel with bfloat16 weights has thresholds of its own.
        images: prepared images, float32 (batch, height, width, channels), or anything that `model.preprocess` takes:
            pixels, PIL images, paths. None takes built-in patterns. A file that takes pixels receives these as pixels.
        mode: by which the file was quantized, a name or a path to a .toml file: sets thresholds and expected size.
        least_cosine: lowest accepted mean cosine similarity, -1 to 1, of images and of the differences between images,
            which may be lower in a mode. None for the mode's, or without a mode 0.99 and 0.9, in bfloat16 0.995 and
            0.95; with fewer than 10 classes and at least 16 images of yours, agreement decides alone.
        least_agreement: least share of images with the same best class or a near tie, 0 to 1. None for the mode's, or 0
            on the built-in patterns, whose classes mean little.
        accelerator: "gpu" to run a .tflite file on the GPU by LiteRT's CompiledModel, and on the CPU what the GPU
            refuses; `Report.accelerated` says which. "cpu" or None for the CPU.
        half_precision: whether to run a .tflite file with float weights in half precision too, and to look for its
            largest value. The report has the results; they are not compared with thresholds.
        threads: number of threads for a .tflite file.
        progress: whether to show a progress bar.

    Returns:
        The measurements.

    Raises:
        VerificationError: outputs are not finite or too far from the model's, a .tflite file has unexpected operators,
            dimensions or size, or a SavedModel prepares image files differently from `model.preprocess`.
        FileNotFoundError: there is nothing at `path`.
        ValueError: the file cannot be loaded, LiteRT crashes or hangs on it, images do not fit, there is no such
            accelerator, or the file has no half precision.
        ImportError: for a .tflite file without ai-edge-litert.

    Example:
        >>> from keras_vit import digits
        >>> model = keras_vit.zoo.load("digits")
        >>> report = keras_vit.export.tflite(model, "digits.tflite")
        >>> keras_vit.export.verify(model, "digits.tflite", digits.load().test_images[:50]).agreement
        1.0
    """
    path = Path(as_path(path, "path"))
    task = tasks.of_model(model)
    is_litert = path.is_file()
    mode = mode if isinstance(mode, Mode | None) else modes.load_mode(mode)
    check_accelerator(accelerator, path)
    if half_precision:
        check_half_precision(path, mode, accelerator)
    if is_litert:
        _raise_problems(path, structure.find_problems(path))
    file = load_exported(path, threads)
    file_images, model_images = inputs.comparison_images(model, file, images)
    if is_litert:
        _raise_problems(path, structure.find_size_problems(path, model, mode, file_images.shape[1:3]))
    accelerated = None
    if accelerator == "gpu":
        run, accelerated = run_on_gpu(path, file_images)
        received = run.outputs
        milliseconds = run.milliseconds
    else:
        received, milliseconds = _run(file, file_images, progress)
    broken = [name for name, values in received.items() if not np.isfinite(values).all()]
    _raise_problems(path, [f"computes NaN or infinity ({name})" for name in broken])
    expected = _model_outputs(model, task, model_images, list(received))
    _raise_problems(path, _shape_problems(expected, received))
    report = Report(
        path=path,
        bytes=sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file()),
        **compare(task, expected, received),
        milliseconds=milliseconds,
        threads=None if accelerated else file.threads,
        mode="bfloat16" if file.is_bfloat16 else mode.name if mode else None,
        accelerated=accelerated,
    )
    has_classes = images is not None and task.num_classes != 0
    least = given(cosine=least_cosine, agreement=least_agreement)
    check_thresholds(report, mode, has_classes=has_classes, num_classes=task.num_classes, **least)
    if half_precision:
        outputs = main_output(expected), main_output(received)
        report = dataclasses.replace(report, **half_precision_figures(path, file_images, *outputs))
    return dataclasses.replace(report, files_error=_files_error(model, task, path, file))


def _raise_problems(path: Path, problems: list[str]) -> None:
    if problems:
        raise VerificationError(f"{path} {'; it '.join(problems)}")


def _shape_problems(expected: Outputs, received: Outputs) -> list[str]:
    """Return one phrase for each output whose shape is not the model's."""
    shapes = {name: (received[name].shape, values.shape) for name, values in expected.items()}
    return [f"gives {name} of shape {got}, the model {want}" for name, (got, want) in shapes.items() if got != want]


def _run(file: ExportedModel, images: np.ndarray, progress: bool) -> tuple[Outputs, float]:
    """Return the file's outputs, and the median milliseconds of an image."""
    batches = list(file.batches(images, 1 if file.threads else BATCH))
    file.call(batches[0][0])  # the first call allocates memory and packs kernels
    results = []
    times = []
    for batch, count in track(batches, "Verifying", show=progress):
        outputs, seconds = file.timed_call(batch)
        times.append(seconds / len(batch))
        results.append({name: values[:count] for name, values in outputs.items()})
    joined = {name: np.concatenate([result[name] for result in results]) for name in results[0]}
    return joined, 1000 * statistics.median(times)


def _model_outputs(model: keras.Model, task: tasks.Task, images: np.ndarray, names: list[str]) -> Outputs:
    """Return what the model computes for each of a file's outputs."""
    batches = np.array_split(images, math.ceil(len(images) / BATCH))
    to_array = keras.ops.convert_to_numpy
    own_output = np.concatenate([to_array(model.predict_on_batch(batch)) for batch in batches])
    outputs = {}
    for name in names:
        if name == "attention":
            maps = np.concatenate([to_array(model.attention_maps(batch)[-1]) for batch in batches])
            outputs[name] = maps[:, :, 0, model.config.num_prefix_tokens :]
        elif name == "features":
            features = [model.features(batch, ["pre_logits"])["pre_logits"] for batch in batches]
            outputs[name] = np.concatenate([to_array(keras.ops.cast(part, "float32")) for part in features])
        else:
            outputs[name] = task.exported_output(name, own_output)
    return outputs


def _files_error(model: keras.Model, task: tasks.Task, path: Path, file: ExportedModel) -> float | None:
    """Return the largest difference between a file's outputs for PNG files and the model's; None if it takes none."""
    if file.call_files is None or file.dtype != "float32" or not hasattr(model, "preprocess"):
        return None
    import tensorflow as tf

    # As many channels as the model has: TensorFlow's grey of a colour file differs from the original grey.
    pixels = samples.pixels(model.config, NUM_IMAGE_FILES, size=(97, 131))
    prepared = model.preprocess(pixels)
    [(name, received)] = file.call_files([tf.io.encode_png(image).numpy() for image in pixels]).items()
    error = _difference(file.call(prepared)[name], received)
    dtype = "bfloat16" if file.is_bfloat16 else model.layers[1].compute_dtype
    limit = MAX_FILES_ERROR.get(dtype, MAX_FILES_ERROR_LOW_PRECISION)
    if not error <= limit:  # NaN fails too
        raise VerificationError(
            f"{path} prepares image files differently from the model: wanted outputs within {limit} of the "
            f"model's. Received: {error:.1e}"
        )
    return _difference(_model_outputs(model, task, prepared, [name])[name], received)


def _difference(expected: np.ndarray, received: np.ndarray) -> float:
    """Return the largest difference, divided by the largest value if that is above 1."""
    return float(np.abs(received - expected).max() / max(1.0, float(np.abs(expected).max())))
