"""Zip archives of strangers: everything an archive says of itself is checked before it is acted upon."""

import io
import struct
import zipfile

from keras_vit.converters.containers.base import MAX_DIRECTORY_BYTES, read_exactly
from keras_vit.converters.containers.errors import AGAIN, shown
from keras_vit.errors import CheckpointError

MAX_MEMBERS = 100_000
"""More tensors than any model has."""

MAX_UNPACKED_BYTES = 256 << 20
MAX_UNPACKED_RATIO = 100
"""An archive may unpack to the larger of this many bytes and this many times its own size. Trained weights
hardly compress; an archive of zeros beyond that must be stored uncompressed, as all official files are."""

# Records of the zip format, PKWARE's APPNOTE.TXT sections 4.3.7 and 4.3.14 to 4.3.16.
_LOCAL = struct.Struct("<4s5H3L2H")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_MAX_COMMENT = 0xFFFF
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 0x1, 0x8, 0x800  # flag bits
_SIZE_IN_EXTRA = 0xFFFFFFFF

_FOREIGN_MEMBERS = {  # zip archives of other trades, by the last part of a member's name
    "data.pkl": "a PyTorch file of an unknown kind (a pickle, which is never read): save its tensors as .safetensors",
    "model.weights.h5": "a .keras file, no checkpoint: converters.load opens it as a model",
    "[Content_Types].xml": "an office document",
}


def find_directory(file: io.RawIOBase, size: int) -> tuple[int, int]:
    """Finds an archive's directory and bounds its size, before zipfile reads all of it.

    Args:
        file: The archive; the record that ends it, with its comment, must be its last bytes.
        size: Its size in bytes.

    Returns:
        Where the directory starts, and how many members it says it names.
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
            raise CheckpointError(f"has a damaged directory. {AGAIN}")
    if count > MAX_MEMBERS or directory_bytes > min(end, MAX_DIRECTORY_BYTES):
        raise CheckpointError(
            f"claims {count} members, named in {directory_bytes} bytes; "
            f"at most {MAX_MEMBERS} members in {MAX_DIRECTORY_BYTES} bytes are read."
        )
    return end - directory_bytes, count


def _end_record(file: io.RawIOBase, size: int) -> int:
    """Where the record starts that ends an archive: the one that zipfile will find, with nothing after its comment."""
    window = min(size, _END.size + _MAX_COMMENT)
    file.seek(size - window)
    tail = read_exactly(file, window)
    place = tail.rfind(b"PK\5\6")
    if place < 0 or window - place < _END.size:
        raise CheckpointError(f"does not end as an archive does: it was cut short. {AGAIN}")
    comment_bytes: int
    *_, comment_bytes = _END.unpack_from(tail, place)
    if place + _END.size + comment_bytes != window:
        raise CheckpointError(f"does not end as an archive does: it was cut short. {AGAIN}")
    return size - window + place


def check_directory(infos: list[zipfile.ZipInfo], count: int, size: int) -> None:
    """Checks what the directory of an archive of `size` bytes says, before anything it points to is read."""
    if len(infos) != count:
        raise CheckpointError(f"names {len(infos)} members but claims to have {count}. {AGAIN}")
    for info in infos:
        if foreign := _FOREIGN_MEMBERS.get(info.orig_filename.rpartition("/")[2]):
            raise CheckpointError(f"is {foreign}.")
    names: set[str] = set()
    for info in infos:
        check_name(info.orig_filename)
        if info.orig_filename in names:
            raise CheckpointError(f"has two members {shown(info.orig_filename)}.")
        names.add(info.orig_filename)
        if info.flag_bits & _ENCRYPTED:
            raise CheckpointError(f"member {shown(info.filename)} is encrypted.")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CheckpointError(
                f"member {shown(info.filename)} is compressed by method {info.compress_type}; "
                f"stored (0) and deflated (8) members are read."
            )
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            raise CheckpointError(f"member {shown(info.filename)} is stored, yet has two sizes.")
    unpacked = sum(info.file_size for info in infos)
    limit = max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * size)
    if unpacked > limit:
        raise CheckpointError(
            f"{size} bytes claim to unpack to {unpacked}; at most {limit} are unpacked. "
            f"If the file is good, save it again uncompressed (numpy.savez)."
        )


def check_name(name: str) -> None:
    """Refuses a member that no .npz has. (No name is used as a path here; others may unpack the file.)"""
    if not name.endswith(".npy"):
        raise CheckpointError(f"has a member {shown(name)}, which is no .npy array, so it is no .npz.")
    if name.startswith("/") or "\\" in name or not name.isprintable() or ".." in name.split("/"):
        raise CheckpointError(f"has a member {shown(name)}, which is a path and no tensor name.")


def data_start(file: io.RawIOBase, info: zipfile.ZipInfo) -> int:
    """Returns where a member's bytes start, after comparing its local header with the archive's directory."""
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
        or flags & _ENCRYPTED
        or checksum not in (info.CRC, later)
        or packed not in (info.compress_size, later, _SIZE_IN_EXTRA)
        or unpacked not in (info.file_size, later, _SIZE_IN_EXTRA)
    ):
        raise CheckpointError(f"member {shown(info.filename)} contradicts the directory. {AGAIN}")
    return info.header_offset + _LOCAL.size + name_bytes + extra_bytes
