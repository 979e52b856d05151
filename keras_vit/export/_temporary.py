"""Check the paths of exports, and make temporary ones: a file reaches its final path only complete and verified."""

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keras_vit.errors import VerificationError

MAX_PREFIX = 32  # letters of the final name in the temporary one, so that this is not too long


@contextlib.contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder beside `path`, to which the block moves its result.

    The folder is removed at the end. A VerificationError and the error of a full disk name the final path.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name[:MAX_PREFIX]}.", dir=path.parent) as folder:
            work = Path(folder) / "export"
            yield work
    except VerificationError as error:
        raise VerificationError(str(error).replace(str(work), str(path))) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, "The disk is full; nothing was written to", str(path)) from error


def check_file_path(path: Path) -> None:
    """Raise an OSError if a .tflite file cannot be written to a path."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "A .tflite file cannot be written over a folder", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no folder for the .tflite file", str(path.parent))


def check_folder_path(path: Path) -> None:
    """Raise a FileExistsError if there is something at the path of a SavedModel's folder."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} already exists: remove it, or write the next version beside it")
