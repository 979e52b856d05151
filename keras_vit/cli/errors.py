"""Print errors and warnings of commands as one line each."""

import sys
from typing import Any

from keras_vit._util.text import GRAPH_NAMES, error_reason, printable

# Errors that a user can correct: `main` prints them as one line, with exit code 1.
USER_ERRORS = (ValueError, OSError, ImportError, ArithmeticError, MemoryError)


def is_user_error(error: BaseException) -> bool:
    """Return whether an error is one that a user can correct, or TensorFlow's: an operation that failed."""
    tensorflow = sys.modules.get("tensorflow")  # never imported here
    return isinstance(error, USER_ERRORS) or (
        tensorflow is not None and hasattr(tensorflow, "errors") and isinstance(error, tensorflow.errors.OpError)
    )


def error_text(error: Exception) -> str:
    """Return what to print for an error of a user."""
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
