"""The commands `keras-vit predict` and `keras-vit demo`."""

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from keras_vit._util.image_paths import readable_images
from keras_vit._util.progress import track
from keras_vit.cli.options import (
    Images,
    Json,
    Licence,
    Model,
    Patch,
    Size,
    Weights,
    aligned,
    check_count,
    find_model,
    quiet,
)

DEMO_OUTPUTS = ("1", "digits.tflite", "finetuned", "report.html")  # files and folders that an earlier demo has left


def predict(
    model: Model,
    images: Images,
    weights: Weights = None,
    accept_licence: Licence = False,
    image_size: Size = None,
    patch_size: Patch = None,
    top: Annotated[int, Option(help="Number of classes for each image.", callback=check_count)] = 5,
    batch_size: Annotated[int, Option(help="Images per call, and in memory.", callback=check_count)] = 16,
    as_json: Json = False,
) -> None:
    """Classify images. An image that cannot be read is a line of its own, and the exit code is then 1."""
    files = readable_images(images)
    found = find_model(model, weights, image_size, patch_size, accept_licence=accept_licence)
    show = len(files) > batch_size and (as_json or not sys.stdout.isatty())  # else the results show how far it is
    rows = []
    with quiet():
        from keras_vit.model.classify import classify_each

        results = classify_each(found.load(), files, top=top, batch_size=batch_size)
        for file, result in track(zip(files, results, strict=True), "Classifying", total=len(files), show=show):
            if isinstance(result, Exception) and len(files) == 1 and not as_json:
                raise result
            rows.append(_row(file, result))
            if not as_json:
                typer.echo(_text(rows[-1]))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    if failed := sum("error" in row for row in rows):
        raise ValueError(f"{failed} of {len(files)} images cannot be read")


def _text(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['image']}: {row['error']}"
    lines = [("", f"{each['probability']:.2%}", each["label"], f"({each['label_id']})") for each in row["predictions"]]
    return f"{row['image']}\n{aligned(lines, right=(1,))}"


def _row(file: str, result: Any) -> dict[str, Any]:
    if isinstance(result, Exception):
        return {"image": file, "error": str(result).removeprefix(repr(file)).removeprefix(file).lstrip(": ")}
    return {"image": file, "predictions": [each._asdict() for each in result]}


def demo(
    out: Annotated[Path, Option(help="Folder for the exported files and the report.")] = Path("demo"),
    look: Annotated[bool, Option("--open/--no-open", help="Open the report in a browser.")] = True,
) -> None:
    """Show the package on the embedded model, offline: load, classify, resize, fine-tune, export, verify, inspect."""
    _empty_folder(out)
    with quiet():
        from keras_vit.cli import demo as tour

        tour.run(out, open_report=look)


def _empty_folder(out: Path) -> None:
    """Create the folder of the demo, or empty it; a ValueError if it holds files that no demo has written."""
    out.mkdir(parents=True, exist_ok=True)
    found = [path for path in out.iterdir() if not path.name.startswith(".")]
    if others := sorted({path.name for path in found}.difference(DEMO_OUTPUTS)):
        raise ValueError(f"The demo needs a folder of its own: name another than {out}. It holds {others[0]}")
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
