"""The command `keras-vit predict`."""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from keras_vit import zoo
from keras_vit._util.checks import given
from keras_vit._util.image_paths import check_regular, readable_images
from keras_vit._util.progress import track
from keras_vit._util.text import printable
from keras_vit.cli import options
from keras_vit.cli.maps import map_each


@options.takes(*options.MODEL_OPTIONS)
def predict(
    model: options.Model,
    images: options.Images,
    classes: Annotated[
        str | None,
        Option(help="Classify by texts instead: names with commas between, or a .txt file with one on each line."),
    ] = None,
    template: Annotated[
        list[str] | None,
        Option(help='For --classes: a text with {} in place of a name, such as "a photo of a {}."; may be repeated.'),
    ] = None,
    top: options.Top = 5,
    to: Annotated[
        Path | None, Option(help="For a model of maps: a folder for the map of each image, and a picture of it.")
    ] = None,
    batch_size: Annotated[int, options.integer(1, "Images per call, and in memory.")] = 16,
    as_json: options.Json = False,
    **chosen: Any,
) -> None:
    """Classify images or their pixels, by the model's own classes or by texts.

    An image that cannot be read is a line of its own, and the exit code is then 1.
    """
    files = readable_images(images)
    load: Callable[[], Any]
    has_maps = False
    if classes is None:
        found = options.find_model(model, needs_classes=True, **chosen)
        load, has_maps = found.load, found.has_maps
    else:
        load = functools.partial(zoo.zero_shot, model, _read_classes(classes), templates=template, **given(**chosen))
    if template and classes is None:
        raise ValueError(f"--template is for --classes. Received: {template}")
    if to is not None and not has_maps:
        raise ValueError(f"--to is for models of maps, such as a run of segment-folder. Received: {model}")
    show = len(files) > batch_size and (as_json or not sys.stdout.isatty())  # else the results show the progress
    rows = []
    with options.quiet():
        from keras_vit.model.classify import classify_each

        loaded = load()
        if not has_maps and loaded.config.probabilities == "sigmoid" and not as_json:
            options.echo("The probability of each class stands for itself: they need not add up to 100 %.", err=True)
        each = (
            functools.partial(map_each, to=to) if has_maps else functools.partial(classify_each, batch_size=batch_size)
        )
        results = each(loaded, files, top=top)
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


def _read_classes(text: str) -> list[str]:
    """Return names of classes that commas separate, or the lines of a .txt file."""
    if not text.endswith(".txt"):
        return [name.strip() for name in text.split(",")]
    check_regular(Path(text))
    lines = Path(text).read_text(encoding="utf-8-sig").splitlines()
    return [line.strip() for line in lines if line.strip()]


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
