"""Options that several commands share, completion of their values, parsing, and printing of results and errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TextIO

import typer
from typer import Argument, Option

from keras_vit._util.checks import Rule, expand_home, field_rules, given
from keras_vit._util.fields import option_help
from keras_vit._util.files import check_no_file_in_way, image_files
from keras_vit._util.text import GRAPH_NAMES, error_reason, printable, warn
from keras_vit.errors import KerasViTError

if TYPE_CHECKING:
    from rich.table import Table

    from keras_vit.export.runtime import FileModel
    from keras_vit.model.config import ViTConfig
    from keras_vit.model.vision_transformer import VisionTransformer
    from keras_vit.zoo.pretrained import ResolvedModel

# Errors that a user can correct: `main` prints them as one line, with exit code 1.
USER_ERRORS = (KerasViTError, ValueError, OSError, ImportError, ArithmeticError, MemoryError)
Complete = Callable[[str], list[str]]  # from the beginning of a word to the words that it may become
_PYTHON_VALUES = {"True": True, "False": False, "None": None}
TABLE_WIDTH = 10_000  # columns: no table is wrapped, because other programs also read the lines of `list` and `show`


def _starting_with(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a model, "ViT-B/16" or "B/16"; the shell adds files."""
    from keras_vit.zoo import catalogue

    names = catalogue.names()
    short = [name.replace("ViT-", "") for name in names]
    return _starting_with(incomplete, names) or _starting_with(incomplete, short)


def complete_weights(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a tag of the model that is on the line; of any model before there is one."""
    from keras_vit.zoo import cards, catalogue

    model = context.params.get("model") or context.params.get("name")
    try:
        tags = cards.card(model).weights if model else [row["weights"] for row in catalogue.table()]
    except ValueError:  # a file has no card
        return []
    return _starting_with(incomplete, dict.fromkeys(tags))


def _complete_tables(*folders: str) -> Complete:
    """Create the function that completes names of .toml files in a folder of the package's data."""

    def complete(incomplete: str) -> list[str]:
        from keras_vit._util.files import data_folder

        found = data_folder(folders[0]).joinpath(*folders[1:]).glob("*.toml")
        return _starting_with(incomplete, sorted(path.stem for path in found))

    return complete


complete_recipe = _complete_tables("zoo", "recipes")
complete_format = _complete_tables("converters", "checkpoints")
complete_mode = _complete_tables("converters", "exports")


def integer(least: int, help: str, *names: str) -> Any:
    """Describe an option that takes integers from `least`."""
    return checked(Rule((int,), is_optional=True, interval=f"[{least}, inf)"), help, *names)


def choice(known: tuple[str, ...], help: str, *names: str) -> Any:
    """Describe an option that takes one of the known values."""
    return checked(Rule((str,), is_optional=True, choices=known), help, *names)


def checked(rule: Rule, help: str, *names: str, has_zero: bool = False, complete: Complete | None = None) -> Any:
    """Describe an option whose values a rule accepts; `has_zero` lets 0 stand for None."""

    def check(parameter: typer.CallbackParam, value: Any) -> Any:
        value = None if has_zero and value == 0 else value
        for item in value if isinstance(value, list) else [value]:
            for problem in rule.problems(item, parameter.opts[0]):
                raise ValueError(problem)
        return value

    return Option(*names, help=help, callback=check, autocompletion=complete)


def folder(help: str) -> Any:
    """Describe an option for the folder of a command's results; an empty text is not the current folder."""

    def parse(text: str) -> Path:
        if not str(text):
            raise typer.BadParameter("a folder needs a name. Received: ''")
        check_no_file_in_way(Path(text))
        return Path(text)

    return Option(help=help, parser=parse, metavar="FOLDER")


def parse_size(parameter: typer.CallbackParam, text: str | None) -> Any:
    """Parse "384" to 384 and "384x256" to (384, 256); a callback, so that commands receive these."""
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", text, re.ASCII | re.IGNORECASE):
        raise ValueError(f"{parameter.opts[0]} must be a number of pixels or HEIGHTxWIDTH. Received: {text!r:.200}")
    sides = [int(side) for side in text.lower().split("x")]
    return sides[0] if len(sides) == 1 else tuple(sides)


def parse_fields(texts: Iterable[str] | None, option: str = "--config") -> dict[str, Any]:
    """Parse ["num_heads=12", "classifier=gap"] to a dict; values are JSON, True, False or None, or else text."""
    fields: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{option} must be FIELD=VALUE. Received: {text!r:.200}")
        try:
            fields[name] = _PYTHON_VALUES[value] if value in _PYTHON_VALUES else json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


def parse_lists(texts: Iterable[str] | None, option: str, fields: Collection[str]) -> dict[str, list[Any]]:
    """Parse ["steps=10,20"] to lists; values are those of `parse_fields`. Each field once, and none of `fields`."""
    lists: dict[str, list[Any]] = {}
    for text in texts or ():
        name, equals, joined = text.partition("=")
        if name in {*fields, *lists}:
            raise ValueError(f"{name} is given twice. {option} takes all values of a field: {name}=VALUE,VALUE")
        parts: list[str] = []
        for part in joined.split(","):
            if parts and sum(map(parts[-1].count, "[{")) > sum(map(parts[-1].count, "]}")):
                parts[-1] += f",{part}"  # within a list or a table
            else:
                parts.append(part)
        lists[name] = [parse_fields([f"{name}{equals}{part}"], option)[name] for part in parts]
    return lists


MODEL_HELP = "A model of the zoo, a file, a folder of a checkpoint or of a training run, or a URL."
Model = Annotated[str, Argument(help=MODEL_HELP, autocompletion=complete_model)]
Weights = Annotated[
    str | None, Option(help="For a name: a tag of the model's card, a path or a URL.", autocompletion=complete_weights)
]
License = Annotated[
    bool, Option("--accept-license", help="Accept the publisher's own terms, whose address the model's card has.")
]
Size = Annotated[str | None, Option("--image-size", help="Pixels: 384 or HEIGHTxWIDTH.", callback=parse_size)]
Patch = Annotated[
    str | None,
    Option("--patch-size", help="Pixels: 12 or HEIGHTxWIDTH; for FlexiViT, see resized.", callback=parse_size),
]
Classes = Annotated[int | None, integer(0, "A new head of this many classes; 0 for none.", "--num-classes")]
ConfigFields = Annotated[
    list[str] | None,
    Option("--config", help="FIELD=VALUE that the file does not state, such as num_heads=12; may be repeated."),
]
Which = Annotated[
    str | None,
    Option("--which", help="Of a file with several models: ema, raw, or the key of one, such as teacher."),
]
Strategy = Annotated[str, Option(help="auto, one, mirrored, workers, tpu or tpu:NAME.")]
Images = Annotated[list[str], Argument(help='Image files, folders and patterns such as "photos/*.jpg".')]
DataDir = Annotated[Path | None, Option(help="Folder in which tensorflow-datasets keeps prepared data.")]
BadImage = Annotated[str, choice(("skip", "fail"), "What to do about a file that cannot be decoded: skip or fail.")]
MaskValues = Annotated[
    str | None, Option(help='Value in masks of each class, in order: 0,255 or "#000000,#ff0000"; default: the numbers.')
]
Top = Annotated[int, integer(1, "Number of classes for each image.")]
Json = Annotated[bool, Option("--json", help="Print JSON, and nothing else, on standard output.")]


def takes(*options: inspect.Parameter) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options in place of its `**names`, from which it reads them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        named = [option.replace(kind=option.KEYWORD_ONLY) for option in own if option.kind is not option.VAR_KEYWORD]
        required = sum(option.default is option.empty for option in named)
        signature = inspect.Signature([*named[:required], *options, *named[required:]])
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {name: option.annotation for name, option in signature.parameters.items()}
        return command

    return decorate


def field_options(cls: type, *names: str, **complete: Complete) -> list[inspect.Parameter]:
    """Describe the options of these names that `fields.option` describes in a dataclass, for `takes`.

    `complete` has the functions that complete their values in a shell. 0 stands for None where the default is another
    number.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    return [_field_option(cls, fields[name], field_rules(cls)[name], complete.get(name)) for name in names]


def _field_option(cls: type, field: Any, rule: Rule, complete: Complete | None) -> inspect.Parameter:
    how, default, help = field.metadata, field.default, option_help(cls, field.name)
    kind: Any = float if rule.is_float else rule.kinds[0] if rule.kinds in ((bool,), (int,)) else str
    flag = how.get("flag", f"--{field.name.replace('_', '-')}")
    if how.get("is_size"):
        described = Option(flag, help=f"{help} Such as 384 or 384x512.", metavar="PIXELS", callback=parse_size)
    elif object in rule.kinds:  # anything: checked where it is used
        described = Option(flag, help=help, autocompletion=complete)
    else:
        has_zero = kind is int and rule.is_optional and default is not None
        described = checked(rule, help, flag, has_zero=has_zero, complete=complete)
    kind = kind if default is not None else kind | None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, described]
    )


def _model_options(
    *,
    weights: Weights = None,
    which: Which = None,
    config: ConfigFields = None,
    accept_license: License = False,
    image_size: Size = None,
    patch_size: Patch = None,
) -> None:
    """Declare the options that `find_model` reads beside the model."""


MODEL_OPTIONS = [*inspect.signature(_model_options, eval_str=True).parameters.values()]
MODEL_NAMES = [option.name for option in MODEL_OPTIONS]


@contextlib.contextmanager
def quiet(*, starts_tensorflow: bool = True) -> Iterator[None]:
    """Hide what TensorFlow's and LiteRT's libraries write to standard error while they start and run the block.

    They ignore settings, so file descriptor 2 is redirected; what Python writes (progress, warnings) goes to a copy. If
    the import or the block fails with an error that is not the user's, the libraries' output is shown after all.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    python_stderr, original, imported = _python_stderr(), os.dup(2), False
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            if starts_tensorflow:
                _import_tensorflow()
            imported = True
            with contextlib.redirect_stderr(python_stderr):
                yield
        except BaseException as error:
            is_users = (is_user_error(error) or isinstance(error, SystemExit)) and imported
            if not is_users and not isinstance(error, KeyboardInterrupt):
                hidden.seek(0)
                os.write(original, hidden.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)


def _import_tensorflow() -> None:
    """Import TensorFlow and Keras without what Keras imports for its wrappers and plots, which no command uses."""
    hidden = [name for name in ("matplotlib", "sklearn") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        import tensorflow  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


def _python_stderr() -> TextIO:
    """Choose where Python writes standard error while descriptor 2 is redirected; tests replace sys.stderr anyway."""
    try:
        is_descriptor = sys.stderr.fileno() == 2
    except (AttributeError, OSError):
        is_descriptor = False
    return _copy_of_stderr() if is_descriptor else sys.stderr


@functools.cache
def _copy_of_stderr() -> TextIO:
    # Never closed, without a warning: a logger created in the block keeps it.
    return os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def is_tflite(model: str) -> bool:
    """Whether a command was given a .tflite file, which is run without TensorFlow."""
    return model.casefold().endswith(".tflite") and "://" not in model


def load_file(model: str, **chosen: Any) -> FileModel:
    """Load a .tflite file in place of a model; raise a ValueError for options that are for models."""
    from keras_vit.export import runtime

    if given_options := [f"--{name.replace('_', '-')}" for name, value in chosen.items() if value]:
        raise ValueError(f"{', '.join(given_options)}: for models, not for files. Received: the file {model}")
    loaded = runtime.load(expand_home(model))
    if not isinstance(loaded, runtime.FileModel):
        raise ValueError(f"{model} is a file of texts: keras_vit.export.load(path).embed(texts) runs it")
    return loaded


class FoundModel(NamedTuple):
    """A model that a command was given, checked but not loaded."""

    resolved: ResolvedModel
    config: ViTConfig
    load: Callable[[], Any]  # a VisionTransformer, or a DenseModel if it `has_maps`
    has_maps: bool = False


def find_model(
    model: str,
    weights: str | None = None,
    image_size: Any = None,
    patch_size: Any = None,
    *,
    default: str | None = "default",
    num_classes: int | None = None,
    accept_license: bool = False,
    needs_classes: bool = False,
    config: Sequence[str] | None = None,
    **file_facts: Any,
) -> FoundModel:
    """Find what a command was given and check it, without TensorFlow.

    Arguments and errors are those of `resolve`, and of `zoo.load` or, for a file, `converters.load`. `config` is as it
    was written, such as ["num_heads=12"]. `needs_classes` raises a ValueError for a model without a head for classes,
    where the card says so before any download.
    """
    from keras_vit.zoo.pretrained import load_any, open_model, resolve

    changes = given(image_size=image_size, patch_size=patch_size, num_classes=num_classes)
    file_facts |= given(config=parse_fields(config) or None)
    resolved = replace(resolve(model, weights, default=default), accept_license=accept_license)
    if needs_classes and resolved.published is not None and resolved.published.num_classes == 0:
        raise _no_classes(model)
    with open_model(resolved, changes, **file_facts) as opened:
        model_config, has_maps = opened.config, opened.has_maps
    if needs_classes and not has_maps and (not model_config.num_classes or model_config.projection_head):
        raise _no_classes(model)
    load = functools.partial(load_any, resolved, changes, **file_facts)
    return FoundModel(resolved, model_config, load, has_maps=has_maps)


def _no_classes(model: str) -> ValueError:
    return ValueError(
        f"{model} has no head for classes, so it cannot classify images. For classes that are texts (CLIP, SigLIP): "
        f"keras-vit predict {model} IMAGES --classes cat,dog. For its features: keras-vit embed {model} "
        "IMAGES --to FOLDER. For a head of your own classes: keras-vit train linear-probe"
    )


def choose_images(paths: list[str], most: int) -> list[str]:
    """List image files, at most `most` of them, evenly chosen; a line says so."""
    files = image_files(paths)
    if len(files) <= most:
        return files
    echo(f"{most} of the {len(files):,} images are used, evenly chosen", err=True)
    return [files[place * len(files) // most] for place in range(most)]


def drop_unreadable(model: VisionTransformer, files: list[str] | None) -> list[str] | None:
    """Drop files that the model cannot read, with a warning; raise an error if none is left."""
    from keras_vit.model.classify import prepare

    errors = {file: error for file in files or () if isinstance(error := prepare(model, file), Exception)}
    reasons = [*errors.values()]
    if reasons and len(reasons) == len(set(files or ())):
        raise reasons[0]
    if reasons:
        warn(f"images that cannot be read are left out: {len(reasons):,}. Such as {reasons[0]}")
    return files and [file for file in files if file not in errors]


def check_data(data: str, data_dir: Path | None) -> None:
    """Raise an error for a folder of data that does not exist; the names of data sets are checked later."""
    # "cifar10_corrupted/blur_1" is the name of a data set if `data_dir` has a folder of its first part.
    prepared = str(data_dir or os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets"))
    name, slash, _ = data.partition("/")
    is_name = not name.startswith((".", "~")) and (
        not slash or (name and (":/" in prepared or Path(expand_home(prepared), name).is_dir()))
    )
    if not is_name and "://" not in data and not expand_home(data).is_dir():
        raise FileNotFoundError(f"There is no folder of images or of prepared data {data!r:.200}")


def is_user_error(error: BaseException) -> bool:
    """Check for an error that a user can correct, or TensorFlow's of an operation that failed."""
    tensorflow = sys.modules.get("tensorflow")  # never imported here
    return isinstance(error, USER_ERRORS) or (
        tensorflow is not None and hasattr(tensorflow, "errors") and isinstance(error, tensorflow.errors.OpError)
    )


def error_text(error: Exception) -> str:
    """Text to print for an error of a user."""
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, MemoryError):
        return f"There is not enough memory. {text}"
    if not isinstance(error, USER_ERRORS):
        return f"TensorFlow failed ({type(error).__name__}): {error_reason(getattr(error, 'message', text))}"
    return GRAPH_NAMES.sub("", text)


def show_warning(message: Warning | str, *_args: Any, **_options: Any) -> None:
    """Print a warning as one line; in place of `warnings.showwarning`."""
    text = printable(str(message).removeprefix("keras_vit: "), keep="\n")
    print(f"keras-vit: warning: {text}", file=sys.stderr)


def echo(text: str, *, err: bool = False) -> None:
    """Print the text of a command: names of files and classes cannot control the terminal."""
    typer.echo(printable(text, keep="\n"), err=err)


def print_result(result: Any, as_json: bool) -> None:
    """Print an object with `to_dict` as JSON or as text."""
    echo(json.dumps(result.to_dict(), indent=2) if as_json else str(result))


def table_text(table: Table) -> str:
    """Draw a rich table as text, as wide as its content, without spaces at the ends of lines."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=TABLE_WIDTH, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Align columns of text, those numbered in `right` at their right edges."""
    from rich.table import Table

    table = Table.grid(*rows[0], padding=(0, 2, 0, 0))
    for column in right:
        table.columns[column].justify = "right"
    for row in rows:
        table.add_row(*map(printable, row))  # a name is in one line
    return table_text(table)
