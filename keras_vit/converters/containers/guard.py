"""Turn whatever goes wrong while a file is read into one CheckpointError that names the file."""

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
    """Replace every error that the bytes of a file can cause in a parser by a CheckpointError.

    Args:
        path: the file being read, for the message.

    Raises:
        CheckpointError: the file is damaged or breaks a rule of its format.
        FileNotFoundError, PermissionError: unchanged, for they are about the path.
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
    """Return a name from a file as it may stand in a message: quoted, escaped and short."""
    return repr(text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}")
