"""Validate untrusted zip files: check everything that an archive's directory states before using it."""

import io
import struct
import zipfile
from collections.abc import Callable

from keras_vit._util.integrity import MAX_DIRECTORY_BYTES
from keras_vit.converters.containers.base import DOWNLOAD_AGAIN, quoted, read_exactly
from keras_vit.errors import CheckpointError

MAX_MEMBERS = 100_000  # more tensors than any model has

# An archive may unpack to the larger of this many bytes and this many times its own size. Trained weights hardly
# compress. An archive of zeros beyond that must be stored uncompressed, as all official files are.
MAX_UNPACKED_BYTES = 256 << 20
MAX_UNPACKED_RATIO = 100

# Records of the zip format, PKWARE's APPNOTE.TXT sections 4.3.7 and 4.3.14 to 4.3.16.
_LOCAL = struct.Struct("<4s5H3L2H")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_MAX_COMMENT = 0xFFFF
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 0x1 | 0x40 | 0x2000, 0x8, 0x800  # flag bits; three kinds of encryption
_PATCHED = 0x20  # a difference from another file
_SIZE_IN_EXTRA = 0xFFFFFFFF


def open_archive(
    file: io.RawIOBase, size: int, check_names: Callable[[list[str]], None]
) -> tuple[zipfile.ZipFile, list[tuple[zipfile.ZipInfo, int]]]:
    """Open a zip archive of `size` bytes and check its directory; nothing is unpacked.

    Returns the archive, and every member with the offset of its packed bytes, in the order of the file. `check_names`
    raises a CheckpointError when the names of the members do not fit the kind of file.
    """
    directory, count = find_directory(file, size)
    archive = zipfile.ZipFile(file)
    infos = archive.infolist()
    if len(infos) != count:
        raise CheckpointError(f"names {len(infos)} members but claims to have {count}. {DOWNLOAD_AGAIN}")
    check_names([info.orig_filename for info in infos])
    _check_members(infos, size)
    members, end_of_last = [], 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        start = _data_start(file, info)
        if info.header_offset < end_of_last:
            raise CheckpointError(f"member {quoted(info.filename)} overlaps the one before it.")
        end_of_last = start + info.compress_size
        if end_of_last > directory:
            raise CheckpointError(f"member {quoted(info.filename)} runs past the end of the data.")
        members.append((info, start))
    return archive, members


def find_directory(file: io.RawIOBase, size: int) -> tuple[int, int]:
    """Return the offset of an archive's directory, and how many members it claims to have.

    Both are checked before zipfile reads all of it: the record that ends the archive must end at byte `size`.
    """
    end = _end_record(file, size)
    tail_bytes = _END64.size + _LOCATOR64.size + _END.size
    start = max(0, end + _END.size - tail_bytes)
    file.seek(start)
    tail = read_exactly(file, end + _END.size - start).rjust(tail_bytes, b"\0")
    count: int
    directory_bytes: int
    _, _, _, _, count, directory_bytes, _, _ = _END.unpack(tail[-_END.size :])
    locator, _, end64, _ = _LOCATOR64.unpack_from(tail, _END64.size)
    if locator == b"PK\6\7":
        signature, _, _, _, _, _, _, count, directory_bytes, _ = _END64.unpack_from(tail)
        end += _END.size - tail_bytes
        if signature != b"PK\6\6" or end64 != end:
            raise CheckpointError(f"has a damaged directory. {DOWNLOAD_AGAIN}")
    if count > MAX_MEMBERS or directory_bytes > min(end, MAX_DIRECTORY_BYTES):
        raise CheckpointError(
            f"claims {count} members, named in {directory_bytes} bytes; "
            f"at most {MAX_MEMBERS} members in {MAX_DIRECTORY_BYTES} bytes are read."
        )
    return end - directory_bytes, count


def _end_record(file: io.RawIOBase, size: int) -> int:
    """Return the offset of the record that ends an archive: the one that zipfile finds, with nothing after it."""
    window = min(size, _END.size + _MAX_COMMENT)
    file.seek(size - window)
    tail = read_exactly(file, window)
    place = tail.rfind(b"PK\5\6")
    if place >= 0 and window - place >= _END.size:
        comment_bytes: int
        *_, comment_bytes = _END.unpack_from(tail, place)
        if place + _END.size + comment_bytes == window:
            return size - window + place
    raise CheckpointError(f"does not end as a zip archive does: it was cut short. {DOWNLOAD_AGAIN}")


def _check_members(infos: list[zipfile.ZipInfo], size: int) -> None:
    """Check the directory of an archive of `size` bytes, before anything it points to is read."""
    names: set[str] = set()
    for info in infos:
        name = quoted(info.orig_filename)
        if info.orig_filename in names:
            raise CheckpointError(f"has two members {name}.")
        names.add(info.orig_filename)
        if info.flag_bits & (_ENCRYPTED | _PATCHED):
            raise CheckpointError(f"member {name} is encrypted or a patch.")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CheckpointError(
                f"member {name} is compressed by method {info.compress_type}; "
                "stored (0) and deflated (8) members are read."
            )
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            raise CheckpointError(f"member {name} is stored, yet has two sizes.")
    unpacked = sum(info.file_size for info in infos)
    limit = max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * size)
    if unpacked > limit:
        raise CheckpointError(
            f"{size} bytes claim to unpack to {unpacked}; at most {limit} are unpacked. "
            "If the file is good, save it again uncompressed (an .npz with numpy.savez)."
        )


def _data_start(file: io.RawIOBase, info: zipfile.ZipInfo) -> int:
    """Return the offset of a member's packed bytes, after comparing its local header with the directory."""
    file.seek(info.header_offset)
    record = _LOCAL.unpack(read_exactly(file, _LOCAL.size))
    name_bytes: int
    extra_bytes: int
    signature, _, flags, method, _, _, checksum, packed, unpacked, name_bytes, extra_bytes = record
    name = read_exactly(file, name_bytes).decode("utf-8" if flags & _UTF8 else "cp437")
    later = 0 if flags & _SIZES_FOLLOW else None
    if (
        signature != b"PK\3\4"
        or name != info.orig_filename
        or method != info.compress_type
        or flags & (_ENCRYPTED | _PATCHED)
        or checksum not in (info.CRC, later)
        or packed not in (info.compress_size, later, _SIZE_IN_EXTRA)
        or unpacked not in (info.file_size, later, _SIZE_IN_EXTRA)
    ):
        raise CheckpointError(f"member {quoted(info.filename)} contradicts the directory. {DOWNLOAD_AGAIN}")
    return info.header_offset + _LOCAL.size + name_bytes + extra_bytes
