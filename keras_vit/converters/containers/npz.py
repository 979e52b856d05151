"""NumPy's .npz, a zip archive with one .npy file a tensor: read without trusting it, and written."""

import ast
import contextlib
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from keras_vit._util.atomic import replacing
from keras_vit.converters.containers.archive import check_directory, check_name, data_start, find_directory
from keras_vit.converters.containers.base import ITEM_BYTES, Container, Header, decoded, read_exactly, read_into
from keras_vit.converters.containers.errors import AGAIN, shown
from keras_vit.errors import CheckpointError

_MAX_NPY_HEADER = 10_000  # NumPy's own limit; a longer literal could exhaust Python's parser

# Elements of a .npy "descr", less the byte order. NumPy has no bfloat16: it saves two opaque bytes.
_NPY_TYPES = {
    "f8": "float64",
    "f4": "float32",
    "f2": "float16",
    "V2": "bfloat16",
    "i8": "int64",
    "i4": "int32",
    "i2": "int16",
    "i1": "int8",
    "u8": "uint64",
    "u4": "uint32",
    "u2": "uint16",
    "u1": "uint8",
    "b1": "bool",
    "O": "object",
    "O8": "object",
}


class _Member(NamedTuple):
    info: zipfile.ZipInfo
    start: int  # of its packed bytes in the file
    preamble: int  # bytes of .npy header before the tensor
    byteorder: Literal["<", ">"]
    order: Literal["C", "F"]


class NpzContainer(Container):
    """An .npz archive, open for reading. Pickled members are listed and never read."""

    def _read_headers(self, size: int) -> None:
        directory, count = find_directory(self._file, size)
        self._archive = zipfile.ZipFile(self._file)
        self.metadata = _noted(self._archive.comment)
        infos = self._archive.infolist()
        check_directory(infos, count, size)
        self._members: dict[str, _Member] = {}
        end_of_last = 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            start = data_start(self._file, info)
            if info.header_offset < end_of_last:
                raise CheckpointError(f"member {shown(info.filename)} overlaps the one before it.")
            end_of_last = start + info.compress_size
            if end_of_last > directory:
                raise CheckpointError(f"member {shown(info.filename)} runs past the end of the data.")
            self._add(info, start)

    def _add(self, info: zipfile.ZipInfo, start: int) -> None:
        name = info.filename.removesuffix(".npy")
        with self._unpacking(info, start) as stream:
            descr, order, shape, preamble = _npy_header(stream, name)
        byteorder, kind = (descr[0], descr[1:]) if descr[0] in "<>|=" else ("=", descr)
        header = Header(name, shape, _NPY_TYPES.get(kind, descr))
        if header.dtype in ITEM_BYTES and header.bytes != info.file_size - preamble:
            raise CheckpointError(
                f"tensor {shown(name)} claims {header.bytes} bytes (shape {str(shape)[:200]}, "
                f"{header.dtype}) but the archive holds {info.file_size - preamble} for it."
            )
        self.headers[name] = header
        self._members[name] = _Member(info, start, preamble, ">" if byteorder == ">" else "<", order)

    def _read_tensor(self, header: Header) -> np.ndarray:
        member = self._members[header.name]
        with self._unpacking(member.info, member.start) as stream:
            checksum = zlib.crc32(read_exactly(stream, member.preamble))
            data = read_into(stream, header.bytes)
        if zlib.crc32(data.data, checksum) != member.info.CRC:
            raise CheckpointError(f"tensor {shown(header.name)} is damaged: its checksum differs. {AGAIN}")
        return decoded(data, header, member.byteorder, member.order)

    def _unpacking(
        self, info: zipfile.ZipInfo, start: int
    ) -> contextlib.AbstractContextManager[io.RawIOBase | io.BufferedIOBase]:
        if info.compress_type == zipfile.ZIP_STORED:  # past zipfile, which would copy each byte once more
            self._file.seek(start)
            return contextlib.nullcontext(self._file)
        return self._archive.open(info)  # type: ignore[return-value]  # typeshed says IO[bytes]


def _npy_header(
    stream: io.RawIOBase | io.BufferedIOBase, name: str
) -> tuple[str, Literal["C", "F"], tuple[int, ...], int]:
    """Reads a .npy header: type, order, shape, and its own length (specified in numpy.lib.format)."""
    magic = read_exactly(stream, 8)
    if magic[:6] != b"\x93NUMPY" or magic[6:] not in (b"\1\0", b"\2\0", b"\3\0"):
        raise CheckpointError(f"member {shown(name)} is no .npy array. {AGAIN}")
    length_format = "<H" if magic[6] == 1 else "<I"
    length_bytes = struct.calcsize(length_format)
    (length,) = struct.unpack(length_format, read_exactly(stream, length_bytes))
    if length > _MAX_NPY_HEADER:
        raise CheckpointError(f"tensor {shown(name)} has a header of {length} bytes, over {_MAX_NPY_HEADER}.")
    text = read_exactly(stream, length).decode("utf-8" if magic[6] == 3 else "latin1")
    match ast.literal_eval(text):
        case {"descr": descr, "fortran_order": bool(fortran), "shape": tuple(shape), **rest} if not rest:
            if not all(type(size) is int and size >= 0 for size in shape):
                raise CheckpointError(f"tensor {shown(name)} has the impossible shape {str(shape)[:200]}.")
            kind = descr if isinstance(descr, str) and descr else str(descr)  # a list: a structured type
            return kind, "F" if fortran else "C", shape, len(magic) + length_bytes + length
    raise CheckpointError(f"tensor {shown(name)} has no valid .npy header: {shown(text)}.")


def _noted(comment: bytes) -> dict[str, str]:
    """The metadata that `write_npz` puts into the archive's comment; any other comment is nobody's business here."""
    if not comment.startswith(b"{"):
        return {}
    metadata = json.loads(comment)
    if not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError("has a comment that is no table of texts.")
    return dict(metadata)


def write_npz(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Writes an uncompressed .npz as `numpy.savez` does; the same tensors always make the same bytes.

    Args:
        path: The file to write; it appears whole or not at all.
        tensors: Arrays by name, or pairs that may be made one at a time: no more than one is held.
            bfloat16 arrays (ml_dtypes) are written as NumPy does, as two opaque bytes an element.
        metadata: Texts to carry along in the archive's comment, which NumPy passes over; under 64 KiB.

    Returns:
        `path`.

    Raises:
        ValueError: A name is given twice or is none that can be read back, or a type is none that can.
    """
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    with replacing(Path(path)) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in pairs:
            _write_member(archive, f"{name}.npy", np.asarray(array))
            del array  # before the next one is made
        if metadata:
            archive.comment = json.dumps(dict(metadata)).encode()
    return Path(path)


def _write_member(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    check_name(name)
    if name in archive.NameToInfo:
        raise ValueError(f"Two tensors are named {shown(name)}.")
    if array.dtype.name not in ITEM_BYTES:
        raise ValueError(f"Tensor {shown(name)} is {array.dtype}. Types written: {', '.join(ITEM_BYTES)}.")
    info = zipfile.ZipInfo(name)  # dated 1980-01-01: the same tensors make the same file
    info.create_system, info.external_attr = 3, 0o600 << 16  # on any system as numpy.savez does on Unix
    info.file_size = array.nbytes + _MAX_NPY_HEADER  # a bound by which zipfile chooses 32 or 64 bits
    with archive.open(info, "w") as stream:
        plain = array.view("V2") if array.dtype.name == "bfloat16" else array
        np.lib.format.write_array(stream, plain, allow_pickle=False)
