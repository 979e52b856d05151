"""The one error type that reading a checkpoint may raise, and the boundary that keeps that promise."""

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from keras_vit.errors import CheckpointError

AGAIN = "Fetch it again."
"""What to do about a damaged file."""

# Everything the parsers below us (zipfile, zlib, json, ast, struct, NumPy) raise when bytes lie to them.
_PARSER_ERRORS = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,  # includes NotImplementedError and RecursionError
    SyntaxError,
    TypeError,
    ValueError,  # includes UnicodeDecodeError
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever goes wrong while the file at `path` is read into a `CheckpointError` that names it.

    Args:
        path: The file being read, for the message.

    Raises:
        CheckpointError: In place of any error that the bytes of a file can provoke in a parser.
        FileNotFoundError: Unchanged, as `PermissionError`: they speak of the path, not of the bytes.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__
    except _PARSER_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise CheckpointError(f"{path}: cannot be read ({reason}). If damaged, fetch it again.") from error


def shown(text: str) -> str:
    """Returns a name from a file as it may stand in a message: quoted, control characters escaped, short."""
    return repr(text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}")
