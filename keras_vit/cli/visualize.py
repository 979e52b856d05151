"""The command `keras-vit visualize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from keras_vit.cli.options import Model, Size, Weights, check_images, given, parse_size, quiet


def visualize(
    model: Model,
    images: Annotated[list[str], Argument(help="JPEG or PNG files, 16 at most.")],
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("report.html"),
    weights: Weights = None,
    image_size: Size = None,
    top: Annotated[int, Option(help="Number of classes for each image.")] = 5,
) -> None:
    """Write one HTML file that shows predictions, attention, filters and position embeddings of a model."""
    check_images(images)
    changes = given(image_size=parse_size(image_size))
    with quiet():
        from keras_vit.visualize.html.report import report
        from keras_vit.zoo.pretrained import load_choice, resolve

        choice = resolve(model, weights)
        loaded = load_choice(choice, changes)
    title = choice.name or Path(model).name
    card = f"{title}, {choice.published.tag}\n\n{choice.published}" if choice.published else None
    typer.echo(str(report(loaded, images, out, top=top, title=title, card=card, progress=True)))
