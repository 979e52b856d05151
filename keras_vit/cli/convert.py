"""The commands `keras-vit convert` and `keras-vit resize`."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from keras_vit.cli.options import (
    Classes,
    Facts,
    Licence,
    Model,
    Patch,
    Size,
    complete_format,
    find_model,
    parse_fields,
    parse_size,
    quiet,
)


def convert(
    source: Model,
    target: Annotated[Path, Argument(help="The file to write.")],
    to: Annotated[
        str, Option("--to", help="The format to write, or a .toml table of your own.", autocompletion=complete_format)
    ],
    image_size: Size = None,
    num_classes: Classes = None,
    patch_size: Patch = None,
    config: Facts = None,
    accept_licence: Licence = False,
    source_format: Annotated[
        str | None, Option("--from", help="The source's format, or a .toml table.", autocompletion=complete_format)
    ] = None,
) -> None:
    """Convert a checkpoint to another format, resolution, patch size or number of classes."""
    facts: dict[str, Any] = {"config": parse_fields(config) or None, "format": source_format}
    facts |= {"num_classes": num_classes, "accept_licence": accept_licence}
    _check_target(target, to)
    found = find_model(source, image_size=image_size, patch_size=patch_size, **facts)
    with quiet():
        from keras_vit import converters

        path = converters.save(found.load(), target, format=to)
    typer.echo(str(path))


def resize(
    source: Model,
    target: Annotated[Path, Argument(help="The file to write, in the same format.")],
    image_size: Annotated[str, Argument(help="Pixels: 384 or HEIGHTxWIDTH.", callback=parse_size)],
    patch_size: Patch = None,
    config: Facts = None,
    accept_licence: Licence = False,
) -> None:
    """Interpolate the position embeddings of a checkpoint to another resolution, and its patches to another size."""
    from keras_vit import converters
    from keras_vit.converters.source import find_weights, is_keras_file
    from keras_vit.zoo.pretrained import fetch_source

    facts: dict[str, Any] = {"config": parse_fields(config) or None, "accept_licence": accept_licence}
    found = find_model(source, image_size=image_size, patch_size=patch_size, **facts)
    file = find_weights(fetch_source(found.choice))
    format = None if is_keras_file(file) else converters.detect(file)
    if format is None and not is_keras_file(target):
        raise ValueError(f"{file.name} is resized into another .keras file. Received: {target}")
    _check_target(target, format)
    with quiet():
        if format is not None:
            target = converters.save(found.load(), target, format=format)
        else:
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # the file appears complete or not at all
                found.load().save(Path(folder) / target.name)
                (Path(folder) / target.name).replace(target)
    typer.echo(str(target))


def _check_target(target: Path, format: str | None) -> None:
    """Raise an error if the format is not known, or the file cannot be written."""
    from keras_vit.converters.table import load_table

    is_file = format is None or load_table(format).json is None or target.suffix
    if is_file and not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(target.parent)!r} for the file {target.name!r}")
