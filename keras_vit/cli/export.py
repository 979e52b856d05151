"""The commands `keras-vit export` and `keras-vit verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keras_vit.cli.options import Json, Model, Size, Weights, complete_mode, load, quiet, size, tell

LeastCosine = Annotated[float | None, typer.Option(help="Refuse a file below it; else the mode's.")]
LeastAgreement = Annotated[float | None, typer.Option(help="Likewise, share of images of the same best class.")]
Threads = Annotated[int, typer.Option(help="On which the file is timed.")]
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
FOREIGN = (".onnx", ".pb", ".keras", ".h5", ".npz", ".safetensors", ".pth", ".lite", ".zip")
PICTURES = 256  # of a folder: as many as calibration has use for
# Options that a SavedModel has no use for, and those that a .tflite file has none for.
OF_FILES = (
    *("quantize", "images", "batch", "input_dtype", "source_size", "resize", "output", "attention", "route"),
    *("least_cosine", "least_agreement", "threads"),
)
OF_FOLDERS = ("top", "warmup", "bfloat16")


def export(
    context: typer.Context,
    model: Model,
    to: Annotated[Path, typer.Option(help="The .tflite file to write, or a SavedModel's folder: models/vit/1.")],
    quantize: Annotated[
        str,
        typer.Option(help="A mode (none, float16, dynamic, int8 ...) or a .toml file.", autocompletion=complete_mode),
    ] = "dynamic",
    weights: Weights = None,
    image_size: Size = None,
    images: Annotated[
        list[str] | None, typer.Option(help="Image files and folders to calibrate and compare on; may be repeated.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Images a call; 0 for any number.")] = 1,
    input_dtype: Annotated[
        str, typer.Option("--input", help="float32 (prepared images) or uint8 (pixels).")
    ] = "float32",
    source_size: Annotated[str | None, typer.Option(help="Size of pixels that the file resizes itself.")] = None,
    resize: Annotated[str, typer.Option(help="How: exact (as preprocess) or builtin.")] = "exact",
    output: Annotated[str, typer.Option(help="logits or probabilities.")] = "logits",
    attention: Annotated[bool, typer.Option("--attention", help="Give the class token's attention too.")] = False,
    labels: Annotated[str | None, typer.Option(help="A list of the zoo, or a text file of one class a line.")] = None,
    route: Annotated[str, typer.Option(help="direct, or converter (TensorFlow's).")] = "direct",
    least_cosine: LeastCosine = None,
    least_agreement: LeastAgreement = None,
    threads: Threads = 2,
    top: Annotated[int, typer.Option(help="Classes that a SavedModel names.")] = 5,
    warmup: Annotated[list[int], typer.Option(help="Batch size that a server tries first; may be repeated.")] = [1],  # noqa: B006
    bfloat16: Annotated[bool, typer.Option("--bfloat16", help="Faster signatures in a SavedModel.")] = False,
    as_json: Json = False,
) -> None:
    """Writes a LiteRT (.tflite) file or a SavedModel, runs it, and prints how it compares with the model."""
    folder = to.suffix.lower() != ".tflite"
    if to.suffix.lower() in FOREIGN:
        raise ValueError(f"--to is a .tflite file, or a folder for a SavedModel such as vit/1. Received: {to}")
    _refuse_options_of_the_other(context, to, folder)
    found = _pictures(images or [])
    named = Path(labels).read_text("utf-8").splitlines() if labels and Path(labels).is_file() else labels
    with quiet():
        from keras_vit import export as exports

        loaded = load(model, weights, image_size)
        if folder:
            made = exports.saved_model(loaded, to, labels=named, top=top, warmup=warmup, bfloat16=bfloat16)
            tell(made, as_json)
            return
        report = exports.tflite(
            loaded,
            to,
            quantize=quantize,
            calibration=found or None,
            verify=found or None,
            batch=batch or None,
            input_dtype=input_dtype,
            source_size=size(source_size, "--source-size"),
            resize=resize,
            output=output,
            attention=attention,
            labels=named,
            route=route,
            least_cosine=least_cosine,
            least_agreement=least_agreement,
            threads=threads,
            progress=not as_json,
        )
    tell(report, as_json)


def verify(
    file: Annotated[Path, typer.Argument(help="A .tflite file or a SavedModel's folder.")],
    model: Model,
    images: Annotated[list[str] | None, typer.Argument(help="Image files and folders; else a built-in set.")] = None,
    weights: Weights = None,
    image_size: Size = None,
    quantize: Annotated[
        str | None,
        typer.Option(help="The file's mode, whose thresholds and size hold.", autocompletion=complete_mode),
    ] = None,
    least_cosine: LeastCosine = None,
    least_agreement: LeastAgreement = None,
    threads: Threads = 2,
    as_json: Json = False,
) -> None:
    """Runs an exported file beside its model. Exit status 1 where it does not compute the same."""
    found = _pictures(images or [])
    with quiet():
        from keras_vit import export as exports

        loaded = load(model, weights, image_size)
        report = exports.verify(
            loaded,
            file,
            found or None,
            mode=quantize,
            least_cosine=least_cosine,
            least_agreement=least_agreement,
            threads=threads,
            progress=not as_json,
        )
    tell(report, as_json)


def _refuse_options_of_the_other(context: typer.Context, to: Path, folder: bool) -> None:
    """Raises a ValueError where options were given that only the other kind of file has."""
    others = OF_FILES if folder else OF_FOLDERS
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in others and _is_given(context, parameter.name)
    ]
    if given:
        kind = "a SavedModel (a .tflite file has that suffix)" if folder else "a .tflite file"
        raise ValueError(f"{kind} is not written with {', '.join(given)}. Received: --to {to}")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _pictures(paths: list[str]) -> list[str]:
    """The image files among files and folders: of each folder those in it and below, PICTURES at most, evenly chosen.

    Raises:
        FileNotFoundError: for what is not there.
        ValueError: for a folder without images.
    """
    found: list[str] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"There is no image file or folder {str(path)!r}")
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
            if not files:
                raise ValueError(f"The folder {str(path)!r} has no images ({', '.join(SUFFIXES)})")
        step = max(1, -(-len(files) // PICTURES))
        found.extend(map(str, files[::step]))
    return found
