"""Turn every error that occurs while a file is read into a CheckpointError that names the file."""

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from keras_vit.errors import CheckpointError

DOWNLOAD_AGAIN = "Download it again."

# Everything that zipfile, zlib, json, ast, struct and NumPy raise when the bytes are wrong.
PARSER_ERRORS = (
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
    """Replace every error that the bytes of a file can cause in a parser by a CheckpointError that names the file.

    FileNotFoundError and PermissionError are about the path and are raised unchanged.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__
    except PARSER_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise CheckpointError(f"{path}: cannot be read ({reason}). If it is damaged, download it again.") from error


def quoted(text: str) -> str:
    """Quote, escape and shorten a name from a file for a message."""
    return repr(text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}")
