"""Verify exported files: run them, and compare their outputs with the model's."""

import dataclasses
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit._util.checks import as_path, given
from keras_vit._util.progress import timed, track
from keras_vit.errors import VerificationError as VerificationError
from keras_vit.export import samples
from keras_vit.export.exported import (
    BATCH,
    ExportedModel,
    Outputs,
    find_problems,
    load_exported,
    main_name,
    read_structure,
)
from keras_vit.export.modes import Mode, implied_scale, implied_sqnr, load_mode
from keras_vit.export.phone import read_inputs, read_outputs, write_inputs
from keras_vit.export.report import Report
from keras_vit.export.sizes import find_size_problems
from keras_vit.model import task as tasks

NUM_IMAGE_FILES = 4  # sent to a SavedModel that takes image files
# Largest difference between a graph's outputs for an image file and for its pixels prepared here, by compute dtype.
# The images differ in the last place; in bfloat16 every layer may add to that.
MAX_FILES_ERROR = {"float32": 1e-5, "float64": 1e-5}
MAX_FILES_ERROR_LOW_PRECISION = 0.05
# Largest .tflite file that is run without XNNPACK too: an image of a ViT-B/16 takes a second there, and kernels of
# LiteRT that differ do so in files of every size.
BUILTIN_BYTES = 32 * 2**20
BUILTIN_NUMBERS, MOST_BUILTIN_IMAGES = 64, 8  # of outputs that are compared without XNNPACK: of few images if they do
MAX_PAIRED_IMAGES = 1000  # images; of more, every second, third ... is taken
LEAST_DIFFERENCE = 0.1  # least difference of two images that counts, as a share of the root mean square one
ROUNDING_ERROR = 1e-5  # as a share of the outputs: smaller differences between images are not the model's
TINY = float(np.finfo(np.float32).tiny)
# Thresholds of a SavedModel that computes in bfloat16: all model families are above them.
BFLOAT16 = Mode(
    name="bfloat16",
    summary="bfloat16 weights or matrix products",
    devices="servers",
    storage="float16",
    least_cosine=0.995,
    least_difference_cosine=0.95,
    least_agreement=0.0,
)
LOW_PRECISION = {"bfloat16", "float16"}
ROUNDED_COSINE = 0.9999  # of outputs whose products a GPU or an NPU computes in float16, or in TensorFloat32
LEAST_ACCEPTABLE = 0.8  # values below mean that the file is another model's or damaged
HALF_BITS = 16  # bits
# A map of classes has no margins, by which near ties would not count: so many times more pixels may differ.
CLASS_MAP_TOLERANCE = 10
LEAST_CLASS_MAP = 0.97  # least share of a mode's images with the same class that counts for maps of classes
# The direction of few logits says little: they are small where classes are close, and an error of a few percent of
# the largest logit turns them. So a quantized file whose best class is right on enough images may have a lower mean
# cosine. The differences between images have the mode's threshold even then: they tell a quantized file of a few
# classes from a file that lacks an MLP.
MANY_CLASSES = 10
MIN_IMAGES = 16
# Fields of a report that compare outputs: None where all of these are constant.
COMPARED_FIELDS = (
    *("max_error", "cosine", "mean_cosine", "difference_cosine", "difference_scale", "sqnr"),
    *("agreement", "decided_agreement", "mean_iou", "relative_error"),
)
UNITS = {"sqnr": " dB"}  # of the values with thresholds
# The cosine with which `least_cosine` accepts a value: the inverses of `implied_sqnr` and `implied_scale`.
IMPLIED_COSINES: dict[str, Callable[[float], float]] = {
    "sqnr": lambda sqnr: 1 - 10 ** (-sqnr / 10) / 2,
    "scale": lambda scale: 1 - (1 - scale) ** 2 / 2,
}
FEW_CLASSES_COSINE = 0.9


def verify(
    model: keras.Model,
    path: str | os.PathLike[str],
    images: Any = None,
    *,
    labels: Any = None,
    mode: str | Mode | None = None,
    least_cosine: float | None = None,
    least_agreement: float | None = None,
    accelerator: str | None = None,
    inputs: str | os.PathLike[str] | None = None,
    outputs: str | os.PathLike[str] | None = None,
    threads: int = 2,
    progress: bool = False,
) -> Report:
    """Run an exported file and compare its outputs with its model's.

    Args:
        model: a VisionTransformer, or another Keras model with one input and one output.
        path: a SavedModel's folder or a .tflite file of your own; files of strangers can end the process. If a
            SavedModel takes image files, they are compared too. One in bfloat16 has thresholds of its own.
        images: prepared images, float32 (batch, height, width, channels), or anything that `model.preprocess` takes:
            pixels, PIL images, paths, or the path of a folder of images. None takes built-in patterns. A file that
            takes pixels receives these as pixels.
        labels: the class of each image, numbers from 0, int (batch,), or names of the model's classes: the report then
            has the accuracy of model and file. None takes those of files in folders that are named as the classes.
        mode: by which the file was quantized, a name or a path to a .toml file: sets thresholds and expected size. None
            takes the thresholds of the mode whose files store weights and activations as this one does.
        least_cosine: lowest accepted mean cosine similarity, -1 to 1, of images and of the differences between images,
            which may be lower in a mode; outputs may also have the errors that this cosine allows, see
            docs/numerics-and-traps.md. None for the mode's. With fewer than 10 classes and at least 16 images of
            yours, a quantized file may have a mean cosine down to 0.9 if it agrees with the model.
        least_agreement: least share of images with the same best class or a near tie, 0 to 1. None for the mode's, or 0
            on the built-in patterns, whose classes mean little, and for a phone's outputs.
        accelerator: of `outputs`, those of the phone's "cpu", "gpu" or "npu"; None for the CPU's.
        inputs: folder into which the images are written too, for examples/android/check.sh, which runs a .tflite file
            on a phone.
        outputs: such a folder, with the phone's outputs. These are compared with the model's for the same images, and
            the file does not run here but for one image, which shows its outputs. `Report.accelerated` says which
            operators the accelerator took.
        threads: number of threads for a .tflite file.
        progress: whether to show a progress bar.

    Returns:
        The measurements.

    Raises:
        VerificationError: outputs are not finite or too far from the model's, a .tflite file has unexpected operators,
            dimensions or size, or a SavedModel prepares image files differently from `model.preprocess`.
        FileNotFoundError: there is nothing at `path`.
        ValueError: the file cannot be loaded or run, images or labels do not fit, or a phone's outputs are incomplete.
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
    given_mode = mode if isinstance(mode, Mode | None) else load_mode(mode)
    if accelerator is not None and outputs is None:
        raise ValueError(f"accelerator is for the outputs= of a phone. Received: {accelerator!r:.200} without them")
    if outputs is not None and (images is not None or inputs is not None):
        raise ValueError("outputs= are compared on the images in its folder. Received: images or inputs= too")
    structure = read_structure(path) if path.is_file() else None
    if structure is not None:
        _raise_problems(path, find_problems(structure))
    images, classes = samples.labelled_images(model, images)
    classes = classes if labels is None else task.label_numbers(labels)
    file = load_exported(path, threads)
    shown = images if outputs is None else read_inputs(Path(outputs), file)
    file_images, model_images = samples.comparison_images(model, file, shown)
    if inputs is not None:
        write_inputs(Path(inputs), file, file_images)
    if structure is not None:
        _raise_problems(path, find_size_problems(path, model, given_mode, file_images.shape[1:3]))
    on_phone = None
    if outputs is not None:
        example, num_operators = file.call(file_images[:1]), 0 if structure is None else structure.num_operators
        on_phone = read_outputs(Path(outputs), accelerator or "cpu", example, num_operators)
        received, milliseconds = on_phone.outputs, on_phone.milliseconds
    else:
        received, milliseconds = _run(file, file_images, progress)
    broken = [name for name, values in received.items() if not np.isfinite(values).all()]
    _raise_problems(path, [f"computes NaN or infinity ({name})" for name in broken])
    expected = _model_outputs(model, task, model_images, list(received))
    _raise_problems(path, _shape_problems(expected, received))
    model_accuracy, accuracy = _accuracies(expected, received, classes)
    stored = "bfloat16" if file.is_bfloat16 else None if structure is None else structure.storage
    report = Report(
        path=path,
        bytes=sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file()),
        **compare(task, expected, received),
        milliseconds=milliseconds,
        threads=None if on_phone else file.threads,
        mode=stored if given_mode is None else given_mode.name,
        device=None if on_phone is None else on_phone.device,
        accelerated=None if on_phone is None else on_phone.accelerated,
        model_accuracy=model_accuracy,
        accuracy=accuracy,
    )
    chosen_mode = given_mode or _default_mode(model, stored or "none")
    report = check_thresholds(
        report,
        chosen_mode,
        has_classes=images is not None and task.has_classes,
        num_classes=task.num_classes,
        is_detected=given_mode is None,
        is_rounded=accelerator in ("gpu", "npu"),
        **given(cosine=least_cosine, agreement=least_agreement),
    )
    is_small = structure is not None and report.bytes <= BUILTIN_BYTES
    if file.call_builtin is not None and is_small and on_phone is None:
        limits = [chosen_mode.thresholds["sqnr"], *([] if least_cosine is None else [implied_sqnr(least_cosine)])]
        _check_builtin(path, file, file_images, received, least_sqnr=min(limits))
    takes_files = file.call_files is not None and file.dtype == "float32" and hasattr(model, "preprocess")
    return dataclasses.replace(report, files_error=_files_error(model, task, path, file) if takes_files else None)


def _accuracies(expected: Outputs, received: Outputs, labels: np.ndarray | None) -> tuple[float | None, float | None]:
    """Shares of images whose best class is the labelled one, for the model and for the file; None without labels."""
    name = next((name for name in ("logits", "probabilities") if name in expected), "")
    if labels is None or not name or expected[name].ndim != 2:
        return None, None
    if labels.shape != expected[name].shape[:1]:
        raise ValueError(f"labels are one class for each of {len(expected[name])} images. Received: {len(labels)}")
    model, file = (float(np.mean(side[name].argmax(axis=1) == labels)) for side in (expected, received))
    return model, file


def _default_mode(model: keras.Model, stored: str) -> Mode:
    """Choose the thresholds' mode by how a file stores weights, and the dtypes that model and file compute in."""
    computes_in = {layer.compute_dtype for layer in model._flatten_layers()}
    is_low = stored == "bfloat16" or (stored in ("none", "float16") and computes_in & LOW_PRECISION)
    return BFLOAT16 if is_low else load_mode(stored)


def _check_builtin(
    path: Path, file: ExportedModel, images: np.ndarray, received: Outputs, *, least_sqnr: float
) -> None:
    """Run a .tflite file without XNNPACK on a few images; raise if it gives other outputs than with it.

    Both may be as far from the model as `least_sqnr` allows, so their errors together may have twice the power: 3 dB.
    Of few numbers, as of a head of four classes, the mean squares scatter: two standard deviations are allowed.
    """
    assert file.call_builtin is not None
    shortest = min(values[0].size for values in received.values())
    chosen = images[: min(-(-BUILTIN_NUMBERS // shortest), MOST_BUILTIN_IMAGES)]
    calls = [
        {name: values[:count] for name, values in file.call_builtin(batch).items()}
        for batch, count in file.batches(chosen, 1)
    ]
    found = {name: np.concatenate([call[name] for call in calls]) for name in calls[0]}
    compared = [name for name, values in found.items() if values.dtype.kind == "f"]  # not numbers of classes
    ratio = min((sqnr(received[name][: len(found[name])], found[name]) for name in compared), default=math.inf)
    fewest = min((found[name].size for name in compared), default=1)
    least_sqnr -= 3 + 2 * 10 / math.log(10) * math.sqrt(4 / fewest)  # of the ratio of two mean squares
    if not ratio >= least_sqnr:  # NaN fails too
        raise VerificationError(
            f"{path} computes other outputs without XNNPACK, the kernels that LiteRT uses on most CPUs: wanted an SQNR "
            f"of at least {least_sqnr:.1f} dB between both. Received: {ratio:.1f} dB. Apps and browsers may run it so"
        )


def _raise_problems(path: Path, problems: list[str]) -> None:
    if problems:
        raise VerificationError(f"{path} {'; it '.join(problems)}")


def _shape_problems(expected: Outputs, received: Outputs) -> list[str]:
    """Describe each output whose shape is not the model's."""
    shapes = {name: (received[name].shape, values.shape) for name, values in expected.items()}
    return [f"gives {name} of shape {got}, the model {want}" for name, (got, want) in shapes.items() if got != want]


def _run(file: ExportedModel, images: np.ndarray, progress: bool) -> tuple[Outputs, float]:
    """Run the file on all images; also the median milliseconds of an image."""
    batches = list(file.batches(images, 1 if file.threads else BATCH))
    file.call(batches[0][0])  # the first call allocates memory and packs kernels
    results = []
    times = []
    for batch, count in track(batches, "Verifying", show=progress):
        outputs, seconds = timed(file.call, batch)
        times.append(seconds / len(batch))
        results.append({name: values[:count] for name, values in outputs.items()})
    joined = {name: np.concatenate([result[name] for result in results]) for name in results[0]}
    return joined, 1000 * statistics.median(times)


def _model_outputs(model: keras.Model, task: tasks.Task, images: np.ndarray, names: list[str]) -> Outputs:
    batches = np.array_split(images, math.ceil(len(images) / BATCH))
    to_array = keras.ops.convert_to_numpy
    parts = [model.predict_on_batch(batch) for batch in batches]
    own_output = keras.tree.map_structure(lambda *values: np.concatenate([*map(to_array, values)]), *parts)
    outputs = {}
    for name in names:
        if name == "attention":
            maps = np.concatenate([to_array(model.attention_maps(batch)[-1]) for batch in batches])
            class_tokens, prefix = model.config.num_class_tokens, model.config.num_prefix_tokens
            outputs[name] = maps[:, :, :class_tokens, prefix:].mean(axis=2)
        elif name == "features":
            features = [model.features(batch, ["pre_logits"])["pre_logits"] for batch in batches]
            outputs[name] = np.concatenate([to_array(keras.ops.cast(part, "float32")) for part in features])
        else:
            outputs[name] = task.exported_output(name, own_output)
    return outputs


def _files_error(model: keras.Model, task: tasks.Task, path: Path, file: ExportedModel) -> float:
    """Compare a file's outputs for PNG files with the model's: the largest difference."""
    import tensorflow as tf

    assert file.call_files is not None

    # As many channels as the model has: TensorFlow's grey of a colour file differs from the original grey.
    pixels = samples.pixels(model.config, NUM_IMAGE_FILES, size=(97, 131))
    prepared = model.preprocess(pixels)
    received = file.call_files([tf.io.encode_png(image).numpy() for image in pixels])
    error = _difference(file.call(prepared), received)
    dtype = "bfloat16" if file.is_bfloat16 else model.layers[1].compute_dtype
    limit = MAX_FILES_ERROR.get(dtype, MAX_FILES_ERROR_LOW_PRECISION)
    if not error <= limit:  # NaN fails too
        raise VerificationError(
            f"{path} prepares image files differently from the model: wanted outputs within {limit} of the "
            f"model's. Received: {error:.1e}"
        )
    return _difference(_model_outputs(model, task, prepared, list(received)), received)


def _difference(expected: Outputs, received: Outputs) -> float:
    """Largest difference of an output, divided by its largest value if that is above 1."""
    pairs = [(expected[name], values) for name, values in received.items()]
    return max(float(np.abs(got - want).max() / max(1.0, float(np.abs(want).max()))) for want, got in pairs)


# ---- measures


def compare(task: tasks.Task, expected: Outputs, received: Outputs) -> dict[str, Any]:
    """Measure how far a file's outputs are from the model's, as fields of a `Report`; outputs by name."""
    name = main_name(expected)
    compared = [output for output, values in expected.items() if values.dtype.kind == "f"]  # not numbers of classes
    want, got = (outputs[name].astype(np.float64) for outputs in (expected, received))
    agree, agree_or_tie = task.agreement(name, want, got)
    by_output = [image_cosines(expected[output], received[output]) for output in compared]
    return {
        "images": len(want),
        "is_constant": all(map(says_nothing, expected.values())),
        "has_classes": task.has_classes,
        "max_error": float(np.abs(want - got).max()) / max(float(np.abs(want).max()), TINY),
        "cosine": min((float(cosines.min()) for cosines in by_output), default=1.0),
        "mean_cosine": min((float(cosines.mean()) for cosines in by_output), default=1.0),
        "sqnr": min((sqnr(expected[output], received[output]) for output in compared), default=math.inf),
        "difference_cosine": difference_cosine(want, got),
        "difference_scale": difference_scale(want, got),
        "agreement": float(agree.mean()),
        "decided_agreement": float(agree_or_tie.mean()),
        **task.comparison(name, want, got),
        **task.joint_comparison(expected, received),
    }


def sqnr(expected: np.ndarray, received: np.ndarray) -> float:
    """Signal-to-quantization-noise ratio of all images' outputs in dB; infinite for equal ones, even zeros."""
    want, got = (values.astype(np.float64) for values in (expected, received))
    power, noise = float(np.sum(want**2)), float(np.sum((want - got) ** 2))
    return math.inf if noise == 0 else 10 * math.log10(max(power, TINY) / noise)


def image_cosines(expected: np.ndarray, received: np.ndarray) -> np.ndarray:
    """Cosine similarity of each image's outputs, both (images, ...); 1 for equal ones, even zeros."""
    x, y = (values.reshape(len(values), -1).astype(np.float64) for values in (expected, received))
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    cosines = np.einsum("ij,ij->i", x, y) / np.maximum(norms, TINY)
    are_equal = np.all(x == y, axis=1)  # the logits of a new head are all zero, and have no direction
    return np.where(are_equal, 1.0, cosines.clip(-1, 1))


def difference_cosine(expected: np.ndarray, received: np.ndarray) -> float | None:
    """Mean cosine similarity between differences of two images' outputs, both (images, ...), over all pairs.

    Parts common to all images do not count. Pairs that the model hardly distinguishes do not count either: the
    difference of two photos of the same sky is mostly noise. None if it distinguishes no two images.
    """
    step = math.ceil(len(expected) / MAX_PAIRED_IMAGES)
    if is_constant(expected := expected[::step]):
        return None
    x, y = _centred(expected), _centred(received[::step])
    pairs = np.triu_indices(len(x), 1)
    products, model, file = (_difference_products(a, b)[pairs] for a, b in ((x, y), (x, x), (y, y)))
    counts = model >= LEAST_DIFFERENCE**2 * model.mean()
    lengths = np.sqrt(model * np.maximum(file, ROUNDING_ERROR**2 * model))  # a file may give the same for all images
    return float((products[counts] / lengths[counts]).clip(-1, 1).mean())


def difference_scale(expected: np.ndarray, received: np.ndarray) -> float | None:
    """How many times as large as the model's the file's differences between images are, by least squares.

    Both are (images, ...). 1 for a right file; None if the model distinguishes no two images.
    """
    if is_constant(expected):
        return None
    x, y = _centred(expected), _centred(received)
    return float((x * y).sum() / (x**2).sum())


def says_nothing(outputs: np.ndarray) -> bool:
    """True if outputs (images, ...) are zeros, or the same for several images, as those of a new head are."""
    return not outputs.any() or (len(outputs) > 1 and is_constant(outputs))


def is_constant(outputs: np.ndarray) -> bool:
    """True if outputs (images, ...) are the same for all images, up to rounding."""
    return bool((_centred(outputs) ** 2).mean() <= ROUNDING_ERROR**2 * (outputs.astype(np.float64) ** 2).mean())


def _centred(outputs: np.ndarray) -> np.ndarray:
    """Outputs (images, values) less their mean over images, which keeps differences and the digits of small ones."""
    values = outputs.reshape(len(outputs), -1).astype(np.float64)
    centred: np.ndarray = values - values.mean(axis=0)
    return centred


def _difference_products(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Scalar products (images, images) of the differences x[i] - x[j] and y[i] - y[j]."""
    gram = x @ y.T
    own = np.diag(gram)
    return own[:, None] + own - gram - gram.T


# ---- thresholds


def check_thresholds(
    report: Report,
    mode: Mode,
    *,
    has_classes: bool,
    num_classes: int = MANY_CLASSES,
    is_detected: bool = False,
    is_rounded: bool = False,
    **given_least: float,
) -> Report:
    """Raise a VerificationError with the next step if a value of the report is below the given or the mode's least.

    Returns the report, without these values if they say nothing because all outputs are constant.

    `given_least` has "cosine" and "agreement", `is_detected` says that the mode was not given, `is_rounded` that the
    file was run in float16; a model on a GPU multiplies in TensorFloat32, which has as many bits. Without classes, or
    on images whose classes mean little, no agreement is asked for unless it is given. A quantized file may always
    differ on one image: with 30 of them, a share of 0.99 cannot be measured.
    """
    values = {
        "cosine": report.cosine if report.mean_cosine is None else report.mean_cosine,
        "difference_cosine": report.difference_cosine,
        "agreement": report.decided_agreement,
        "sqnr": report.sqnr,
        "scale": None if report.difference_scale is None else _symmetric(report.difference_scale),
    }
    # All devices: asked for GPUs, JAX raises an error where there are none.
    is_rounded = is_rounded or any(name.startswith("gpu") for name in keras.distribution.list_devices())
    least = _with_cosine(mode.thresholds, ROUNDED_COSINE) if is_rounded else mode.thresholds
    is_quantized = min(mode.kernel_bits) < HALF_BITS
    has_few_logits = num_classes < MANY_CLASSES and report.mean_iou is None  # of an image, not of its pixels
    if report.cosine is None:  # maps of classes
        values["agreement"] = report.agreement
        least["agreement"] = _class_map_share(least["agreement"])
    elif report.relative_error is not None:  # depth: pixels near the model's, on any images
        least["agreement"] = _class_map_share(least["agreement"])
    elif not has_classes:
        least["agreement"] = 0.0
    elif report.segments is not None:  # they have near ties too, as pixels of maps: scores near the threshold
        least["agreement"] = _least_share(_class_map_share(least["agreement"]), max(1, report.segments))
    elif is_quantized:
        least["agreement"] = _least_share(least["agreement"], report.images)
    least["agreement"] = given_least.get("agreement", least["agreement"])
    if "cosine" in given_least:
        least = _with_cosine(least, given_least["cosine"]) | {"cosine": given_least["cosine"]}
    elif has_few_logits and is_quantized and least["agreement"] > 0 and report.images >= MIN_IMAGES:
        lowered = _with_cosine(least, FEW_CLASSES_COSINE)
        least |= {name: lowered[name] for name in ("cosine", "sqnr")}
    missed = {name: value for name, value in values.items() if value is not None and not value >= least[name]}
    if missed:
        wanted = " and ".join(f"{name} >= {least[name]:.6g}{UNITS.get(name, '')}" for name in missed)
        raise VerificationError(
            f"{report.path} differs from the model: wanted {wanted}. {'; '.join(report.lines()[1:])}. "
            f"What to do: {'; or '.join(_next_steps(missed, mode, is_detected=is_detected))}"
        )
    uncompared: dict[str, Any] = dict.fromkeys(COMPARED_FIELDS)
    return dataclasses.replace(report, **uncompared) if report.is_constant else report


def _with_cosine(least: dict[str, float], cosine: float) -> dict[str, float]:
    """Lower thresholds to the errors that outputs of this cosine may have."""
    implied = {"sqnr": implied_sqnr(cosine), "scale": implied_scale(cosine)}
    return least | {
        name: min(least[name], implied.get(name, cosine)) for name in ("cosine", "difference_cosine", "sqnr", "scale")
    }


def _symmetric(scale: float) -> float:
    """Return a scale or its reciprocal, whichever is below 1."""
    return min(scale, 1 / scale) if scale > 0 else scale


def _class_map_share(least: float) -> float:
    """Least share of pixels, or of segments, where a mode asks for this share of images."""
    return round(1 - CLASS_MAP_TOLERANCE * (1 - max(least, LEAST_CLASS_MAP)), 4)


def _least_share(least: float, images: int) -> float:
    """Round up how many of the images may differ, and return the share that must agree."""
    differing = math.ceil(round((1 - least) * images, 4))
    return math.floor(10_000 * (1 - differing / images)) / 10_000


def _next_steps(missed: dict[str, float], mode: Mode, *, is_detected: bool) -> list[str]:
    """List the user's next steps, the first to try first."""
    steps = []
    if is_detected:
        steps.append("check that the file is of this model, with these weights")
    elif min(mode.kernel_bits) < HALF_BITS:
        calibrates = mode.needs_calibration or mode.smoothing
        images = (
            "a hundred typical images, calibration=model.preprocess(...) (--calibrate --images FOLDER), or "
            if calibrates
            else ""
        )
        steps.append(f"export it again with {images}quantize='float16'")
    as_cosines = {
        name: IMPLIED_COSINES[name](value) if name in IMPLIED_COSINES else value for name, value in missed.items()
    }
    if min(as_cosines.values()) >= LEAST_ACCEPTABLE:
        arguments: dict[str, float] = {}
        for name, value in as_cosines.items():
            argument = "least_agreement" if name == "agreement" else "least_cosine"
            arguments[argument] = min(arguments.get(argument, 1.0), math.floor(10_000 * value) / 10_000)
        steps.append(f"accept it with {' and '.join(f'{name}={value}' for name, value in arguments.items())}")
    return steps or ["write the damaged file again"]
