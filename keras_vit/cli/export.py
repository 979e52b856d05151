"""The commands `keras-vit export` and `keras-vit verify`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from keras_vit._util.image_paths import image_files
from keras_vit.cli import options

LeastCosine = Annotated[
    float | None, Option(help="Least cosine similarity, also of differences between images; default: the mode's.")
]
LeastAgreement = Annotated[
    float | None, Option(help="Least share of images with the same best class or a near tie; default: the mode's.")
]
Threads = Annotated[int, options.integer(1, "Threads for timing the file.")]
MODE_HELP = "A mode (none, float16, dynamic, int8 ...) or a .toml file."
OTHER_FORMATS = (".onnx", ".pb", ".keras", ".h5", ".npz", ".safetensors", ".pth", ".lite", ".zip")
MAX_IMAGES = 256  # of one folder: calibration does not gain from more
# Options of `keras-vit export` that only a .tflite file takes, and those that only a SavedModel takes.
FILE_OPTIONS = ("batch", "input_dtype", "source_size", "resize", "output", "attention", "patches")
TFLITE_OPTIONS = (*FILE_OPTIONS, "quantize", "least_cosine", "least_agreement", "threads")
SAVED_MODEL_OPTIONS = ("top", "warmup", "dtype")
GIVEN = "COMMANDLINE"  # typer's name of the source of an option that is on the command line


def export(
    context: typer.Context,
    model: options.Model,
    to: Annotated[Path, Option(help="The .tflite file to write, or a SavedModel's folder: models/vit/1.")],
    quantize: Annotated[str, Option(help=MODE_HELP, autocompletion=options.complete_mode)] = "dynamic",
    weights: options.Weights = None,
    accept_licence: options.Licence = False,
    image_size: options.Size = None,
    patch_size: options.Patch = None,
    images: Annotated[
        list[str] | None,
        Option(help="Image files, folders and patterns for calibration and comparison; may be repeated."),
    ] = None,
    batch: Annotated[int, options.integer(0, "Images per call; 0: any number.")] = 1,
    input_dtype: Annotated[
        str, options.choice(("float32", "uint8"), "float32 (preprocessed images) or uint8 (pixels).", "--input")
    ] = "float32",
    source_size: Annotated[
        str | None, Option(help="Size of the images that the file resizes itself.", callback=options.parse_size)
    ] = None,
    resize: Annotated[str, Option(help="Resize method: exact (as preprocess) or builtin.")] = "exact",
    output: Annotated[str, Option(help="logits or probabilities; of a model of maps logits or classes.")] = "logits",
    attention: Annotated[bool, Option("--attention", help="Also output the class token's attention.")] = False,
    patches: Annotated[
        str | None, Option(help="How patches are embedded: dense or convolution; default: the mode's.")
    ] = None,
    labels: Annotated[str | None, Option(help="A list of the zoo, or a text file with one class per line.")] = None,
    least_cosine: LeastCosine = None,
    least_agreement: LeastAgreement = None,
    threads: Threads = 2,
    top: Annotated[int, options.integer(1, "Classes in a SavedModel's answer.")] = 5,
    warmup: Annotated[
        list[int] | None, Option(help="Batch size for which a server warms up; may be repeated. Default: 1.")
    ] = None,
    dtype: Annotated[str | None, Option(help="Of a SavedModel's weights: float32 or bfloat16.")] = None,
    as_json: options.Json = False,
) -> None:
    """Write a LiteRT (.tflite) file or a SavedModel, run it, and compare it with the model."""
    from keras_vit.export._temporary import check_file_path, check_folder_path
    from keras_vit.export.litert.options import Options
    from keras_vit.export.quantization.modes import load_mode
    from keras_vit.model import task

    is_saved_model = to.suffix.lower() != ".tflite"
    if to.suffix.lower() in OTHER_FORMATS:
        raise ValueError(f"--to must be a .tflite file, or a folder for a SavedModel such as vit/1. Received: {to}")
    _check_options(context, to, is_saved_model)
    files = image_files(images or [], most=MAX_IMAGES) or None
    names = Path(labels).read_text("utf-8").splitlines() if labels and Path(labels).is_file() else labels
    found = options.find_model(model, weights, image_size, patch_size, accept_licence=accept_licence)
    if not found.has_maps:  # the model itself knows its head
        task.from_config(found.config).class_names(names)
    file = {name: context.params[name] for name in FILE_OPTIONS} | {"batch": batch or None}
    if is_saved_model:
        check_folder_path(to)
    else:
        check_file_path(to)
        if not found.has_maps:
            Options(**file).check(found.config)
        if load_mode(quantize).needs_calibration and not files:
            raise ValueError(f"--quantize {quantize} needs calibration images: --images FOLDER, a hundred or more")
    with options.quiet():
        from keras_vit import export as exports

        loaded = found.load()
        files = options.drop_unreadable(loaded, files)
        if is_saved_model:
            report = exports.saved_model(loaded, to, labels=names, top=top, warmup=warmup, dtype=dtype, verify=files)
        else:
            report = exports.tflite(
                loaded,
                to,
                quantize=quantize,
                calibration=files,
                verify=files,
                **file,
                labels=names,
                least_cosine=least_cosine,
                least_agreement=least_agreement,
                threads=threads,
                progress=not as_json,
            )
    options.print_result(report, as_json)


def verify(
    file: Annotated[Path, Argument(help="A .tflite file or a SavedModel's folder.")],
    model: options.Model,
    images: Annotated[
        list[str] | None, Argument(help="Image files, folders and patterns; default: a built-in set.")
    ] = None,
    weights: options.Weights = None,
    accept_licence: options.Licence = False,
    image_size: options.Size = None,
    patch_size: options.Patch = None,
    quantize: Annotated[
        str | None,
        Option(
            help="The mode of the file, for its thresholds; default: as it is stored.",
            autocompletion=options.complete_mode,
        ),
    ] = None,
    least_cosine: LeastCosine = None,
    least_agreement: LeastAgreement = None,
    accelerator: Annotated[str, options.choice(("cpu", "gpu"), "Where to run a .tflite file: cpu or gpu.")] = "cpu",
    threads: Threads = 2,
    as_json: options.Json = False,
) -> None:
    """Compare an exported file with its model. The exit code is 1 if their outputs differ too much."""
    from keras_vit.export.quantization.modes import load_mode

    if not file.exists():
        raise FileNotFoundError(f"There is no exported file {file}")
    files = image_files(images or [], most=MAX_IMAGES) or None
    if quantize is not None:
        load_mode(quantize)
    found = options.find_model(model, weights, image_size, patch_size, accept_licence=accept_licence)
    with options.quiet():
        from keras_vit import export as exports

        loaded = found.load()
        report = exports.verify(
            loaded,
            file,
            options.drop_unreadable(loaded, files),
            mode=quantize,
            least_cosine=least_cosine,
            least_agreement=least_agreement,
            accelerator=accelerator,
            threads=threads,
            progress=not as_json,
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
