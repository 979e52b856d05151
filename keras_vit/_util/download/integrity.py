"""Verify files by checksums, by checks of their own formats, and by pins.

A pin is a text file beside a verified file, `<file>.sha256`, with its SHA-256, size and modification time. If size and
time are unchanged, the file is not read again.
"""

import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
from safetensors import SafetensorError, safe_open

from keras_vit._util.untrusted import MAX_JSON_BYTES, parse_json

CHUNK = 1 << 20


class CorruptFileError(Exception):
    """A file has the wrong content, or cannot be checked. Internal: users get a DownloadError."""


@dataclass(frozen=True)
class Expected:
    """The known facts about a file that is not read yet."""

    sha256: str | None = None  # lower-case hexadecimal
    size: int | None = None  # in bytes
    checksums: Mapping[str, bytes] = field(default_factory=dict)  # by algorithm; used only without sha256

    def can_verify(self, suffix: str) -> bool:
        """Return whether damage to a file with this suffix could be detected."""
        return bool(self.checks_content(suffix) or suffix in SELF_CHECKS or self.size is not None)

    def checks_content(self, suffix: str) -> bool:
        """Return whether any changed byte of a file with this suffix would be detected, so that it can be resumed."""
        return bool(self.sha256 or self.checksums or suffix in ZIP_CHECKS)


def digests(path: Path, algorithms: set[str]) -> dict[str, bytes]:
    """Return checksums of a file by algorithm ("sha256", "md5" or "crc32c"), in one pass and constant memory."""
    checksums: dict[str, Any] = {name: hashlib.new(name, usedforsecurity=False) for name in algorithms - {"crc32c"}}
    if "crc32c" in algorithms:  # the only checksum of composite objects in Google's storage
        checksums["crc32c"] = google_crc32c.Checksum()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            for checksum in checksums.values():
                checksum.update(chunk)
    return {algorithm: checksum.digest() for algorithm, checksum in checksums.items()}


def verify(path: Path, expected: Expected, suffix: str | None = None) -> str:
    """Check a file by size and checksums, else by the format of its suffix; return its SHA-256 (hexadecimal)."""
    suffix = path.suffix if suffix is None else suffix
    with path.open("rb") as file:
        if WEB_PAGE.match(file.read(512)) and suffix not in (".html", ".htm"):
            raise CorruptFileError("it is a web page, such as the login page of a network or an error page")
    actual_size = path.stat().st_size
    if expected.size not in (None, actual_size):
        raise CorruptFileError(f"it has {actual_size:,} bytes, expected {expected.size:,}")
    checksums = {"sha256": bytes.fromhex(expected.sha256)} if expected.sha256 else dict(expected.checksums)
    actual = digests(path, {"sha256", *checksums})
    for algorithm, digest in checksums.items():
        if actual[algorithm] != digest:
            raise CorruptFileError(f"its {algorithm} is {actual[algorithm].hex()}, expected {digest.hex()}")
    if not checksums and suffix in SELF_CHECKS:
        try:
            SELF_CHECKS[suffix](path)
        except Exception as error:  # zipfile and its decompressors raise ten types for damage
            raise CorruptFileError(f"it is not an intact {suffix} file ({error})") from error
    elif not expected.can_verify(suffix):
        raise CorruptFileError("it cannot be checked: neither a checksum nor a length is known")
    return actual["sha256"].hex()


def _check_zip(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():  # by the CRC of every member, in little memory
            raise ValueError(f"its member {damaged} is damaged")


def _check_torch(path: Path) -> None:
    """Test PyTorch's zip archive; the pickles of PyTorch before 1.6 cannot be tested, and are never read."""
    with path.open("rb") as file:
        is_pickle = file.read(1) == b"\x80"
    if not is_pickle:
        _check_zip(path)


def _check_json(path: Path) -> None:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES:,} bytes, the limit for JSON")
    parse_json(path.read_bytes())


def _check_hdf5(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(48)
    if not start.startswith(b"\x89HDF\r\n\x1a\n") or len(start) < 48:
        raise ValueError("is not an HDF5 file")
    place = 40 if start[8] in (0, 1) else 28  # of the length, in superblocks of versions 0 to 3
    stated = int.from_bytes(start[place : place + 8], "little")
    if stated > path.stat().st_size:
        raise ValueError(f"it has {path.stat().st_size:,} bytes, its own header states {stated:,}")


def _check_safetensors(path: Path) -> None:
    try:
        safe_open(path, "numpy", backend="pread")
    except SafetensorError as error:
        raise ValueError(f"has no valid safetensors header: {str(error)[:200]}") from error


# Checks of the whole content, and all checks, by suffix.
ZIP_CHECKS = {
    **dict.fromkeys((".npz", ".zip", ".keras"), _check_zip),
    **dict.fromkeys((".pth", ".pt", ".bin"), _check_torch),
}
SELF_CHECKS: dict[str, Callable[[Path], None]] = {
    **ZIP_CHECKS,
    ".h5": _check_hdf5,
    ".hdf5": _check_hdf5,
    ".safetensors": _check_safetensors,
    ".json": _check_json,
}
WEB_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html|head|body|script)\b", re.IGNORECASE)


def pin_of(path: Path) -> Path:
    """Return the path of a file's pin."""
    return path.with_name(path.name + ".sha256")


def write_pin(path: Path, file: Path, sha256: str) -> None:
    """Write the pin of `path`, whose content is at `file`: `path` itself, or a file to be renamed to it."""
    stat = file.stat()
    temporary = pin_of(path).with_name(f"{pin_of(path).name}.{os.getpid()}")
    temporary.write_text(f"{sha256} {stat.st_size} {stat.st_mtime_ns}\n")
    temporary.replace(pin_of(path))


def read_pin(path: Path) -> tuple[str, int, int] | None:
    """Return SHA-256, size and modification time (ns) of a file when it was verified; None without a pin."""
    try:
        sha256, size, modified = pin_of(path).read_text().split()
        return bytes.fromhex(sha256).hex(), int(size), int(modified)
    except (OSError, ValueError):
        return None


def is_intact(path: Path, expected: Expected) -> bool:
    """Return whether a cached file is intact: by its pin if that fits, else by verifying it, which pins it again."""
    if not path.is_file():
        return False
    stat, pin = path.stat(), read_pin(path)
    if pin is not None:
        if expected.sha256 not in (None, pin[0]) or expected.size not in (None, pin[1]):
            pin = None  # the pin is of another version of this file
        elif pin[1:] == (stat.st_size, stat.st_mtime_ns):
            return True
    try:
        sha256 = verify(path, Expected(pin[0], pin[1]) if pin else expected)
    except CorruptFileError:
        return False
    with suppress(OSError):  # a read-only cache works without a pin
        write_pin(path, path, sha256)
    return True
