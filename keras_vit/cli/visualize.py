"""The command `keras-vit visualize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keras_vit.cli.options import Model, Size, Weights, is_checkpoint, load, need_images, quiet
from keras_vit.errors import UnknownModel


def visualize(
    model: Model,
    images: Annotated[list[str], typer.Argument(help="JPEG or PNG files, 16 at most.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    weights: Weights = None,
    image_size: Size = None,
    top: Annotated[int, typer.Option(help="How many classes an image.")] = 5,
) -> None:
    """Writes what a model sees in images: predictions, attention, filters, positions, in one HTML file."""
    need_images(images)
    with quiet():
        from keras_vit.visualize.html.report import report

        loaded = load(model, weights, image_size)
    title, card = _known(model, weights)
    written = report(loaded, images, out, top=top, title=title, card=card, progress=True)
    typer.echo(str(written))


def _known(model: str, weights: str | None) -> tuple[str, str | None]:
    """What to call the model, and what the zoo knows of its weights where they are the zoo's."""
    from keras_vit.zoo import catalogue

    if is_checkpoint(model, weights):
        return Path(model).name, None
    try:
        card = catalogue.card(model)
    except UnknownModel:
        return model, None
    tag = card.default if weights in (None, "default") else str(weights)
    known = card.weights.get(tag)
    return card.name, None if known is None else f"{card.name}, {tag}\n\n{known}"
