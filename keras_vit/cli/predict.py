"""The commands `keras-vit predict` and `keras-vit demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from keras_vit.cli.options import Json, Model, Size, Weights, aligned, check_images, load_model, quiet


def predict(
    model: Model,
    images: Annotated[list[str], Argument(help="Files or URLs: JPEG, PNG; with Pillow more.")],
    weights: Weights = None,
    image_size: Size = None,
    top: Annotated[int, Option(help="Number of classes for each image.")] = 5,
    as_json: Json = False,
) -> None:
    """Classify images."""
    check_images(images)
    with quiet():
        rankings = load_model(model, weights, image_size).classify(images, top=top)
    if as_json:
        rows = [{"image": i, "predictions": [p._asdict() for p in r]} for i, r in zip(images, rankings, strict=True)]
        typer.echo(json.dumps(rows, indent=2))
        return
    for image, ranking in zip(images, rankings, strict=True):
        lines = [("", f"{each.probability:.2%}", each.label, f"({each.label_id})") for each in ranking]
        typer.echo(f"{image}\n{aligned(lines, right=(1,))}")


def demo(
    out: Annotated[Path, Option(help="Folder for the exported files and the report.")] = Path("demo"),
    look: Annotated[bool, Option("--open/--no-open", help="Open the report in a browser.")] = True,
) -> None:
    """Show the package on the embedded model, offline: load, classify, resize, fine-tune, export, verify, inspect."""
    with quiet():
        from keras_vit.cli import demo as tour

        tour.run(out, open_report=look)
