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

from keras_vit._util.checks import given
from keras_vit._util.progress import track
from keras_vit.errors import VerificationError
from keras_vit.export.check import inputs, samples, structure
from keras_vit.export.check.accelerators import check_accelerator, run_on_gpu
from keras_vit.export.check.half_precision import half_precision_cosine, largest_value
from keras_vit.export.check.measures import difference_cosine, lowest_cosine, same_best_class
from keras_vit.export.check.report import Report
from keras_vit.export.check.running import BATCH, ExportedModel, Outputs, load_exported, main_output
from keras_vit.export.quantization import modes
from keras_vit.export.quantization.modes import Mode
from keras_vit.model.vision_transformer import VisionTransformer

# Of a file of unknown mode: 8-bit weights measure 0.999 and better, a broken file far less.
LEAST = {"cosine": 0.99, "difference_cosine": 0.9, "agreement": 0.0}
# Of a SavedModel with bfloat16 weights: 0.9998 and 0.992 are the lowest of all model families.
LEAST_BFLOAT16 = {"cosine": 0.995, "difference_cosine": 0.95, "agreement": 0.0}
ACCEPTABLE = 0.8  # values below mean that the file is another model's or damaged
HALF = 16  # bits
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
        least_cosine: lowest accepted cosine similarity, -1 to 1, also of the differences between images, which may be
            lower in a mode. None for the mode's, or without a mode 0.99 and 0.9, in bfloat16 0.995 and 0.95.
        least_agreement: least share of images with the same best class or a near tie, 0 to 1. None for the mode's, or 0
            on the built-in patterns, whose classes mean little.
        accelerator: "gpu" to run a .tflite file on the GPU by LiteRT's CompiledModel, and on the CPU what the GPU
            refuses; `Report.accelerated` says which. "cpu" or None for the CPU.
        threads: number of threads for a .tflite file.
        progress: whether to show a progress bar.

    Returns:
        The measurements.

    Raises:
        VerificationError: outputs are not finite or too far from the model's, a .tflite file has unexpected operators,
            dimensions or size, or a SavedModel prepares image files differently from `model.preprocess`.
        FileNotFoundError: there is nothing at `path`.
        ValueError: the file cannot be loaded, images do not fit, or there is no such accelerator.
        ImportError: for a .tflite file without ai-edge-litert.

    Example:
        >>> from keras_vit import digits
        >>> model = keras_vit.zoo.load("digits")
        >>> report = keras_vit.export.tflite(model, "digits.tflite")
        >>> keras_vit.export.verify(model, "digits.tflite", digits.load().test_images[:50]).agreement
        1.0
    """
    path = Path(path)
    check_accelerator(accelerator, path)
    mode = modes.load_mode(mode) if isinstance(mode, str) else mode
    is_litert = path.is_file()
    if is_litert:
        _raise_problems(path, structure.find_problems(path))
    file = load_exported(path, threads)
    file_images, model_images = inputs.comparison_images(model, file, images)
    if is_litert:
        _raise_problems(path, structure.find_size_problems(path, model, mode, file_images.shape[1:3]))
    accelerated = None
    if accelerator == "gpu":
        run, accelerated = run_on_gpu(path, file_images)
        received, milliseconds = run.outputs, run.milliseconds
    else:
        received, milliseconds = _run(file, file_images, progress)
    broken = [name for name, values in received.items() if not np.isfinite(values).all()]
    _raise_problems(path, [f"computes NaN or infinity ({name})" for name in broken])
    expected = _model_outputs(model, model_images, list(received))
    report = _compare(path, expected, received, milliseconds=milliseconds, threads=file.threads, mode=mode)
    report = dataclasses.replace(report, accelerated=accelerated, threads=None if accelerated else file.threads)
    if file.is_bfloat16:
        report = dataclasses.replace(report, mode="bfloat16")
    has_classes = images is not None and getattr(getattr(model, "config", None), "num_classes", 1) != 0
    _check_thresholds(report, mode, has_classes=has_classes, **given(cosine=least_cosine, agreement=least_agreement))
    if mode is not None and min(mode.bits) >= HALF and is_litert and accelerated is None:
        outputs = main_output(expected), main_output(received)
        report = dataclasses.replace(
            report,
            half_precision_cosine=half_precision_cosine(path, file_images, *outputs),
            largest_value=largest_value(path, file_images),
        )
    return dataclasses.replace(report, files_error=_files_error(model, path, file))


def _check_thresholds(report: Report, mode: Mode | None, *, has_classes: bool, **given_least: float) -> None:
    """Raise a VerificationError with the next step if a value of the report is below the given or the mode's least."""
    names = ("cosine", "difference_cosine", "agreement")
    least = LEAST_BFLOAT16 if report.mode == "bfloat16" else LEAST
    if mode is not None:
        least = {name: getattr(mode, f"least_{name}") for name in names}
    least = least | ({} if has_classes else {"agreement": 0.0}) | given_least
    least["difference_cosine"] = min(least["difference_cosine"], least["cosine"])
    values = dict(zip(names, (report.cosine, report.difference_cosine, report.decided_agreement), strict=True))
    missed = {name: value for name, value in values.items() if value is not None and not value >= least[name]}
    if not missed:
        return
    steps = ["check that the file is of this model, with these weights"] if mode is None else []
    if mode is not None and min(mode.bits) < HALF:
        calibrates = mode.needs_calibration or mode.smoothing
        images = (
            "a hundred typical images, calibration=model.preprocess(...) (--images FOLDER), or " if calibrates else ""
        )
        steps.append(f"export it again with {images}quantize='float16'")
    if min(missed.values()) >= ACCEPTABLE:
        arguments: dict[str, float] = {}
        for name, value in missed.items():
            argument = "least_agreement" if name == "agreement" else "least_cosine"
            arguments[argument] = min(arguments.get(argument, 1.0), math.floor(10_000 * value) / 10_000)
        steps.append(f"accept it with {' and '.join(f'{name}={value}' for name, value in arguments.items())}")
    raise VerificationError(
        f"{report.path} differs from the model: wanted {' and '.join(f'{name} >= {least[name]}' for name in missed)}. "
        f"{'; '.join(report.lines()[1:])}. What to do: {'; or '.join(steps or ['write the damaged file again'])}"
    )


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
    dtype = "bfloat16" if file.is_bfloat16 else model.layers[1].compute_dtype
    limit = MAX_FILES_ERROR.get(dtype, MAX_FILES_ERROR_LOW_PRECISION)
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
    mode: Mode | None = None,
) -> Report:
    """Compare a file's outputs with the model's; raise a VerificationError if shapes differ."""
    pairs = [(name, values.shape, received[name].shape) for name, values in expected.items()]
    _raise_problems(
        path, [f"gives {name} of shape {got}, the model {want}" for name, want, got in pairs if want != got]
    )
    want, got = (main_output(outputs).astype(np.float64) for outputs in (expected, received))
    tiny = float(np.finfo(np.float32).tiny)
    has_probabilities = main_output(expected) is expected.get("probabilities")
    logits = [np.log(values.clip(tiny)) for values in (want, got)] if has_probabilities else [want, got]
    are_same, are_same_or_near = same_best_class(*logits)
    power, noise = float(np.sum(want**2)), float(np.sum((want - got) ** 2))
    return Report(
        path=path,
        bytes=sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file()),
        images=len(want),
        max_error=float(np.abs(want - got).max()) / max(float(np.abs(want).max()), tiny),
        cosine=min(lowest_cosine(values, received[name]) for name, values in expected.items()),
        sqnr=math.inf if noise == 0 else 10 * math.log10(max(power, tiny) / noise),
        difference_cosine=difference_cosine(want, got),
        agreement=float(are_same.mean()),
        decided_agreement=float(are_same_or_near.mean()),
        milliseconds=milliseconds,
        threads=threads,
        mode=None if mode is None else mode.name,
    )
