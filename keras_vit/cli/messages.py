"""Print errors and warnings in the words of the command line: options instead of arguments of Python."""

import re
import sys
from collections.abc import Mapping
from typing import Any

from keras_vit._util.text import GRAPH_NAMES, error_reason

# Errors that a user can correct: `main` prints them as one line, with exit code 1.
USER_ERRORS = (ValueError, OSError, ImportError, ArithmeticError, MemoryError)

# Arguments of Python functions whose option has another name.
_OPTIONS = {"input_dtype": "--input", "source_format": "--from", "format": "--from", "mode": "--quantize"}
_PHRASES = {
    "calibration=model.preprocess(...)": "--images FOLDER",
    "labels='real'": "--real",
    "accept_licence=True": "--accept-licence",
    "reset_head=True": "--set reset_head=true",
    "(height, width)": "HEIGHTxWIDTH",
}
_VALUE = r"""'[^']*'|"[^"]*"|\{[^}]*\}|\([^)]*\)|[\w.:/+%-]*\w"""
QUOTES = "'\""


def is_user_error(error: BaseException) -> bool:
    """Return whether an error is one that a user can correct, or TensorFlow's: an operation that failed."""
    tensorflow = sys.modules.get("tensorflow")  # never imported here
    return isinstance(error, USER_ERRORS) or (
        tensorflow is not None and hasattr(tensorflow, "errors") and isinstance(error, tensorflow.errors.OpError)
    )


def error_line(error: Exception, options: Mapping[str, str]) -> str:
    """Return the message of an error of a user; `options` maps names of arguments to those of options."""
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        text = f"{error.strerror}: {error.filename}"
    elif isinstance(error, MemoryError):
        text = f"There is not enough memory. {text}"
    elif not isinstance(error, USER_ERRORS):
        text = f"TensorFlow failed ({type(error).__name__}): {error_reason(getattr(error, 'message', text))}"
    text, mark, command = text.partition("\nTF_CONFIG=")  # a command for a shell has options already
    return in_options(GRAPH_NAMES.sub("", text), options) + mark + command


def in_options(text: str, options: Mapping[str, str]) -> str:
    """Replace arguments of Python in a message, such as "image_size=32", by options: "--image-size 32"."""
    facts = options.get("config", "with keras-vit convert: --config")
    text = re.sub(r"\bconfig=\{(.*?)\}", lambda match: f"{facts} {_as_field(match[1])}", text)
    for phrase, words in _PHRASES.items():
        text = text.replace(phrase, words)
    arguments = {**_OPTIONS, **options}
    names = "|".join(arguments)
    text = re.sub(rf"(?<!--config )\b({names})=({_VALUE})?", lambda match: _option(arguments[match[1]], match[2]), text)
    subject = rf"(^|[:;] )({'|'.join(['input_dtype', *options])})(?= (?:is|are|has|needs|lies|must) )"
    return re.sub(subject, lambda match: match[1] + arguments[match[2]], text)


def _option(option: str, value: str | None) -> str:
    size = re.sub(r"^\((\d+), (\d+)\)$", r"\1x\2", value or "")
    return f"{option} {size.strip(QUOTES)}".rstrip()


def _as_field(text: str) -> str:
    """Return "'num_heads': 12" as "num_heads=12"."""
    return text.replace("': ", "=").replace("'", "").replace("(height, width)", "[HEIGHT,WIDTH]")


def show_warning(message: Warning | str, *_args: Any, **_options: Any) -> None:
    """Print a warning as one line; in place of `warnings.showwarning`."""
    text = str(message).removeprefix("keras_vit: ")
    print(f"keras-vit: warning: {in_options(text, command_options())}", file=sys.stderr)


def command_options() -> dict[str, str]:
    """Return the options of the command on the command line by the names of their arguments."""
    from typer.main import get_command

    from keras_vit.cli._app import app

    command = getattr(get_command(app), "commands", {}).get(sys.argv[1] if len(sys.argv) > 1 else "")
    given = [(parameter.name, parameter.opts) for parameter in command.params] if command else []
    return {name: max(opts, key=len) for name, opts in given if name and opts[0].startswith("--")}
