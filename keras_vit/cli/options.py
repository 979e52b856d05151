"""What the commands share: options, how a shell completes their values, and how they are read."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """The models of the zoo that begin so, by their short names ("B/16") too; the shell adds files."""
    from keras_vit.zoo import catalogue

    names = catalogue.names()
    shortened = [name.replace("ViT-", "") for name in names]
    return _beginning(names, incomplete) or _beginning(shortened, incomplete)


def complete_weights(context: typer.Context, incomplete: str) -> list[str]:
    """The tags of the card of the model that stands on the line already; of every card before there is one."""
    from keras_vit.zoo import catalogue

    named = context.params.get("model") or context.params.get("name")
    try:
        tags = catalogue.card(named).weights if named else [row["weights"] for row in catalogue.table()]
    except ValueError:  # a checkpoint: it has no card
        return []
    return _beginning(dict.fromkeys(tags), incomplete)


def _complete_file_names(*folders: str) -> Callable[[str], list[str]]:
    """Names that .toml files of the package's data have."""

    def complete(incomplete: str) -> list[str]:
        from keras_vit._util import data_files

        found = data_files.folder(folders[0]).joinpath(*folders[1:]).glob("*.toml")
        return _beginning(sorted(path.stem for path in found), incomplete)

    return complete


complete_recipe = _complete_file_names("zoo", "recipes")
complete_format = _complete_file_names("converters", "checkpoints")
complete_mode = _complete_file_names("converters", "exports")

# What a user can mend: `main` makes it one line and exit code 1.
MENDABLE = (ValueError, OSError, ImportError, ArithmeticError)

Size = Annotated[str | None, typer.Option("--image-size", help="Pixels: 384 or HEIGHTxWIDTH.")]
Classes = Annotated[int | None, typer.Option("--num-classes", help="A new head of this many classes; 0 for none.")]
Facts = Annotated[
    list[str] | None,
    typer.Option("--config", help="FIELD=VALUE that the file cannot tell, such as num_heads=12; may be repeated."),
]
DataDir = Annotated[Path | None, typer.Option(help="Where tensorflow-datasets keeps what it prepared.")]
BadImage = Annotated[str, typer.Option(help="What a file that cannot be decoded does: skip or fail.")]
ZooModel = Annotated[
    str,
    typer.Argument(help="A model of the zoo, or the name of an AugReg file.", autocompletion=complete_model),
]
Model = Annotated[
    str, typer.Argument(help="A model of the zoo, a checkpoint or a .keras file.", autocompletion=complete_model)
]
Weights = Annotated[
    str | None,
    typer.Option(help="For a name: a tag of the model's card, a path or a URL.", autocompletion=complete_weights),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps back what TensorFlow's and LiteRT's libraries write to standard error while they start and run the block.

    They write before any of their settings is read, or whatever those are, so that the file descriptor itself is
    turned aside; what Python writes (progress, warnings) is shown. Where the import or the block fails in a way that no
    user can mend, the rest is shown too.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    python, kept, imported = _python_stderr(), os.dup(2), False
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            import tensorflow  # noqa: F401

            imported = True
            with contextlib.redirect_stderr(python):
                yield
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt) and not (
                imported and isinstance(error, (*MENDABLE, SystemExit))
            ):
                aside.seek(0)
                os.write(kept, aside.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _python_stderr() -> TextIO:
    """What Python writes to as standard error while descriptor 2 is turned aside; tests put theirs elsewhere anyway."""
    try:
        direct = sys.stderr.fileno() == 2
    except (AttributeError, OSError):
        direct = False
    return _copy_of_stderr() if direct else sys.stderr


@functools.cache
def _copy_of_stderr() -> TextIO:
    # Never closed: a logger that is made in the meantime keeps it.
    return os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")


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


def is_checkpoint(model: str, weights: str | None) -> bool:
    """Whether a model is a file or folder. A name of the zoo stays one though a folder has it: "./digits" is that."""
    from keras_vit.zoo import catalogue

    path = Path(model)
    if weights is not None or not path.exists():
        return False
    return path.is_file() or not catalogue.names(model)


def load(model: str, weights: str | None, image_size: str | None) -> Any:
    """A model of the zoo, or out of a file."""
    from keras_vit import converters, zoo

    wanted = size(image_size)
    if is_checkpoint(model, weights):
        return converters.load(model, image_size=wanted)
    return zoo.load(model, weights=weights or "default", image_size=wanted)


def need_images(paths: Iterable[str]) -> None:
    """Raises a FileNotFoundError that names the first image file that is not there; addresses are not looked at."""
    for path in paths:
        if "://" not in path and not Path(path).is_file():
            raise FileNotFoundError(f"There is no image file {path!r}")


def tell(found: Any, as_json: bool) -> None:
    """Prints what has a `to_dict`, as JSON or as it prints."""
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
