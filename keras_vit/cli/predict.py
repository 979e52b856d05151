"""The command `keras-vit predict`."""

import json
import sys
from typing import Annotated, Any

from keras_vit._util.image_paths import readable_images
from keras_vit._util.progress import track
from keras_vit._util.text import printable
from keras_vit.cli import options


def predict(
    model: options.Model,
    images: options.Images,
    weights: options.Weights = None,
    accept_licence: options.Licence = False,
    image_size: options.Size = None,
    patch_size: options.Patch = None,
    top: options.Top = 5,
    batch_size: Annotated[int, options.integer(1, "Images per call, and in memory.")] = 16,
    as_json: options.Json = False,
) -> None:
    """Classify images. An image that cannot be read is a line of its own, and the exit code is then 1."""
    files = readable_images(images)
    found = options.find_model(
        model, weights, image_size, patch_size, accept_licence=accept_licence, needs_classes=True
    )
    show = len(files) > batch_size and (as_json or not sys.stdout.isatty())  # else the results show the progress
    rows = []
    with options.quiet():
        from keras_vit.model.classify import classify_each

        results = classify_each(found.load(), files, top=top, batch_size=batch_size)
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
    lines = [("", f"{each['probability']:.2%}", each["label"], f"({each['label_id']})") for each in row["predictions"]]
    return f"{printable(row['image'])}\n{options.aligned(lines, right=(1,))}"


def _row(file: str, result: Any) -> dict[str, Any]:
    if isinstance(result, Exception):
        return {"image": file, "error": str(result).removeprefix(repr(file)).removeprefix(file).lstrip(": ")}
    return {"image": file, "predictions": [each._asdict() for each in result]}
