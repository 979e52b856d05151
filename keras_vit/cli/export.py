"""The commands `convert`, `resize`, `export` and `verify`: write files, and compare them with the model."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from keras_vit._util.checks import Rule
from keras_vit._util.fields import option_names
from keras_vit._util.files import check_folder_path, check_results, record_results
from keras_vit._util.progress import print_line
from keras_vit._util.text import nearest, text_lines
from keras_vit.cli import options
from keras_vit.export.modes import Options
from keras_vit.export.phone import ACCELERATORS

TFLITE = ".tflite"
OTHER_FORMATS = (".onnx", ".pb", ".keras", ".h5", ".npz", ".safetensors", ".pth", ".lite", ".zip")
MAX_IMAGES = 256  # of one folder: calibration does not gain from more
MAX_PHONE_IMAGES = 10
FILE_OPTIONS = [name for name in option_names(Options) if name not in options.MODEL_NAMES]
# Options of `keras-vit export` that only a .tflite file takes, and those that only a SavedModel takes.
TFLITE_OPTIONS = ["calibrate", *(name for name in FILE_OPTIONS if name != "labels")]
SAVED_MODEL_OPTIONS = ("top", "warmup", "dtype")
HEADLESS: Any = options.checked(
    Rule((int,), is_optional=True, choices=(0,)),
    "0 leaves out the head: what is written returns features.",
    "--num-classes",
)
GIVEN = "COMMANDLINE"  # typer's name of the source of an option that is on the command line


@options.takes(*options.MODEL_OPTIONS, *options.field_options(Options, *FILE_OPTIONS, quantize=options.complete_mode))
def export(
    context: typer.Context,
    model: options.Model,
    to: Annotated[Path, Option(help="The .tflite file to write, or a SavedModel's folder: models/vit/1.")],
    images: Annotated[
        list[str] | None,
        Option(
            help="Image files, folders and patterns for the comparison; in a mode that needs calibration one half "
            "calibrates. May be repeated."
        ),
    ] = None,
    verify_on: Annotated[
        list[str] | None, Option("--verify", help="Images for the comparison alone; may be repeated.")
    ] = None,
    top: Annotated[int, options.integer(1, "Classes in a SavedModel's answer.")] = 5,
    warmup: Annotated[
        list[int] | None, Option(help="Batch size for which a server warms up; may be repeated. Default: 1.")
    ] = None,
    calibrate: Annotated[
        bool,
        Option(
            "--calibrate",
            help="Also compute the --images to round kernels for them, in a mode that does not need it, such as "
            "dynamic: minutes in place of seconds, for a slightly closer file.",
        ),
    ] = False,
    dtype: Annotated[str | None, Option(help="Of a SavedModel's weights: float32 or bfloat16.")] = None,
    num_classes: Annotated[int | None, HEADLESS] = None,
    as_json: options.Json = False,
    **given: Any,
) -> None:
    """Write a LiteRT (.tflite) file or a SavedModel, run it, and compare it with the model."""
    from keras_vit.export.modes import load_mode
    from keras_vit.model import task

    suffix = to.suffix.lower()
    is_saved_model = suffix != TFLITE
    if suffix in OTHER_FORMATS:
        raise ValueError(f"--to must be a .tflite file, or a folder for a SavedModel such as vit/1. Received: {to}")
    if is_saved_model and nearest(suffix, [TFLITE]):
        raise ValueError(f"--to has the suffix {suffix}, of a .tflite file {TFLITE}. Received: {to}")
    _check_options(context, to, is_saved_model)
    files, compared = (options.choose_images(paths or [], MAX_IMAGES) or None for paths in (images, verify_on))
    chosen = {name: given.pop(name) for name in options.MODEL_NAMES}
    found = options.find_model(model, num_classes=num_classes, **chosen)
    if (labels := given["labels"]) and Path(labels).is_file():
        given["labels"] = text_lines(Path(labels).read_bytes(), labels)
    if not found.has_maps:  # the model itself knows its head
        task.from_config(found.config).class_names(given["labels"])
    if is_saved_model:
        check_folder_path(to)
    else:
        wanted = Options(**given)
        if not found.has_maps:
            wanted.check(found.config)
        mode = load_mode(wanted.mode_name)
        if mode.needs_calibration and not files:
            raise ValueError(
                f"--quantize {wanted.mode_name} needs calibration images: --images FOLDER, a hundred or more"
            )
        if calibrate and not (files and (mode.needs_calibration or mode.gptq)):
            needed = f"a mode that rounds kernels, which {wanted.mode_name} does not" if files else "--images FOLDER"
            raise ValueError(f"--calibrate needs {needed}")
        check_results([to], inputs=filter(None, [found.resolved.source]))
    with options.quiet():
        from keras_vit import export as exports

        loaded = found.load()
        files, compared = (options.drop_unreadable(loaded, chosen) for chosen in (files, compared))
        if compared is None:
            compared = files
            if files and len(files) > 1 and not is_saved_model and mode.needs_calibration:
                files, compared = files[::2], files[1::2]
        if is_saved_model:
            own = {name: context.params[name] for name in SAVED_MODEL_OPTIONS}
            own["warmup"] = own["warmup"] or (1,)  # an option that was not given is an empty list
            report = exports.saved_model(loaded, to, labels=given["labels"], verify=compared, **own)
        else:
            rounds = mode.needs_calibration or calibrate
            calibration = files if rounds or not mode.gptq else None  # without GPTQ they cost nothing
            if files and rounds:
                print_line(
                    f"calibration: {len(files)} images are computed and kernels rounded for them, which takes minutes "
                    "for a model of many blocks; --quantize dynamic without --calibrate takes seconds"
                )
            report = exports.tflite(loaded, to, calibration=calibration, verify=compared, progress=not as_json, **given)
    options.print_result(report, as_json)


@options.takes(*options.MODEL_OPTIONS, *options.field_options(Options, "least_cosine", "least_agreement", "threads"))
def verify(
    file: Annotated[Path, Argument(help="A .tflite file or a SavedModel's folder.")],
    model: options.Model,
    images: Annotated[
        list[str] | None, Argument(help="Image files, folders and patterns; default: a built-in set.")
    ] = None,
    quantize: Annotated[
        str | None,
        Option(
            help="The mode of the file, for its thresholds; default: as it is stored.",
            autocompletion=options.complete_mode,
        ),
    ] = None,
    accelerator: Annotated[
        str | None, options.choice(ACCELERATORS, "Of --outputs, those of the phone's cpu (default), gpu or npu.")
    ] = None,
    inputs: Annotated[
        Path | None, Option(help="Also write up to ten images into this folder, for examples/android/check.sh.")
    ] = None,
    outputs: Annotated[Path | None, Option(help="Such a folder: compare what a phone computed of its images.")] = None,
    as_json: options.Json = False,
    **given: Any,
) -> None:
    """Compare an exported file with its model. The exit code is 1 if their outputs differ too much."""
    from keras_vit.export.modes import load_mode

    if not file.exists():
        raise FileNotFoundError(f"There is no exported file {file}")
    files = options.choose_images(images or [], MAX_PHONE_IMAGES if inputs else MAX_IMAGES) or None
    if quantize is not None:
        load_mode(quantize)
    found = options.find_model(model, **{name: given.pop(name) for name in options.MODEL_NAMES})
    with options.quiet():
        from keras_vit import export as exports

        loaded = found.load()
        report = exports.verify(
            loaded,
            file,
            options.drop_unreadable(loaded, files),
            mode=quantize,
            accelerator=accelerator,
            inputs=inputs,
            outputs=outputs,
            progress=not as_json,
            **given,
        )
    options.print_result(report, as_json)


def _check_options(context: typer.Context, to: Path, is_saved_model: bool) -> None:
    """Raise a ValueError if options are given that only the other kind of export takes."""
    others = TFLITE_OPTIONS if is_saved_model else SAVED_MODEL_OPTIONS
    wrong = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in others and getattr(context.get_parameter_source(parameter.name), "name", "") == GIVEN
    ]
    if wrong:
        kind = "a SavedModel (a .tflite file has that suffix)" if is_saved_model else "a .tflite file"
        raise ValueError(f"{kind} does not take {', '.join(wrong)}. Received: --to {to}")


def convert(
    source: options.Model,
    target: Annotated[Path, Argument(help="The file to write.")],
    to: Annotated[
        str,
        Option(help="The format to write, or a .toml table of your own.", autocompletion=options.complete_format),
    ],
    image_size: options.Size = None,
    num_classes: options.Classes = None,
    patch_size: options.Patch = None,
    config: options.ConfigFields = None,
    which: options.Which = None,
    accept_license: options.License = False,
    source_format: Annotated[
        str | None,
        Option("--from", help="The source's format, or a .toml table.", autocompletion=options.complete_format),
    ] = None,
) -> None:
    """Convert a checkpoint to another format, resolution, patch size or number of classes."""
    _check_target(target, to)
    found = options.find_model(
        source,
        image_size=image_size,
        patch_size=patch_size,
        num_classes=num_classes,
        accept_license=accept_license,
        config=config,
        which=which,
        format=source_format,
    )
    with options.quiet():
        from keras_vit import converters
        from keras_vit.converters.saving import check_target

        check_target(target, to, found.resolved.source)
        path = converters.save(found.load(), target, format=to)
    options.echo(str(path))


def resize(
    source: options.Model,
    target: Annotated[Path, Argument(help="The file to write, in the same format.")],
    image_size: Annotated[str, Argument(help="Pixels: 384 or HEIGHTxWIDTH.", callback=options.parse_size)],
    patch_size: options.Patch = None,
    config: options.ConfigFields = None,
    which: options.Which = None,
    accept_license: options.License = False,
) -> None:
    """Interpolate the position embeddings of a checkpoint to another resolution, and its patches to another size."""
    from keras_vit import converters
    from keras_vit.converters.containers import find_weights, is_keras_file
    from keras_vit.zoo.pretrained import fetch_source

    found = options.find_model(
        source,
        image_size=image_size,
        patch_size=patch_size,
        accept_license=accept_license,
        config=config,
        which=which,
    )
    file = find_weights(fetch_source(found.resolved))
    format = None if is_keras_file(file) else converters.detect(file)
    if format is None and not is_keras_file(target):
        raise ValueError(f"{file.name} is resized into another .keras file. Received: {target}")
    _check_target(target, format)
    if format is None:
        check_results([target], inputs=[file])
    else:
        with options.quiet():
            from keras_vit.converters.saving import check_target

            check_target(target, format, file)
    with options.quiet():
        if format is not None:
            target = converters.save(found.load(), target, format=format)
        else:
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # the file appears complete or not at all
                found.load().save(Path(folder) / target.name)
                (Path(folder) / target.name).replace(target)
            record_results(target)
    options.echo(str(target))


def _check_target(target: Path, format: str | None) -> None:
    """Raise an error if the format is not known, or the file cannot be written."""
    from keras_vit.converters.table import load_table

    is_file = format is None or load_table(format).json is None or target.suffix
    if is_file and not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(target.parent)!r} for the file {target.name!r}")
