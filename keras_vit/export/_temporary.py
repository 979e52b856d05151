"""Make temporary paths for exports, which reach their final path only complete and verified."""

from __future__ import annotations

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
