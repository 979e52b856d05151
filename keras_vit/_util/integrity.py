"""Is this file the one that was meant, and is it whole? Checksums, archives that check themselves, and pins.

A pin is a small text file beside a verified file, `<file>.sha256`, that holds its SHA-256, its size and its
modification time. While the latter two hold, later uses need not read a gigabyte again to know it is good.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

CHUNK = 1 << 20


class CorruptFile(Exception):  # noqa: N818 - it names a state of the file; users see download.DownloadError
    """The file is not the one that was meant, or there is no way to know; the message says why."""


class Checksum(Protocol):
    """What `hashlib` and `google_crc32c` have in common."""

    def update(self, data: bytes, /) -> None:
        """Take in more bytes."""

    def digest(self) -> bytes:
        """The checksum of all bytes so far."""


@dataclass(frozen=True)
class Expected:
    """What is known about a file before it is read; every field that is not None must hold.

    Attributes:
        sha256: lower-case hexadecimal SHA-256.
        size: bytes.
        checksums: algorithm ("md5", "crc32c") to digest. They count only when `sha256` is None.
    """

    sha256: str | None = None
    size: int | None = None
    checksums: Mapping[str, bytes] = field(default_factory=dict)

    def can_verify(self, suffix: str) -> bool:
        """Whether a file of this kind can be told from a damaged one at all."""
        return bool(self.sha256 or self.checksums or suffix in SELF_CHECKS or self.size is not None)


def new_checksum(algorithm: str) -> Checksum:
    """An empty "sha256", "md5" or "crc32c" checksum."""
    if algorithm == "crc32c":  # composite objects of Google's storage state no other
        import google_crc32c

        return google_crc32c.Checksum()
    return hashlib.new(algorithm, usedforsecurity=algorithm == "sha256")


def digests(path: Path, algorithms: set[str]) -> dict[str, bytes]:
    """Checksums of a file by algorithm, in one pass and constant memory."""
    running = {algorithm: new_checksum(algorithm) for algorithm in algorithms}
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            for checksum in running.values():
                checksum.update(chunk)
    return {algorithm: checksum.digest() for algorithm, checksum in running.items()}


def verify(path: Path, expected: Expected, suffix: str | None = None) -> str:
    """Check a file as strictly as what is known about it allows.

    Args:
        path: the file.
        expected: its SHA-256, else its other checksums, and always its size. Without a checksum the file must
            check itself.
        suffix: the kind of file, ".npz" say, where the name of `path` does not end in it.

    Returns:
        The file's SHA-256, hexadecimal.

    Raises:
        CorruptFile: something does not hold, or nothing is known by which the file could be checked.
    """
    suffix = path.suffix if suffix is None else suffix
    actual_size = path.stat().st_size
    if expected.size not in (None, actual_size):
        raise CorruptFile(f"it has {actual_size:,} bytes, expected {expected.size:,}")
    checksums = {"sha256": bytes.fromhex(expected.sha256)} if expected.sha256 else dict(expected.checksums)
    actual = digests(path, {"sha256", *checksums})
    for algorithm, digest in checksums.items():
        if actual[algorithm] != digest:
            raise CorruptFile(f"its {algorithm} is {actual[algorithm].hex()}, expected {digest.hex()}")
    if not checksums and suffix in SELF_CHECKS:
        SELF_CHECKS[suffix](path)
    elif not expected.can_verify(suffix):
        raise CorruptFile("neither a checksum nor a length is known by which to check it")
    return actual["sha256"].hex()


def check_zip(path: Path) -> None:
    """Test the CRC of every member, streaming, so that an archive of any size needs little memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile and its decompressors raise ten kinds, all of them for damage
        raise CorruptFile(f"it is no intact zip archive ({error})") from error
    if damaged is not None:
        raise CorruptFile(f"its member {damaged} is damaged")


def check_safetensors(path: Path) -> None:
    """Compare the length of the file with what its own header states."""
    try:
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if header_size > path.stat().st_size:
                raise CorruptFile(f"its header claims {header_size:,} bytes, more than the whole file has")
            header = json.loads(file.read(header_size))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        stated = 8 + header_size + max(ends, default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CorruptFile(f"it has no readable safetensors header ({error})") from error
    if path.stat().st_size != stated:
        raise CorruptFile(f"it has {path.stat().st_size:,} bytes, its own header states {stated:,}")


SELF_CHECKS: dict[str, Callable[[Path], None]] = {
    ".npz": check_zip,
    ".zip": check_zip,
    ".keras": check_zip,
    ".safetensors": check_safetensors,
}


def pin_of(path: Path) -> Path:
    """Where the pin of a file lies."""
    return path.with_name(path.name + ".sha256")


def write_pin(path: Path, file: Path, sha256: str) -> None:
    """Pin `path` as the file that now lies at `file`: at `path` itself, or about to be renamed to it."""
    stat = file.stat()
    temporary = pin_of(path).with_name(f"{pin_of(path).name}.{os.getpid()}")
    temporary.write_text(f"{sha256} {stat.st_size} {stat.st_mtime_ns}\n")
    temporary.replace(pin_of(path))


def read_pin(path: Path) -> tuple[str, int, int] | None:
    """SHA-256, size and modification time (ns) of a file when it was verified; None without a pin."""
    try:
        sha256, size, modified = pin_of(path).read_text().split()
        return bytes.fromhex(sha256).hex(), int(size), int(modified)
    except (OSError, ValueError):
        return None


def is_intact(path: Path, expected: Expected) -> bool:
    """Whether a file that was put there earlier is there and still good.

    That takes one `stat` when its pin fits. Otherwise it is verified, against the pinned SHA-256 if there is
    one, and pinned anew.
    """
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
    except CorruptFile:
        return False
    with suppress(OSError):  # a shared, read-only cache cannot take a pin, and works without
        write_pin(path, path, sha256)
    return True
