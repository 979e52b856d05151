"""The commands `keras-vit convert` and `keras-vit resize`."""

import tempfile
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from keras_vit.cli import options


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
    config: options.Facts = None,
    accept_licence: options.Licence = False,
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
        accept_licence=accept_licence,
        config=options.parse_fields(config) or None,
        format=source_format,
    )
    with options.quiet():
        from keras_vit import converters

        path = converters.save(found.load(), target, format=to)
    options.echo(str(path))


def resize(
    source: options.Model,
    target: Annotated[Path, Argument(help="The file to write, in the same format.")],
    image_size: Annotated[str, Argument(help="Pixels: 384 or HEIGHTxWIDTH.", callback=options.parse_size)],
    patch_size: options.Patch = None,
    config: options.Facts = None,
    accept_licence: options.Licence = False,
) -> None:
    """Interpolate the position embeddings of a checkpoint to another resolution, and its patches to another size."""
    from keras_vit import converters
    from keras_vit.converters.source import find_weights, is_keras_file
    from keras_vit.zoo.pretrained import fetch_source

    found = options.find_model(
        source,
        image_size=image_size,
        patch_size=patch_size,
        accept_licence=accept_licence,
        config=options.parse_fields(config) or None,
    )
    file = find_weights(fetch_source(found.choice))
    format = None if is_keras_file(file) else converters.detect(file)
    if format is None and not is_keras_file(target):
        raise ValueError(f"{file.name} is resized into another .keras file. Received: {target}")
    _check_target(target, format)
    with options.quiet():
        if format is not None:
            target = converters.save(found.load(), target, format=format)
        else:
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # the file appears complete or not at all
                found.load().save(Path(folder) / target.name)
                (Path(folder) / target.name).replace(target)
    options.echo(str(target))


def _check_target(target: Path, format: str | None) -> None:
    """Raise an error if the format is not known, or the file cannot be written."""
    from keras_vit.converters.table import load_table

    is_file = format is None or load_table(format).json is None or target.suffix
    if is_file and not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(target.parent)!r} for the file {target.name!r}")
