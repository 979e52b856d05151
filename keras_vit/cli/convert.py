"""The commands `keras-vit convert` and `keras-vit resize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from keras_vit.cli.options import Classes, Facts, Model, Size, complete_format, given, parse_fields, parse_size, quiet


def convert(
    source: Model,
    target: Annotated[Path, Argument(help="The file to write.")],
    to: Annotated[
        str, Option("--to", help="The format to write, or a .toml table of your own.", autocompletion=complete_format)
    ],
    image_size: Size = None,
    num_classes: Classes = None,
    config: Facts = None,
    source_format: Annotated[
        str | None, Option("--from", help="The source's format, or a .toml table.", autocompletion=complete_format)
    ] = None,
) -> None:
    """Convert a checkpoint to another format, resolution or number of classes."""
    changes = given(image_size=parse_size(image_size), num_classes=num_classes)
    with quiet():
        from keras_vit import converters
        from keras_vit.zoo.pretrained import load_choice, resolve

        facts = parse_fields(config) or None
        model = load_choice(resolve(source), changes, config=facts, format=source_format)
        path = converters.save(model, target, format=to)
    typer.echo(str(path))


def resize(
    source: Model,
    target: Annotated[Path, Argument(help="The file to write, in the same format.")],
    image_size: Annotated[str, Argument(help="Pixels: 384 or HEIGHTxWIDTH.")],
    config: Facts = None,
) -> None:
    """Interpolate the position embeddings of a checkpoint to another resolution."""
    with quiet():
        from keras_vit import converters
        from keras_vit.zoo.pretrained import fetch_source, load_choice, resolve

        choice = resolve(source)
        format = converters.detect(fetch_source(choice))
        model = load_choice(choice, {"image_size": parse_size(image_size)}, config=parse_fields(config) or None)
        path = converters.save(model, target, format=format)
    typer.echo(str(path))
