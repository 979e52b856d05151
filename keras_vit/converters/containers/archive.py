"""Check untrusted zip files: limit what the directory of an archive claims before zipfile and NumPy trust it."""

import io
import struct
import zipfile

from keras_vit._util.untrusted import MAX_DIRECTORY_BYTES
from keras_vit.converters.containers.base import DOWNLOAD_AGAIN, quoted, read_exactly
from keras_vit.errors import CheckpointError

# An archive may unpack to the larger of this many bytes and this many times its own size. Trained weights hardly
# compress. An archive of zeros beyond that must be stored uncompressed, as all official files are.
MAX_UNPACKED_BYTES = 256 << 20
MAX_UNPACKED_RATIO = 100

# Records of the zip format, PKWARE's APPNOTE.TXT sections 4.3.7 and 4.3.14 to 4.3.16.
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_MAX_COMMENT = 0xFFFF
_LOCAL_HEADER_BYTES = 30  # before the member's name
_LENGTHS_AT = 26  # of the name and of the extra field, in the local header


def open_archive(file: io.RawIOBase, size: int) -> zipfile.ZipFile:
    """Open a zip archive of `size` bytes and check its directory; nothing is unpacked.

    zipfile compares the local header of a member with the directory, and its contents with the checksum, when the
    member is read.
    """
    count = _check_directory(file, size)
    archive = zipfile.ZipFile(file)
    infos = archive.infolist()
    if len(infos) != count:
        raise CheckpointError(f"names {len(infos)} members but claims to have {count}. {DOWNLOAD_AGAIN}")
    names: set[str] = set()
    for info in infos:
        name = quoted(info.orig_filename)
        if info.orig_filename in names:
            raise CheckpointError(f"has two members {name}.")
        names.add(info.orig_filename)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CheckpointError(
                f"member {name} is compressed by method {info.compress_type}; "
                "stored (0) and deflated (8) members are read."
            )
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            raise CheckpointError(f"member {name} is stored, yet has two sizes.")
        if info.header_offset + info.compress_size > size:
            raise CheckpointError(f"member {name} runs past the end of the file: it was cut short. {DOWNLOAD_AGAIN}")
    unpacked = sum(info.file_size for info in infos)
    limit = max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * size)
    if unpacked > limit:
        raise CheckpointError(
            f"{size} bytes claim to unpack to {unpacked}; at most {limit} are unpacked. "
            "If the file is good, save it again uncompressed (an .npz with numpy.savez)."
        )
    return archive


def data_start(archive: zipfile.ZipFile, file: io.RawIOBase, info: zipfile.ZipInfo) -> int:
    """Return the offset of a member's packed bytes in the file."""
    archive.open(info).close()  # compares the local header with the directory
    file.seek(info.header_offset + _LENGTHS_AT)
    name_bytes, extra_bytes = struct.unpack("<HH", read_exactly(file, 4))
    return info.header_offset + _LOCAL_HEADER_BYTES + int(name_bytes) + int(extra_bytes)


def _check_directory(file: io.RawIOBase, size: int) -> int:
    """Check the size of an archive's directory before zipfile reads it; return how many members it claims to have."""
    end = _end_record(file, size)
    tail_bytes = _END64.size + _LOCATOR64.size + _END.size
    start = max(0, end + _END.size - tail_bytes)
    file.seek(start)
    tail = read_exactly(file, end + _END.size - start).rjust(tail_bytes, b"\0")
    count: int
    directory_bytes: int
    *_, count, directory_bytes, _, _ = _END.unpack(tail[-_END.size :])
    locator, _, end64, _ = _LOCATOR64.unpack_from(tail, _END64.size)
    if locator == b"PK\6\7":
        signature, *_, count, directory_bytes, _ = _END64.unpack_from(tail)
        end += _END.size - tail_bytes
        if signature != b"PK\6\6" or end64 != end:
            raise CheckpointError(f"has a damaged directory. {DOWNLOAD_AGAIN}")
    if directory_bytes > min(end, MAX_DIRECTORY_BYTES):
        raise CheckpointError(
            f"names its members in {directory_bytes} bytes; at most {min(end, MAX_DIRECTORY_BYTES)} are read."
        )
    return count


def _end_record(file: io.RawIOBase, size: int) -> int:
    """Return the offset of the record that ends an archive: the one that zipfile finds, with nothing after it."""
    window = min(size, _END.size + _MAX_COMMENT)
    file.seek(size - window)
    tail = read_exactly(file, window)
    place = tail.rfind(b"PK\5\6")
    if place >= 0 and window - place >= _END.size:
        *_, comment_bytes = _END.unpack_from(tail, place)
        if place + _END.size + comment_bytes == window:
            return size - window + place
    raise CheckpointError(f"does not end as a zip archive does: it was cut short. {DOWNLOAD_AGAIN}")
