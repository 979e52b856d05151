"""Read HDF5 files as Keras writes them (.weights.h5), without the HDF5 library.

That C library follows every pointer in a file: a crafted file can crash the process or take all of its memory. Keras
uses a small part of the format, groups and contiguous arrays. Only that part is read, by the HDF5 File Format
Specification (version 3.0); everything else is refused.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from keras_vit._util.integrity import MAX_DIRECTORY_BYTES
from keras_vit.converters.containers.base import (
    ITEM_BYTES,
    Container,
    Header,
    decoded,
    read_exactly,
    read_into,
)
from keras_vit.converters.containers.guard import DOWNLOAD_AGAIN, quoted
from keras_vit.errors import CheckpointError

MAGIC = b"\x89HDF\r\n\x1a\n"
# Characters in the path of an object. With the limit on the directory's bytes this bounds the memory of all names.
MAX_PATH_LENGTH = 256

_ADVICE = "Files that h5py writes with its default settings, as Keras does, can be read."

# Section II.A, version 0: offsets and lengths of 8 bytes, base address, end of the file, header of the root group.
_SUPERBLOCK = struct.Struct("<8s5B2BB2HIQ8xQ8x8xQ24x")
_OBJECT = struct.Struct("<BxHII4x")  # IV.A.1.a: version, messages, references, bytes
_MESSAGE = struct.Struct("<HHB3x")  # type, bytes, flags
_TREE = struct.Struct("<4sBBH16x")  # III.A.1: signature, node type, level, entries
_HEAP = struct.Struct("<4sB3xQ8xQ")  # III.D: signature, version, bytes, address
_NODE = struct.Struct("<4sBxH")  # III.B: signature, version, entries
_SYMBOL = struct.Struct("<QQI4x16x")  # III.C: offset of the name, header of the object, kind of what is cached
_SOFT_LINK = 2
_SHARED = 0x2  # flag of a message that lies elsewhere

# Section IV.A.2, by type of message.
_SPACE, _TYPE, _LAYOUT, _CONTINUATION, _SYMBOLS = 0x1, 0x3, 0x8, 0x10, 0x11
_REFUSED = {
    0x2: "has links of the newer kind",
    0x6: "has links of the newer kind",
    0x7: "keeps its data in another file",
    0xB: "is packed by a filter",
}

# IV.A.2.d: class bits, bytes, bit offset, precision, exponent offset and bits, mantissa offset and bits, exponent bias.
_FLOATS = {
    (0x0F20, 2, 0, 16, 10, 5, 0, 10, 15): "float16",
    (0x0F20, 2, 0, 16, 7, 8, 0, 7, 127): "bfloat16",
    (0x1F20, 4, 0, 32, 23, 8, 0, 23, 127): "float32",
    (0x3F20, 8, 0, 64, 52, 11, 0, 52, 1023): "float64",
}

_ByteOrder = Literal["<", ">"]


class _Place(NamedTuple):
    start: int
    byteorder: _ByteOrder


class Hdf5Container(Container):
    """An HDF5 file of plain arrays, open for reading; their names are their paths, "layers/dense/vars/0"."""

    def __init__(self, path: Path, *, start: int = 0, size: int | None = None) -> None:
        """Open an HDF5 file, or one of `size` bytes that begins at offset `start` of another file."""
        self._start, self._size = start, size or path.stat().st_size
        super().__init__(path)

    def _read_headers(self, size: int) -> None:
        self._directory_bytes = 0
        self._used: dict[int, int] = {}  # start -> end of every piece of the file that was referred to
        self._places: dict[str, _Place] = {}
        objects = [("", self._root())]
        while objects:
            path, address = objects.pop()
            if len(path) > MAX_PATH_LENGTH:
                raise CheckpointError(f"has an object with a path of {len(path)} characters. {_ADVICE}")
            messages = self._messages(path, address)
            if _SYMBOLS in messages:
                objects += [(f"{path}/{name}".lstrip("/"), child) for name, child in self._members(messages[_SYMBOLS])]
            elif {_SPACE, _TYPE, _LAYOUT} <= messages.keys():
                self._add(path, messages)
            else:
                raise CheckpointError(f"{quoted(path)} is neither a group nor an array. {DOWNLOAD_AGAIN}")
        self._check_overlaps()

    def _read_tensor(self, header: Header) -> np.ndarray:
        start, byteorder = self._places[header.name]
        self._file.seek(self._start + start if header.bytes else 0)
        return decoded(read_into(self._file, header.bytes), header, byteorder)

    def _root(self) -> int:
        """Return the offset of the root group's header."""
        magic, version, *_, offsets, lengths, _, _, _, _, base, end, root = _SUPERBLOCK.unpack(
            self._piece(0, _SUPERBLOCK.size)
        )
        if magic != MAGIC or version != 0 or (offsets, lengths, base) != (8, 8, 0):
            raise CheckpointError(f"is an HDF5 file of a kind that Keras does not write. {_ADVICE}")
        if end > self._size:
            raise CheckpointError(f"has {self._size} bytes of {end}: it was cut short. {DOWNLOAD_AGAIN}")
        return int(root)

    def _messages(self, path: str, address: int) -> dict[int, bytes]:
        """Return the messages in an object's header, by type."""
        version, _, _, length = _OBJECT.unpack(self._piece(address, _OBJECT.size))
        if version != 1:
            raise CheckpointError(f"{quoted(path)} has a header of version {version}. {_ADVICE}")
        found: dict[int, bytes] = {}
        blocks = [(address + _OBJECT.size, length)]
        for start, length in blocks:  # grows while it is read
            data = self._piece(start, length)
            at = 0
            while at + _MESSAGE.size <= length:
                kind, count, flags = _MESSAGE.unpack_from(data, at)
                at += _MESSAGE.size + count
                body = data[at - count : at]
                if kind == _CONTINUATION:
                    blocks.append(struct.unpack("<QQ", body))
                elif kind in _REFUSED:
                    raise CheckpointError(f"{quoted(path)} {_REFUSED[kind]}. {_ADVICE}")
                elif kind in (_SPACE, _TYPE, _LAYOUT, _SYMBOLS):
                    if kind in found or flags & _SHARED or at > length:
                        raise CheckpointError(f"{quoted(path)} has a damaged header. {DOWNLOAD_AGAIN}")
                    found[kind] = body
        return found

    def _members(self, symbols: bytes) -> Iterator[tuple[str, int]]:
        """Yield the name and the header's offset of every object in a group."""
        tree, heap = struct.unpack("<QQ", symbols)
        names = self._names(heap)
        nodes = [tree]
        for address in nodes:  # grows while it is read
            signature, kind, level, count = _TREE.unpack(self._piece(address, _TREE.size))
            if (signature, kind) != (b"TREE", 0):
                raise CheckpointError(f"has a damaged tree of names. {DOWNLOAD_AGAIN}")
            children = [child for _, child in struct.iter_unpack("<QQ", self._piece(address + _TREE.size, 16 * count))]
            if level:
                nodes += children
            else:
                yield from (entry for child in children for entry in self._symbols(child, names))

    def _symbols(self, address: int, names: bytes) -> Iterator[tuple[str, int]]:
        signature, version, count = _NODE.unpack(self._piece(address, _NODE.size))
        if (signature, version) != (b"SNOD", 1):
            raise CheckpointError(f"has a damaged table of names. {DOWNLOAD_AGAIN}")
        for start, header, cached in _SYMBOL.iter_unpack(self._piece(address + _NODE.size, _SYMBOL.size * count)):
            name = names[start : names.index(b"\0", start, start + MAX_PATH_LENGTH)].decode()
            if not name or "/" in name:
                raise CheckpointError(f"has an object named {quoted(name)}. {DOWNLOAD_AGAIN}")
            if cached == _SOFT_LINK:
                raise CheckpointError(f"{quoted(name)} is a link, which is never followed.")
            yield name, header

    def _names(self, address: int) -> bytes:
        signature, version, length, start = _HEAP.unpack(self._piece(address, _HEAP.size))
        if (signature, version) != (b"HEAP", 0):
            raise CheckpointError(f"has a damaged heap of names. {DOWNLOAD_AGAIN}")
        return self._piece(start, length)

    def _add(self, path: str, messages: dict[int, bytes]) -> None:
        dtype, byteorder = _type(messages[_TYPE])
        header = Header(path, _shape(path, messages[_SPACE]), dtype)
        version, kind, start, length = struct.unpack("<BBQQ", messages[_LAYOUT][:18].ljust(18, b"\0"))
        if (version, kind) != (3, 1):
            raise CheckpointError(f"tensor {quoted(path)} is not contiguous. {_ADVICE}")
        if dtype in ITEM_BYTES and header.bytes != length:
            raise CheckpointError(
                f"tensor {quoted(path)} claims {header.bytes} bytes (shape {str(header.shape)[:200]}, {dtype}) "
                f"but the file holds {length} for it."
            )
        self._mark_used(start, length)
        self.headers[path] = header
        self._places[path] = _Place(start, byteorder)

    def _piece(self, start: int, count: int) -> bytes:
        """Read a piece of the directory."""
        self._directory_bytes += count
        if self._directory_bytes > MAX_DIRECTORY_BYTES:
            raise CheckpointError(f"names its tensors in more than {MAX_DIRECTORY_BYTES} bytes.")
        self._mark_used(start, count)
        self._file.seek(self._start + start if count else 0)
        return read_exactly(self._file, count)

    def _mark_used(self, start: int, count: int) -> None:
        """Record a piece of the file as used; a second use of the same place is a loop or a false pointer."""
        if not count:  # an empty piece may be anywhere
            return
        if start + count > self._size:
            raise CheckpointError(f"points to byte {start + count} of {self._size}: it was cut short. {DOWNLOAD_AGAIN}")
        if start in self._used:
            raise CheckpointError(f"has two objects at byte {start}. {DOWNLOAD_AGAIN}")
        self._used[start] = start + count

    def _check_overlaps(self) -> None:
        pieces = sorted(self._used.items())
        for (_, end), (start, _) in zip(pieces, pieces[1:], strict=False):
            if start < end:
                raise CheckpointError(f"has two objects at byte {start}. {DOWNLOAD_AGAIN}")


def _shape(path: str, space: bytes) -> tuple[int, ...]:
    version, rank = space[:2]
    if version != 1:
        raise CheckpointError(f"tensor {quoted(path)} has a shape of version {version}. {_ADVICE}")
    return struct.unpack_from(f"<{rank}Q", space, 8)


def _type(message: bytes) -> tuple[str, _ByteOrder]:
    """Return the type of a tensor's elements, and their byte order."""
    kind, low, middle, _, size = struct.unpack_from("<4BI", message)
    bits = middle << 8 | low
    byteorder: _ByteOrder = ">" if bits & 1 else "<"
    name = None
    match kind & 0xF:
        case 0:
            offset, precision = struct.unpack_from("<HH", message, 8)
            if (offset, precision) == (0, 8 * size):
                name = f"{'int' if bits & 8 else 'uint'}{precision}"
        case 1:
            name = _FLOATS.get((bits & ~1, size, *struct.unpack_from("<HHBBBBI", message, 8)))
        case 5 if size == 2:  # h5py has no bfloat16: Keras' two opaque bytes
            name, byteorder = "bfloat16", "<"
    return name or f"HDF5 type {kind & 0xF}", byteorder
