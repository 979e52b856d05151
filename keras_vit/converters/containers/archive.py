"""Check untrusted zip files: limit what the directory of an archive claims before zipfile and NumPy trust it.

`open_keras_archive` checks what Keras' `model.save("vit.keras")` writes, before anything is built from it.
"""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

from keras_vit._util.untrusted import MAX_DIRECTORY_BYTES, MAX_JSON_BYTES, parse_object
from keras_vit.converters.containers.base import DOWNLOAD_AGAIN, quoted, read_exactly, reading
from keras_vit.converters.containers.hdf5 import Hdf5Container
from keras_vit.errors import CheckpointError

# An archive may unpack to the larger of this many bytes and this many times its own size. Trained weights hardly
# compress. An archive of zeros beyond that must be stored uncompressed, as all official files are.
MAX_UNPACKED_BYTES = 256 << 20
MAX_UNPACKED_RATIO = 100

# Sections 4.3.7 and 4.3.16 of the zip format, PKWARE's APPNOTE.TXT.
_LOCAL_HEADER_BYTES = 30  # before the member's name
_LENGTHS_AT = 26  # of the name and of the extra field, in the local header
_END = struct.Struct("<4s6xH8xH")  # signature, members (65,535: more than 16 bits hold), bytes of the comment

_METADATA, _CONFIG, _WEIGHTS = "metadata.json", "config.json", "model.weights.h5"  # members of a .keras file


class LimitedFile(io.FileIO):
    """A file of which no more than MAX_DIRECTORY_BYTES are read at once, as zipfile reads a directory."""

    def read(self, count: int | None = -1, /) -> bytes:
        """Read `count` bytes; raise a CheckpointError for too many."""
        if count is not None and count > MAX_DIRECTORY_BYTES:
            raise CheckpointError(f"names its members in {count} bytes; at most {MAX_DIRECTORY_BYTES} are read.")
        return super().read(count) or b""


def open_archive(file: LimitedFile, size: int) -> zipfile.ZipFile:
    """Open a zip archive of `size` bytes and check its directory; nothing is unpacked.

    zipfile compares the local header of a member with the directory, and its contents with the checksum, when the
    member is read.
    """
    archive = zipfile.ZipFile(file)
    infos = archive.infolist()
    file.seek(size - _END.size - len(archive.comment))
    signature, count, comment_bytes = _END.unpack(read_exactly(file, _END.size))
    if (signature, comment_bytes) != (b"PK\5\6", len(archive.comment)) or count not in (len(infos), 0xFFFF):
        raise CheckpointError(f"has a damaged directory: it was cut short. {DOWNLOAD_AGAIN}")
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


def open_keras_archive(path: Path) -> tuple[dict[str, Any], Hdf5Container]:
    """Return the object in the config.json of a .keras file, and its model.weights.h5 as an open container."""
    with reading(path), LimitedFile(path) as file:
        archive = open_archive(file, path.stat().st_size)
        names = {info.orig_filename for info in archive.infolist()}
        if names - {_METADATA} != {_CONFIG, _WEIGHTS}:
            known = [_METADATA, _CONFIG, _WEIGHTS]
            missing = [name for name in known[1:] if name not in names]
            wrong = f"no member {missing[0]!r}" if missing else f"a member {quoted(min(names.difference(known)))}"
            raise CheckpointError(f"has {wrong}; a .keras file of keras_vit has {known}.")
        weights = archive.getinfo(_WEIGHTS)
        if weights.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError("has compressed weights, which Keras does not write. Save the model again.")
        archive.open(weights).close()  # compares the local header with the directory
        file.seek(weights.header_offset + _LENGTHS_AT)
        lengths = struct.unpack("<HH", read_exactly(file, 4))
        start = weights.header_offset + _LOCAL_HEADER_BYTES + sum(lengths)
        if (config_bytes := archive.getinfo(_CONFIG).file_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"has a config.json of {config_bytes:,} bytes; the limit is {MAX_JSON_BYTES:,}.")
        try:
            config = parse_object(archive.read(_CONFIG))
        except ValueError as error:
            raise CheckpointError(f"has a config.json that {error}") from error
    return config, Hdf5Container(path, start=start, size=weights.file_size)
