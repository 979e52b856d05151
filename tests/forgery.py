"""Makes files of tensors, honest ones and others, byte by byte."""

import io
import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

STORED, DEFLATED = 0, 8


@dataclass(frozen=True)
class Member:
    """One member of a zip archive. None tells the truth; `local_*` is what stands before the data."""

    name: str
    packed: bytes
    method: int = STORED
    size: int | None = None
    packed_size: int | None = None
    checksum: int | None = None
    flags: int = 0
    local_name: str | None = None
    local_method: int | None = None
    local_size: int | None = None
    local_flags: int | None = None
    offset: int | None = None


def archive(*members: Member) -> bytes:
    """Writes a zip archive, believing everything the members say."""
    data, directory = b"", b""
    for member in members:
        honest = member.method == DEFLATED and member.size is None
        unpacked = zlib.decompress(member.packed, -15) if honest else member.packed
        size = len(unpacked) if member.size is None else member.size
        packed = len(member.packed) if member.packed_size is None else member.packed_size
        checksum = zlib.crc32(unpacked) if member.checksum is None else member.checksum
        name, local_name = member.name.encode(), (member.local_name or member.name).encode()
        method = member.method if member.local_method is None else member.local_method
        flags = member.flags if member.local_flags is None else member.local_flags
        local_size = size if member.local_size is None else member.local_size
        sizes = struct.pack("<3L2H", checksum, packed, size, len(name), 0)
        local_sizes = struct.pack("<3L2H", checksum, packed, local_size, len(local_name), 0)
        offset = len(data) if member.offset is None else member.offset
        directory += struct.pack("<4s6H", b"PK\1\2", 20, 20, member.flags, member.method, 0, 33) + sizes
        directory += struct.pack("<3H2L", 0, 0, 0, 0, offset) + name
        data += (
            struct.pack("<4s5H", b"PK\3\4", 20, flags, method, 0, 33)
            + local_sizes
            + local_name
            + member.packed
        )
    count = len(members)
    return (
        data
        + directory
        + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), len(data), 0)
    )


def deflate(data: bytes) -> bytes:
    """Compresses without zlib's own header, as zip archives hold it."""
    engine = zlib.compressobj(wbits=-15)
    return engine.compress(data) + engine.flush()


def deflated_zeros(mebibytes: int) -> bytes:
    """Makes as many zeros, compressed, in no time: one compressed mebibyte, repeated."""
    engine = zlib.compressobj(9, wbits=-15)
    block = engine.compress(bytes(1 << 20)) + engine.flush(zlib.Z_FULL_FLUSH)
    return block * mebibytes + engine.flush()


def npy(array: np.ndarray) -> bytes:
    """Writes a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npy_header(text: str, version: int = 1) -> bytes:
    """Writes a .npy header with the given text."""
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack("<H" if version == 1 else "<I", len(text))
        + text.encode()
    )


def claim(descr: str = "'<f4'", shape: str = "(2,)", fortran: str = "False") -> bytes:
    """Writes a .npy header that claims something."""
    return npy_header(f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}")


def npz(tensors: dict[str, np.ndarray]) -> bytes:
    """Writes an .npz as NumPy does."""
    file = io.BytesIO()
    np.savez(file, **tensors)  # type: ignore[arg-type]  # NumPy's stub has the flag among the names
    return file.getvalue()


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Writes a .safetensors file with any header: JSON made of it, or the text itself."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: Any = 0, end: Any = 8, *, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    """Makes one tensor's entry in a .safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
