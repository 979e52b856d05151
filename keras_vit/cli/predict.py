"""The commands `keras-vit predict` and `keras-vit demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from keras_vit.cli.options import Json, Model, Size, Weights, check_images, load_model, quiet, table_text


def predict(
    model: Model,
    images: Annotated[list[str], typer.Argument(help="JPEG or PNG files.")],
    weights: Weights = None,
    image_size: Size = None,
    top: Annotated[int, typer.Option(help="Number of classes for each image.")] = 5,
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
    from rich.table import Table

    for image, ranking in zip(images, rankings, strict=True):
        table = Table.grid("probability", "label", "id", padding=(0, 0, 0, 2), pad_edge=True)
        table.columns[0].justify = "right"
        for prediction in ranking:
            table.add_row(f"{prediction.probability:.2%}", prediction.label, f"({prediction.label_id})")
        typer.echo(f"{image}\n{table_text(table)}")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the exported files and the report.")] = Path("demo"),
    look: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in a browser.")] = True,
) -> None:
    """Show the package on the embedded model, offline: load, classify, resize, fine-tune, export, verify, inspect."""
    with quiet():
        from keras_vit.cli import demo as tour

        tour.run(out, open_report=look)
