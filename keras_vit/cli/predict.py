"""The commands `keras-vit predict`, `visualize` and `demo`."""

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from keras_vit._util.checks import check_counts
from keras_vit._util.image_paths import image_files, readable_images
from keras_vit._util.progress import track
from keras_vit.cli.options import Images, Json, Model, Size, Weights, aligned, find_model, quiet

DEMO_OUTPUTS = ("1", "digits.tflite", "finetuned", "report.html")  # files and folders that an earlier demo has left
MAX_IMAGES = 16  # of a report, as in visualize.html.report


def predict(
    model: Model,
    images: Images,
    weights: Weights = None,
    image_size: Size = None,
    top: Annotated[int, Option(help="Number of classes for each image.")] = 5,
    batch_size: Annotated[int, Option(help="Images per call, and in memory.")] = 16,
    as_json: Json = False,
) -> None:
    """Classify images. An image that cannot be read is a line of its own, and the exit code is then 1."""
    check_counts(top=top, batch_size=batch_size)
    files = readable_images(images)
    found = find_model(model, weights, image_size)
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


def visualize(
    model: Model,
    images: Annotated[list[str], Argument(help=f"Image files, folders and patterns; {MAX_IMAGES} images at most.")],
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("report.html"),
    weights: Weights = None,
    image_size: Size = None,
    top: Annotated[int, Option(help="Number of classes for each image.")] = 5,
) -> None:
    """Write one HTML file that shows predictions, attention, filters and position embeddings of a model."""
    files = image_files(images)
    if len(files) > MAX_IMAGES:
        raise ValueError(f"A report shows 1 to {MAX_IMAGES} images. Received: {len(files)}")
    check_counts(top=top)
    found = find_model(model, weights, image_size)
    with quiet():
        from keras_vit.visualize.html.report import report

        loaded = found.load()
    published = found.choice.published
    title = found.choice.name or Path(model).name
    card = f"{title}, {published.tag}\n\n{published}" if published else None
    typer.echo(str(report(loaded, files, out, top=top, title=title, card=card, progress=True)))


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
