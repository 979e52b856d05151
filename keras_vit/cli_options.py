"""What the commands share: options, and how their values are read."""

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

Size = Annotated[str | None, typer.Option("--image-size", help="Pixels: 384 or HEIGHTxWIDTH.")]
Classes = Annotated[int | None, typer.Option("--num-classes", help="A new head of this many classes; 0 for none.")]
Facts = Annotated[
    list[str] | None,
    typer.Option("--config", help="FIELD=VALUE that the file cannot tell, such as num_heads=12; may be repeated."),
]
DataDir = Annotated[Path | None, typer.Option(help="Where tensorflow-datasets keeps what it prepared.")]
BadImage = Annotated[str, typer.Option(help="What a file that cannot be decoded does: skip or fail.")]
Model = Annotated[str, typer.Argument(help="A model of the zoo, a checkpoint or a .keras file.")]
Weights = Annotated[str | None, typer.Option(help="For a name: a tag of the model's card, a path.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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


def facts(texts: list[str], option: str = "--config") -> dict[str, Any]:
    """["num_heads=12", "classifier=gap"] as a dict; values are JSON, or words as they are."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{option} is FIELD=VALUE. Received: {text!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def size(text: str | None, option: str = "--image-size") -> Any:
    """384 or 384x256 as `image_size` takes it."""
    if text is None:
        return None
    sides = [int(side) for side in text.lower().split("x") if side.isdecimal()]
    if len(sides) not in (1, 2) or "x".join(map(str, sides)) != text.lower():
        raise ValueError(f"{option} is a number of pixels or HEIGHTxWIDTH. Received: {text!r}")
    return sides[0] if len(sides) == 1 else tuple(sides)


def load(model: str, weights: str | None, image_size: str | None) -> Any:
    """A model of the zoo, or out of a file."""
    from keras_vit import converters, zoo

    wanted = size(image_size)
    if weights is None and Path(model).exists():
        return converters.load(model, image_size=wanted)
    return zoo.load(model, weights=weights or "default", image_size=wanted)
