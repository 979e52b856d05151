"""The command `keras-vit predict`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from keras_vit._util.image_paths import readable_images
from keras_vit._util.progress import track
from keras_vit._util.text import printable
from keras_vit.cli import options
from keras_vit.cli.maps import map_each


def predict(
    model: options.Model,
    images: options.Images,
    weights: options.Weights = None,
    accept_licence: options.Licence = False,
    image_size: options.Size = None,
    patch_size: options.Patch = None,
    top: options.Top = 5,
    to: Annotated[
        Path | None, Option(help="For a model of maps: a folder for the map of each image, and a picture of it.")
    ] = None,
    batch_size: Annotated[int, options.integer(1, "Images per call, and in memory.")] = 16,
    as_json: options.Json = False,
) -> None:
    """Classify images, or their pixels.

    An image that cannot be read is a line of its own, and the exit code is then 1.
    """
    files = readable_images(images)
    found = options.find_model(model, weights, image_size, patch_size, accept_licence=accept_licence)
    if to is not None and not found.has_maps:
        raise ValueError(f"--to is for models of maps, such as a run of segment-folder. Received: {model}")
    show = len(files) > batch_size and (as_json or not sys.stdout.isatty())  # else the results show the progress
    rows = []
    with options.quiet():
        from keras_vit.model.classify import classify_each

        results = (
            map_each(found.load(), files, to=to, top=top)
            if found.has_maps
            else classify_each(found.load(), files, top=top, batch_size=batch_size)
        )
        for file, result in track(zip(files, results, strict=True), "Classifying", total=len(files), show=show):
            if isinstance(result, Exception) and len(files) == 1 and not as_json:
                raise result
            rows.append(_row(file, result))
            if not as_json:
                options.echo(_text(rows[-1]))
    if as_json:
        options.echo(json.dumps(rows, indent=2))
    if failed := sum("error" in row for row in rows):
        raise ValueError(f"{failed} of {len(files)} images cannot be read")


def _text(row: dict[str, Any]) -> str:
    if "error" in row:
        return printable(f"{row['image']}: {row['error']}")
    if "depth" in row:
        depth = ", ".join(f"{name} {value:.3g}" for name, value in row["depth"].items())
        return f"{printable(row['image'])}: {depth}"
    lines = [("", f"{each['probability']:.2%}", each["label"], f"({each['label_id']})") for each in row["predictions"]]
    return f"{printable(row['image'])}\n{options.aligned(lines, right=(1,))}"


def _row(file: str, result: Any) -> dict[str, Any]:
    if isinstance(result, Exception):
        return {"image": file, "error": str(result).removeprefix(repr(file)).removeprefix(file).lstrip(": ")}
    if isinstance(result, dict):
        return {"image": file, "depth": result}
    return {"image": file, "predictions": [each._asdict() for each in result]}
