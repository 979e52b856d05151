"""Read and write NumPy's .npz, a zip archive with one .npy file for each tensor. Files are not trusted."""

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
from keras_vit.converters.containers.archive import open_archive
from keras_vit.converters.containers.base import (
    DOWNLOAD_AGAIN,
    ITEM_BYTES,
    Container,
    Header,
    decoded,
    quoted,
    read_exactly,
    read_into,
)
from keras_vit.errors import CheckpointError

_MAX_NPY_HEADER = 10_000  # NumPy's own limit; a longer literal could exhaust Python's parser

# Last part of a member's name -> kind of zip archive that has such a member.
_FOREIGN_MEMBERS = {
    "data.pkl": "a PyTorch file of an unknown kind (a pickle, which is never read): save its tensors as .safetensors",
    "model.weights.h5": "a .keras file, which is a model: converters.load opens it by its suffix .keras",
    "[Content_Types].xml": "an office document",
}

# Types in a .npy header, without the byte order. NumPy has no bfloat16: it saves two opaque bytes.
_NPY_TYPES = {np.dtype(name).str[1:]: name for name in ITEM_BYTES if name != "bfloat16"}
_NPY_TYPES |= {"V2": "bfloat16", "O": "object", "O8": "object"}


class _Member(NamedTuple):
    info: zipfile.ZipInfo
    start: int  # offset of its packed bytes in the file
    preamble: int  # bytes of the .npy header before the tensor
    byteorder: Literal["<", ">"]
    order: Literal["C", "F"]


class NpzContainer(Container):
    """An .npz archive, open for reading. Pickled members are listed and never read."""

    def _read_headers(self, size: int) -> None:
        self._archive, members = open_archive(self._file, size, _check_names)
        self.metadata = _metadata(self._archive.comment)
        self._members: dict[str, _Member] = {}
        for info, start in members:
            self._add(info, start)

    def _add(self, info: zipfile.ZipInfo, start: int) -> None:
        name = info.filename.removesuffix(".npy")
        with self._unpacking(info, start) as stream:
            descr, order, shape, preamble = _npy_header(stream, name)
        byteorder, kind = (descr[0], descr[1:]) if descr[0] in "<>|=" else ("=", descr)
        header = Header(name, shape, _NPY_TYPES.get(kind, descr))
        if header.dtype in ITEM_BYTES and header.bytes != info.file_size - preamble:
            raise CheckpointError(
                f"tensor {quoted(name)} claims {header.bytes} bytes (shape {str(shape)[:200]}, "
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
            raise CheckpointError(f"tensor {quoted(header.name)} is damaged: its checksum differs. {DOWNLOAD_AGAIN}")
        return decoded(data, header, member.byteorder, member.order)

    def _unpacking(
        self, info: zipfile.ZipInfo, start: int
    ) -> contextlib.AbstractContextManager[io.RawIOBase | io.BufferedIOBase]:
        if info.compress_type == zipfile.ZIP_STORED:  # without zipfile, which would copy each byte once more
            self._file.seek(start)
            return contextlib.nullcontext(self._file)
        return self._archive.open(info)  # type: ignore[return-value]  # typeshed says IO[bytes]


def _npy_header(
    stream: io.RawIOBase | io.BufferedIOBase, name: str
) -> tuple[str, Literal["C", "F"], tuple[int, ...], int]:
    """Read a .npy header (numpy.lib.format): type, order, shape, and the header's own length."""
    magic = read_exactly(stream, 8)
    if magic[:6] != b"\x93NUMPY" or magic[6:] not in (b"\1\0", b"\2\0", b"\3\0"):
        raise CheckpointError(f"member {quoted(name)} is not a .npy array. {DOWNLOAD_AGAIN}")
    length_format = "<H" if magic[6] == 1 else "<I"
    length_bytes = struct.calcsize(length_format)
    (length,) = struct.unpack(length_format, read_exactly(stream, length_bytes))
    if length > _MAX_NPY_HEADER:
        raise CheckpointError(f"tensor {quoted(name)} has a header of {length} bytes, over {_MAX_NPY_HEADER}.")
    text = read_exactly(stream, length).decode("utf-8" if magic[6] == 3 else "latin1")
    match ast.literal_eval(text):
        case {"descr": descr, "fortran_order": bool(fortran), "shape": tuple(shape), **rest} if not rest:
            if not all(type(size) is int and size >= 0 for size in shape):
                raise CheckpointError(f"tensor {quoted(name)} has the impossible shape {str(shape)[:200]}.")
            kind = descr if isinstance(descr, str) and descr else str(descr)  # a list: a structured type
            return kind, "F" if fortran else "C", shape, len(magic) + length_bytes + length
    raise CheckpointError(f"tensor {quoted(name)} has no valid .npy header: {quoted(text)}.")


def _check_names(names: list[str]) -> None:
    for name in names:
        if foreign := _FOREIGN_MEMBERS.get(name.rpartition("/")[2]):
            raise CheckpointError(f"is {foreign}.")
    for name in names:
        _check_name(name)


def _check_name(name: str) -> None:
    """Raise for a name that no .npz has. (No name is used as a path here, but other programs may unpack the file.)"""
    if not name.endswith(".npy"):
        raise CheckpointError(f"has a member {quoted(name)}, which is not a .npy array, so the file is not an .npz.")
    if name.startswith("/") or "\\" in name or not name.isprintable() or ".." in name.split("/"):
        raise CheckpointError(f"has a member {quoted(name)}, which is a path and not a tensor's name.")


def _metadata(comment: bytes) -> dict[str, str]:
    """Return the metadata that `write_npz` put into an archive's comment; comments of other programs are ignored."""
    if not comment.startswith(b"{"):
        return {}
    metadata = json.loads(comment)
    if not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError("has a comment that is not an object of texts.")
    return dict(metadata)


def write_npz(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write an uncompressed .npz as `numpy.savez` does; the same tensors always give the same bytes.

    Args:
        path: the file to write; it appears complete or not at all.
        tensors: arrays by name, or pairs of both; from an iterator, only one is in memory at a time.
            bfloat16 arrays (ml_dtypes) are written as NumPy does, as two opaque bytes per element.
        metadata: texts for the archive's comment, which NumPy ignores; less than 64 KiB.
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
    _check_name(name)
    if name in archive.NameToInfo:
        raise ValueError(f"Two tensors are named {quoted(name)}.")
    if array.dtype.name not in ITEM_BYTES:
        raise ValueError(f"Tensor {quoted(name)} is {array.dtype}. Types written: {', '.join(ITEM_BYTES)}.")
    info = zipfile.ZipInfo(name)  # dated 1980-01-01: the same tensors make the same file
    info.create_system, info.external_attr = 3, 0o600 << 16  # on any system as numpy.savez does on Unix
    info.file_size = array.nbytes + _MAX_NPY_HEADER  # an upper bound; zipfile chooses 32 or 64 bits by it
    with archive.open(info, "w") as stream:
        raw = array.view("V2") if array.dtype.name == "bfloat16" else array
        np.lib.format.write_array(stream, raw, allow_pickle=False)
