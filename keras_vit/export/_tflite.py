"""Write LiteRT (.tflite) files, quantize them, run them and compare them with the model, in one call."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import keras
import numpy as np

from keras_vit._util.checks import as_path
from keras_vit._util.fields import documented_by
from keras_vit._util.files import check_results, record_results, temporary_path
from keras_vit.errors import VerificationError
from keras_vit.export import samples
from keras_vit.export.calibration import FileGraph
from keras_vit.export.exported import load_exported
from keras_vit.export.litert import images as image_input
from keras_vit.export.litert import metadata
from keras_vit.export.litert.builder import Builder
from keras_vit.export.litert.head import build_file
from keras_vit.export.litert.operators import FLOAT32, Operators
from keras_vit.export.litert.plan import FilePlan, Patches, image_config
from keras_vit.export.litert.writer import CONVERT
from keras_vit.export.modes import DeviceName, Mode, Options, load_mode
from keras_vit.export.outliers import DEFAULT_SAMPLES, find_outliers
from keras_vit.export.quantize import Tokens, check_names, round_dense, rounding_lines
from keras_vit.export.quantize import quantize as quantize_file
from keras_vit.export.report import Report, measure_resources
from keras_vit.export.verification import verify
from keras_vit.model import task as tasks
from keras_vit.model.config import ViTConfig, check_resizable
from keras_vit.model.vision_transformer import VisionTransformer

VARIED = 16  # images whose outputs are compared with each other
ALIKE = 1e-4  # as a share of the outputs: smaller differences are roundings
Result = TypeVar("Result")

# Modes that need no images, the smaller first, which are tried when the files of another mode are too inexact.
SAFER_MODES = ("dynamic", "float16")


@documented_by(Options)
def tflite(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    quantize: str | None = None,
    device: DeviceName | None = None,
    calibration: Any = None,
    verify: Any = None,
    batch: int | None = 1,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
    input_dtype: Literal["float32", "uint8"] = "float32",
    source_size: int | tuple[int, int] | None = None,
    resize: Literal["exact", "builtin"] = "exact",
    output: Literal["logits", "probabilities", "classes"] = "logits",
    attention: bool = False,
    patches: Patches | None = None,
    labels: str | Sequence[str] | None = None,
    least_cosine: float | None = None,
    least_agreement: float | None = None,
    threads: int = 2,
    progress: bool = False,
) -> Report:
    """Write a LiteRT file with the signature `image` -> `logits`, run it, and compare it with the model.

    `image` is (batch, height, width, channels); `logits`, without a head `features`, are float32 as the model's output.
    More arguments: the fields of `keras_vit.export.modes.Options`.

    Args:
        model: a VisionTransformer, a DenseModel, or another functional Keras model with one image input, one output
            and layers that each have a writer. The error of another model shows the lines that convert it.
        path: path of the file. It appears complete and verified, or not at all; an older file there is replaced.
        calibration: about a hundred typical images: prepared, float32 (batch, height, width, channels), or anything
            that `model.preprocess` takes. Fixed ranges and "int4" need them, and "dynamic" files become more exact.
            Outliers are looked for on a few of them, else on built-in patterns.
        verify: images, as above, on which file and model are compared. None takes built-in patterns, or in a mode that
            needs calibration the calibration images, which is optimistic: pass held-out images.
        progress: whether to show progress bars.

    Returns:
        The comparison of the file with the model, its speed, and the time and memory that the export took.

    Raises:
        ValueError: options are wrong or do not go together (all in one message), or images do not fit.
        VerificationError: the file's outputs are too far from the model's.
        FileNotFoundError, IsADirectoryError: `path` cannot be a file, or there is no .toml file of the mode.
        ImportError: the packages of `pip install "keras-vit-zoo[litert]"` are missing.

    Example:
        >>> from keras_vit import digits
        >>> model = keras_vit.zoo.load("digits")
        >>> report = keras_vit.export.tflite(model, "digits.tflite", verify=digits.load().test_images[:50])
        >>> report.mode, report.agreement
        ('dynamic', 1.0)
    """
    options = Options(
        quantize=quantize,
        device=device,
        batch=batch,
        image_size=image_size,
        patch_size=patch_size,
        input_dtype=input_dtype,
        source_size=source_size,
        resize=resize,
        output=output,
        attention=attention,
        patches=patches,
        labels=labels,
        least_cosine=least_cosine,
        least_agreement=least_agreement,
        threads=threads,
    )
    return _export(
        model, Path(as_path(path, "path")), options, calibration=calibration, images=verify, progress=progress
    )


def _export(
    model: keras.Model, path: Path, options: Options, *, calibration: Any, images: Any, progress: bool
) -> Report:
    """Write the file and verify it on images; see `tflite`."""
    check_results([path])
    mode, plan = _check_options(options, model, has_calibration=calibration is not None)
    if options.sizes:
        model = model.resized(**options.sizes)
    images, labels = samples.labelled_images(model, images)
    calibration, _ = samples.labelled_images(model, calibration)
    chosen = _choose_images(model, plan, mode, calibration, images)
    is_same = calibration is not None and chosen.comparison is not None  # else compared on the built-in images
    is_same = is_same and (images is None or images is calibration or np.array_equal(images, calibration))
    if chosen.ranges is not None and is_same:
        _check_variety(model, chosen.outliers)
    with temporary_path(path) as work:
        with measure_resources() as used:
            outliers = find_outliers(model, chosen.outliers, mode.smoothing)
            plan = dataclasses.replace(plan, **outliers._asdict())
            notes = _write_file(model, work, plan, mode, chosen.ranges, progress=progress)
        try:
            report = verify(
                model,
                work,
                chosen.comparison,
                labels=labels,
                mode=mode,
                threads=options.threads,
                progress=progress,
                **options.least,
            )
        except VerificationError as error:
            notes += _find_passing_mode(model, work, plan, mode, chosen, options.least)
            raise VerificationError("; ".join([str(error), *notes])) from None
        resize_error = None
        if plan.source_size is not None:
            resize_error = _resize_error(model, chosen.comparison, plan, work.with_name("resize"))
        work.replace(path)
        record_results(path)
    return dataclasses.replace(
        report,
        path=path,
        device=options.device_line(mode),
        rounding=notes,
        calibrated_on=chosen.ranges is not None and is_same,
        calibration_images=None if chosen.ranges is None else len(chosen.ranges),
        preprocess_error=resize_error,
        seconds=used.seconds,
        peak_bytes=used.peak_bytes,
    )


def _check_options(options: Options, model: keras.Model, *, has_calibration: bool) -> tuple[Mode, FilePlan]:
    """Check all options at once, load the mode, and plan the file.

    One ValueError has everything that is wrong with the options, does not go together or is impossible for the model. A
    FileNotFoundError names a missing .toml file.
    """
    is_ours = isinstance(getattr(model, "config", None), ViTConfig)
    problems = list(options.problems())
    mode = _attempt(lambda: load_mode(options.mode_name), problems)
    if mode is not None:
        problems += options.device_problems(mode)
    if mode is not None and mode.needs_calibration and not has_calibration:
        problems.append(
            f"quantize={mode.name!r} needs calibration images: a hundred or more as the model will meet them, "
            "calibration=model.preprocess(...) (--images FOLDER). Received: None"
        )
    problems += _attempt(lambda: list(_model_problems(options, model)), problems) or []
    names = _attempt(lambda: tasks.of_model(model).class_names(options.labels), problems)
    if options.sizes and is_ours:
        _attempt(lambda: check_resizable(model.config, model.config.replace(**options.sizes)), problems)
    elif options.sizes:
        problems.append(f"{' and '.join(options.sizes)} is for VisionTransformers. Received: {type(model).__name__}")
    if problems or mode is None:
        raise ValueError("tflite: " + "; ".join(problems))
    mode = mode.for_blocks(model.config.num_layers if is_ours else 0)
    return mode, options.plan(mode, class_names=names)


def _model_problems(options: Options, model: keras.Model) -> Iterator[str]:
    """Yield a sentence for each reason why this model cannot be written directly."""
    samples.image_shape(model)
    if not isinstance(model, keras.Function):
        yield f"the model must be a functional Keras model. Received: {type(model).__name__}. {CONVERT}"
    names = set(model.output) if isinstance(model.output, dict) else set()
    if len(model.outputs) != 1 and names != {*tasks.of_model(model).outputs}:
        yield f"the model must have one output. Received: {len(model.outputs)} outputs"
    if options.attention and not hasattr(model, "attention_maps"):
        yield f"attention=True is for VisionTransformers. Received: {type(model).__name__}"
    yield from options.model_problems(image_config(model), tasks.of_model(model))


def _attempt(function: Callable[[], Result], problems: list[str]) -> Result | None:
    """Call a function; add the message of a ValueError to `problems` and return None."""
    try:
        return function()
    except ValueError as error:
        problems.append(str(error))
        return None


class Images(NamedTuple):
    """Images of an export, by what is done on them."""

    outliers: np.ndarray  # prepared, on which outliers are measured
    ranges: np.ndarray | None  # as the file takes them, on which ranges are calibrated; None if the mode uses none
    comparison: Any  # on which file and model are compared; None for built-in ones


def _choose_images(model: keras.Model, plan: FilePlan, mode: Mode, calibration: Any, images: Any) -> Images:
    """Prepare the images of an export; `images` are those that the user compares on."""
    is_float = plan.input_dtype == "float32"
    if calibration is None:
        measured = samples.images(image_config(model), max(DEFAULT_SAMPLES) + 1)[DEFAULT_SAMPLES]
    else:
        measured = samples.prepared_images(model, calibration, "calibration")
    calibrating = None
    if calibration is not None and (mode.needs_calibration or mode.gptq):
        height, width = plan.source_size or model.input_shape[1:3]
        shape = (height, width, model.input_shape[-1])
        calibrating = measured if is_float else samples.to_pixels(model, calibration, shape)
    if images is not None and is_float:
        images = samples.prepared_images(model, images, "verify")
    elif images is None and mode.needs_calibration:  # its ranges would cut off values of the built-in images
        images = measured if is_float else calibration
    return Images(measured, calibrating, images)


def _check_variety(model: keras.Model, images: np.ndarray) -> None:
    """Raise a ValueError if a model's outputs are equal for all images that a file would be compared on."""
    outputs = keras.ops.convert_to_numpy(keras.tree.flatten(model.predict_on_batch(images[:VARIED]))[0])
    if len(images) > 1 and np.ptp(outputs, axis=0).max() <= ALIKE * np.abs(outputs).max():
        raise ValueError(
            "calibration images must differ, and be as the model will meet them: a comparison on these says nothing of "
            f"others. Received: {len(images)} images for which the model has equal outputs"
        )


def _write_file(
    model: VisionTransformer,
    path: Path,
    plan: FilePlan,
    mode: Mode,
    calibration: np.ndarray | None,
    *,
    progress: bool,
) -> tuple[str, ...]:
    """Write the file from the model's weights, quantized, with its metadata and labels; return lines for the report."""
    unquantized = path.with_name("unquantized")
    notes: tuple[str, ...] = ()
    if calibration is not None and not mode.uses_quantizer:
        build_file(model, dataclasses.replace(plan, storage=FLOAT32)).write(unquantized)
        rounded = round_dense(unquantized, mode, calibration, Tokens.from_model(model), progress=progress)
        plan, notes = dataclasses.replace(plan, rounded=rounded), rounding_lines(rounded)
        unquantized.unlink()
    builder = build_file(model, plan)
    config = image_config(model)
    outputs = [plan.output_name(tasks.of_model(model).outputs), *["attention"] * plan.attention]
    outputs = list(model.output) if isinstance(model.output, dict) else outputs
    content = metadata.pack_metadata(
        dtype=plan.input_dtype,
        preprocessing=config.preprocessing,
        num_channels=config.num_channels,
        outputs=outputs,
        has_labels=bool(plan.class_names),
        name=model.name,
        description=f"Vision Transformer, {mode.name}",
    )
    builder.metadata(metadata.BUFFER_NAME, content)
    if mode.uses_quantizer:
        builder.make_names_unique()
        builder.write(unquantized)
        quantize_file(unquantized, path, mode, calibration=calibration, progress=progress)
        unquantized.unlink()
    else:
        builder.write(path)
        if mode.rules:
            check_names(FileGraph.read(np.memmap(path, np.uint8, "r")), mode)
    texts = metadata.archive_files(config, plan.input_dtype, plan.source_size, plan.class_names)
    task = tasks.of_model(model)
    labels = task.labels if plan.class_names and task.class_names() == list(plan.class_names) else None
    texts[metadata.MODEL] = metadata.describe_model(config, getattr(model, "head", None), labels)
    metadata.append_files(path, texts)
    return notes


def _find_passing_mode(
    model: VisionTransformer,
    work: Path,
    plan: FilePlan,
    refused: Mode,
    chosen: Images,
    least: dict[str, Any],
) -> tuple[str, ...]:
    """Find the smallest of the safer modes that passes the verification, and describe it in one line."""
    for mode in map(load_mode, SAFER_MODES):
        if mode.name == refused.name or min(mode.kernel_bits) < min(refused.kernel_bits):
            continue
        outliers = find_outliers(model, chosen.outliers, mode.smoothing)
        trial = dataclasses.replace(plan, storage=mode, norms=mode.norms, rounded={}, **outliers._asdict())
        _write_file(model, work, trial, mode, None, progress=False)
        with contextlib.suppress(VerificationError):
            size, figures = verify(model, work, chosen.comparison, mode=mode, **least).lines()[:2]
            return (f"tried: quantize={mode.name!r} passes ({size.rpartition(': ')[2]}), {figures}",)
    return ()


def _resize_error(model: VisionTransformer, images: Any, plan: FilePlan, work: Path) -> float:
    """Measure how far images that the file resizes are from `preprocess`: the largest difference, 0 to 255."""
    ops = Operators(Builder())
    given = image_input.add_image_input(ops, image_config(model), dataclasses.replace(plan, batch=1))
    ops.builder.signature({"image": given.image}, {"prepared": given.tensor})
    ops.builder.write(work)
    file = load_exported(work)
    pixels, expected = samples.comparison_images(model, file, images)
    received = np.concatenate([file.call(part)["prepared"] for part, _ in file.batches(pixels)])
    if given.scale is not None:
        received = received * given.scale
    return float(np.abs((received - expected) * samples.mean_and_std(model)[1]).max() * 255)
