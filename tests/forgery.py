"""Make valid and false files of tensors, byte by byte."""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STORED, DEFLATED = 0, 8


@dataclass(frozen=True)
class Member:
    """One member of a zip archive and what the archive states about it; None states the truth."""

    name: str
    packed: bytes
    method: int = STORED
    size: int | None = None
    packed_size: int | None = None
    checksum: int | None = None
    flags: int = 0
    offset: int | None = None


def archive(*members: Member) -> bytes:
    """Write a zip archive with all statements of the members."""
    data, directory = b"", b""
    for member in members:
        honest = member.method == DEFLATED and member.size is None
        unpacked = zlib.decompress(member.packed, -15) if honest else member.packed
        size = len(unpacked) if member.size is None else member.size
        packed = len(member.packed) if member.packed_size is None else member.packed_size
        checksum = zlib.crc32(unpacked) if member.checksum is None else member.checksum
        name = member.name.encode()
        about = struct.pack("<5H", 20, member.flags, member.method, 0, 33)
        about += struct.pack("<3L2H", checksum, packed, size, len(name), 0)
        offset = len(data) if member.offset is None else member.offset
        directory += b"PK\1\2\x14\0" + about + struct.pack("<3H2L", 0, 0, 0, 0, offset) + name
        data += b"PK\3\4" + about + name + member.packed
    count = len(members)
    return data + directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), len(data), 0)


def deflate(data: bytes) -> bytes:
    """Compress without zlib's header, as in zip archives."""
    engine = zlib.compressobj(wbits=-15)
    return engine.compress(data) + engine.flush()


def npy(array: np.ndarray) -> bytes:
    """Write a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npy_header(text: str, version: int = 1) -> bytes:
    """Write a .npy header with the given text."""
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text.encode()


def claim(descr: str = "'<f4'", shape: str = "(2,)", fortran: str = "False") -> bytes:
    """Write a .npy header with the given claims."""
    return npy_header(f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}")


def bomb(mebibytes: int, *, told: int | None = None) -> bytes:
    """Make an .npz that unpacks to many zeros: one compressed mebibyte, repeated.

    Args:
        mebibytes: size of the unpacked data.
        told: number of float32 that its header states; by default the true one.
    """
    told = mebibytes << 18 if told is None else told
    header = claim(shape=f"({told},)")
    engine = zlib.compressobj(9, wbits=-15)
    start = engine.compress(header) + engine.flush(zlib.Z_FULL_FLUSH)
    block = engine.compress(bytes(1 << 20)) + engine.flush(zlib.Z_FULL_FLUSH)
    packed = start + block * mebibytes + engine.flush()
    return archive(Member("w.npy", packed, DEFLATED, size=len(header) + 4 * told, checksum=0))


def npz(tensors: dict[str, np.ndarray]) -> bytes:
    """Write an .npz as NumPy does."""
    file = io.BytesIO()
    np.savez(file, **tensors)  # type: ignore[arg-type]  # NumPy's stub has the flag among the names
    return file.getvalue()


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Write a .safetensors file with any header: an object, or its text."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def keras_archive(
    path: Path,
    *,
    config: bytes | None = None,
    model: Mapping[str, Any] | None = None,
    weights: bytes | None = None,
    compression: int = zipfile.ZIP_STORED,
    **outer: Any,
) -> Path:
    """Write a copy of tests/data/saved/model.keras with changes.

    Args:
        path: of the file.
        config: its whole config.json.
        model: fields of its ViTConfig.
        weights: its whole model.weights.h5.
        compression: of all members, as zipfile numbers it.
        **outer: keys of the object in its config.json.
    """
    with zipfile.ZipFile(Path(__file__).parent / "data" / "saved" / "model.keras") as good:
        members = {name: good.read(name) for name in good.namelist()}
    values = json.loads(members["config.json"])
    values["config"]["config"] |= model or {}
    values |= outer
    members["config.json"] = json.dumps(values).encode() if config is None else config
    members["model.weights.h5"] = members["model.weights.h5"] if weights is None else weights
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def entry(begin: Any = 0, end: Any = 8, *, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    """Return one tensor's entry in a .safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
