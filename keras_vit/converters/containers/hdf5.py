"""Read HDF5 files as Keras writes them (.weights.h5), without the HDF5 library.

That C library follows every pointer in a file, and a damaged file can crash the process. h5py 3.14 with HDF5 1.14.6,
behind checks of the superblock's version, of links and of all sizes, read or refused 16,400 damaged copies of a file as
Keras writes it, but ended the process on 463 of 1,500 damaged copies of one whose groups keep the order of their
members (460 SIGABRT, 3 SIGSEGV). Whoever excludes such files has to read the headers of all objects.

Keras uses a small part of the format, groups and contiguous arrays. Only that part is read, by the HDF5 File Format
Specification (version 3.0); everything else is refused.
"""

import io
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from keras_vit._util.untrusted import MAX_DIRECTORY_BYTES, hdf5_end
from keras_vit.converters.containers.base import (
    DOWNLOAD_AGAIN,
    ITEM_BYTES,
    Container,
    Header,
    bfloat16_to_float32,
    quoted,
    read_exactly,
)
from keras_vit.errors import CheckpointError

# Characters in the path of an object. With the limit on the directory's bytes this bounds the memory of all names.
MAX_PATH_LENGTH = 256

_CHUNK_BYTES = 1 << 24  # one read() of an operating system stops at 2 GiB
_ADVICE = "Files that h5py writes with its default settings, as Keras does, can be read."

# Section II.A, version 0: versions, sizes of offsets and lengths, half sizes of leaves and inner nodes, flags, base,
# and the root group's header.
_SUPERBLOCK = struct.Struct("<8x3BxB2Bx2HIQ32xQ24x")
_OBJECT = struct.Struct("<BxHII4x")  # IV.A.1.a: version, messages, references, bytes
_MESSAGE = struct.Struct("<HHB3x")  # type, bytes, flags
_TREE = struct.Struct("<4sBBHQQ")  # III.A.1: signature, node type, level, entries, neighbours
_HEAP = struct.Struct("<4sB3xQ8xQ")  # III.D: signature, version, bytes, address
_NODE = struct.Struct("<4sBxH")  # III.B: signature, version, entries
_SYMBOL = struct.Struct("<QQI20x")  # III.C: offset of the name, header of the object, kind of what is cached
_SOFT_LINK = 2  # such a kind
_MAX_RANK = 32
_FLAGS = 0x1 | 0x4  # of messages: constant, never shared; others refer to other places or types

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


class Hdf5Container(Container):
    """An HDF5 file of plain arrays, open for reading; their names are their paths, "layers/dense/vars/0"."""

    def __init__(self, path: Path, *, start: int = 0, size: int | None = None) -> None:
        """Open an HDF5 file, or one of `size` bytes that begins at offset `start` of another file."""
        self._start = start
        self._size = size or path.stat().st_size
        super().__init__(path)

    def _read_headers(self, size: int) -> None:
        self._file = self._open_files.enter_context(io.FileIO(self.path))
        self._directory_bytes = 0
        self._used: dict[int, int] = {}  # start -> end of every piece of the file that was referred to
        self._places: dict[str, tuple[int, _ByteOrder]] = {}
        objects = [("", self._root())]
        for path, address in objects:  # grows while it is read
            if len(path) > MAX_PATH_LENGTH:
                raise CheckpointError(f"has an object with a path of {len(path)} characters. {_ADVICE}")
            messages = self._messages(path, address)
            if _SYMBOLS in messages:
                objects += [(f"{path}/{name}".lstrip("/"), child) for name, child in self._members(messages[_SYMBOLS])]
            elif {_SPACE, _TYPE, _LAYOUT} <= messages.keys():
                self._add(path, messages)
            else:
                raise CheckpointError(f"{quoted(path)} is neither a group nor an array. {DOWNLOAD_AGAIN}")
        pieces = sorted(self._used.items())
        for (_, end), (start, _) in itertools.pairwise(pieces):
            _require(start >= end, f"has two objects at byte {start}")

    def _read_tensor(self, header: Header) -> np.ndarray:
        start, byteorder = self._places[header.name]
        data = np.empty(header.bytes, np.uint8)
        self._file.seek(self._start + start if header.bytes else 0)
        for chunk in range(0, header.bytes, _CHUNK_BYTES):
            piece = data[chunk : chunk + _CHUNK_BYTES]
            _require(self._file.readinto(piece.data) == len(piece), "ends in the middle of a tensor: it was cut short")
        if header.dtype == "bfloat16":
            array = bfloat16_to_float32(data)
        else:
            array = data.view(np.dtype(header.dtype).newbyteorder(byteorder)).astype(header.dtype, copy=False)
        return array.reshape(header.shape)

    def _root(self) -> int:
        """Return the offset of the root group's header."""
        superblock = self._piece(0, _SUPERBLOCK.size)
        end = hdf5_end(superblock)
        *versions, leaf, inner, flags, base, root = _SUPERBLOCK.unpack(superblock)
        if versions != [0, 0, 0, 0, 8, 8] or (flags, base) != (0, 0):
            raise CheckpointError(f"is an HDF5 file of a kind that Keras does not write. {_ADVICE}")
        _require(end <= self._size, f"has {self._size} bytes of {end}: it was cut short")
        self._size, self._leaf_entries, self._inner_entries = end, 2 * leaf, 2 * inner
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
            while at < length:
                kind, count, flags = _MESSAGE.unpack_from(data, at)
                at += _MESSAGE.size + count
                if kind in _REFUSED:
                    raise CheckpointError(f"{quoted(path)} {_REFUSED[kind]}. {_ADVICE}")
                is_whole = kind not in found and at <= length and not flags & ~_FLAGS
                _require(is_whole, f"{quoted(path)} has a damaged header")
                if kind == _CONTINUATION:
                    blocks.append(struct.unpack("<QQ", data[at - count : at]))
                elif kind in (_SPACE, _TYPE, _LAYOUT, _SYMBOLS):
                    found[kind] = data[at - count : at]
        return found

    def _members(self, symbols: bytes) -> Iterator[tuple[str, int]]:
        """Yield the name and the header's offset of every object in a group."""
        tree, heap = struct.unpack("<QQ", symbols)
        signature, version, length, start = _HEAP.unpack(self._piece(heap, _HEAP.size))
        _require((signature, version) == (b"HEAP", 0), "has a damaged heap of names")
        names = self._piece(start, length)
        nodes = [tree]
        for address in nodes:  # grows while it is read
            data = self._piece(address, _TREE.size + 16 * self._inner_entries + 8)
            signature, kind, level, count, _, _ = _TREE.unpack_from(data)
            is_node = (signature, kind) == (b"TREE", 0) and count <= self._inner_entries
            _require(is_node, "has a damaged tree of names")
            children = struct.unpack_from(f"<{2 * count + 1}Q", data, _TREE.size)[1::2]  # keys lie between them
            if level:
                nodes += children
            else:
                for child in children:
                    yield from self._symbols(child, names)

    def _symbols(self, address: int, names: bytes) -> Iterator[tuple[str, int]]:
        """Yield the entries of a node."""
        data = self._piece(address, _NODE.size + _SYMBOL.size * self._leaf_entries)
        signature, version, count = _NODE.unpack_from(data)
        is_node = (signature, version) == (b"SNOD", 1) and count <= self._leaf_entries
        _require(is_node, "has a damaged table of names")
        for start, header, kind in itertools.islice(_SYMBOL.iter_unpack(data[_NODE.size :]), count):
            name = names[start : names.index(b"\0", start, start + MAX_PATH_LENGTH)].decode()
            _require(name not in ("", ".") and "/" not in name, f"has an object named {quoted(name)}")
            if kind == _SOFT_LINK:
                raise CheckpointError(f"{quoted(name)} is a link, which is never followed.")
            yield name, header

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
        _require(path not in self.headers, f"has two tensors {quoted(path)}")
        self._mark_used(start, length)
        self.headers[path] = header
        self._places[path] = start, byteorder

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
        _require(start + count <= self._size, f"points to byte {start + count} of {self._size}: it was cut short")
        _require(start not in self._used, f"has two objects at byte {start}")
        self._used[start] = start + count


def _require(is_whole: bool, damage: str) -> None:
    if not is_whole:
        raise CheckpointError(f"{damage}. {DOWNLOAD_AGAIN}")


def _shape(path: str, space: bytes) -> tuple[int, ...]:
    version, rank, flags = space[:3]
    if version != 1 or rank > _MAX_RANK or flags > 1:
        raise CheckpointError(f"tensor {quoted(path)} has a shape of version {version}. {_ADVICE}")
    shape: tuple[int, ...] = struct.unpack_from(f"<{rank}Q", space, 8)
    return shape


def _type(message: bytes) -> tuple[str, _ByteOrder]:
    """Return the type of a tensor's elements, and their byte order."""
    kind, low, middle, _, size = struct.unpack_from("<4BI", message)
    bits = middle << 8 | low
    byteorder: _ByteOrder = ">" if bits & 1 else "<"
    name = None
    match kind & 0xF if kind >> 4 in (1, 2, 3) else None:
        case 0:
            offset, precision = struct.unpack_from("<HH", message, 8)
            if (offset, precision) == (0, 8 * size):
                name = f"{'int' if bits & 8 else 'uint'}{precision}"
        case 1:
            name = _FLOATS.get((bits & ~1, size, *struct.unpack_from("<HHBBBBI", message, 8)))
        case 5 if size == 2:  # h5py has no bfloat16: Keras' two opaque bytes
            name, byteorder = "bfloat16", "<"
    return name or f"HDF5 type {kind & 0xF}", byteorder
