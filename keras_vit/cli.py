"""The command `keras-vit`. `--help` and `list` answer without importing TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Vision Transformers for TensorFlow and Keras 3: the official models, exactly, in and out.",
)

Size = Annotated[str | None, typer.Option("--image-size", help="Pixels: 384 or HEIGHTxWIDTH.")]
Classes = Annotated[int | None, typer.Option("--num-classes", help="A new head of this many classes; 0 for none.")]
Facts = Annotated[
    list[str] | None,
    typer.Option("--config", help="FIELD=VALUE that the file cannot tell, such as num_heads=12; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_models(
    pattern: Annotated[str, typer.Argument(help='Such as "B*" or "R50*".')] = "*", as_json: Json = False
) -> None:
    """The models of the zoo and their weights."""
    from keras_vit import catalogue

    cards = [catalogue.card(name) for name in catalogue.names(pattern)]
    rows = [{"name": card.name, "default": card.default, "weights": list(card.weights)} for card in cards]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max((len(card.name) for card in cards), default=0)
    for card in cards:
        typer.echo(f"{card.name:<{width}}  {', '.join(card.weights)}")


@app.command()
def show(name: Annotated[str, typer.Argument(help="A model, or the name of an AugReg file.")]) -> None:
    """All that is known of a model: its weights, their files, sizes and reported accuracy."""
    from keras_vit import catalogue

    typer.echo(str(catalogue.card(name)))


@app.command()
def predict(
    name: Annotated[str, typer.Argument(help="A model of the zoo.")],
    images: Annotated[list[str], typer.Argument(help="JPEG or PNG files.")],
    weights: Annotated[str, typer.Option(help="A tag of the model's card, a path or a URL.")] = "default",
    image_size: Size = None,
    top: Annotated[int, typer.Option(help="How many classes an image.")] = 5,
    as_json: Json = False,
) -> None:
    """Classifies images."""
    missing = [image for image in images if "://" not in image and not Path(image).is_file()]
    if missing:
        raise FileNotFoundError(f"There is no image file {missing[0]!r}")
    with quiet():
        from keras_vit import zoo

        model = zoo.load(name, weights=weights, image_size=_size(image_size))
        rankings = model.classify(images, top=top)
    if as_json:
        rows = [{"image": i, "predictions": [p._asdict() for p in r]} for i, r in zip(images, rankings, strict=True)]
        typer.echo(json.dumps(rows, indent=2))
        return
    for image, ranking in zip(images, rankings, strict=True):
        typer.echo(image)
        for prediction in ranking:
            typer.echo(f"  {prediction.probability:7.2%}  {prediction.label}  ({prediction.label_id})")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint in any known format.")],
    target: Annotated[Path, typer.Argument(help="The file to write.")],
    to: Annotated[str, typer.Option("--to", help="The format to write, or a .toml table of your own.")],
    image_size: Size = None,
    num_classes: Classes = None,
    config: Facts = None,
    source_format: Annotated[str | None, typer.Option("--from", help="The source's format, or a .toml table.")] = None,
) -> None:
    """Rewrites a checkpoint in another format, resolution or number of classes."""
    with quiet():
        from keras_vit import converters

        path = converters.convert(
            source,
            target,
            format=to,
            image_size=_size(image_size),
            num_classes=num_classes,
            config=_facts(config or []),
            source_format=source_format,
        )
    typer.echo(str(path))


@app.command()
def resize(
    source: Annotated[Path, typer.Argument(help="A checkpoint.")],
    target: Annotated[Path, typer.Argument(help="The file to write, in the same format.")],
    image_size: Annotated[str, typer.Argument(help="Pixels: 384 or HEIGHTxWIDTH.")],
    config: Facts = None,
) -> None:
    """Takes a checkpoint to another resolution: its position embeddings are interpolated."""
    with quiet():
        from keras_vit import converters

        same, facts = converters.detect(source), _facts(config or [])
        path = converters.convert(source, target, format=same, image_size=_size(image_size), config=facts)
    typer.echo(str(path))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the exported files go.")] = Path("demo"),
) -> None:
    """The whole path on the embedded model, offline: load, classify, change resolution, export, compare."""
    with quiet():
        from keras_vit import demo as tour
    tour.run(out)


def main() -> None:
    """Runs the command; what a user can mend is one line on standard error and exit code 1."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        message = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else error
        sys.exit(f"keras-vit: {message}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what TensorFlow's libraries write to standard error while they start; it is shown where the block fails.

    They write before any of their settings is read, so that the file descriptor itself is turned aside.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        except BaseException:
            aside.seek(0)
            os.write(kept, aside.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    yield


def _facts(texts: list[str]) -> dict[str, Any]:
    """["num_heads=12", "classifier=gap"] as a dict; values are JSON, or words as they are."""
    facts: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--config is FIELD=VALUE. Received: {text!r}")
        try:
            facts[name] = json.loads(value)
        except ValueError:
            facts[name] = value
    return facts


def _size(text: str | None) -> Any:
    """384 or 384x256 as `image_size` takes it."""
    if text is None:
        return None
    sides = [int(side) for side in text.lower().split("x") if side.isdecimal()]
    if len(sides) not in (1, 2) or "x".join(map(str, sides)) != text.lower():
        raise ValueError(f"--image-size is a number of pixels or HEIGHTxWIDTH. Received: {text!r}")
    return sides[0] if len(sides) == 1 else tuple(sides)


if __name__ == "__main__":
    main()
