"""Read HDF5 files as Keras writes them (.weights.h5), without the HDF5 library.

That C library follows every pointer in a file, and a damaged file can crash the process. h5py 3.14 with HDF5 1.14.6,
behind checks of the superblock's version, of links and of all sizes, read or refused 16,400 damaged copies of a file as
Keras writes it, but ended the process on 463 of 1,500 damaged copies of one whose groups keep the order of their
members (460 SIGABRT, 3 SIGSEGV). Whoever excludes such files has to read the headers of all objects.

Keras uses a small part of the format, groups and contiguous arrays. Only that part is read, by the HDF5 File Format
Specification (version 3.0); everything else is refused, and so is every file that the library would refuse.
"""

import io
import itertools
import operator
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
# free space, driver, and the root group's header and what is cached of it.
_SUPERBLOCK = struct.Struct("<8x3BxB2Bx2HIQQ8xQ8xQI4x16s")
_OBJECT = struct.Struct("<BxHII4x")  # IV.A.1.a: version, messages, references, bytes
_MESSAGE = struct.Struct("<HHB3x")  # type, bytes, flags
_TREE = struct.Struct("<4sBBHQQ")  # III.A.1: signature, node type, level, entries, neighbours
_HEAP = struct.Struct("<4sB3xQQQ")  # III.D: signature, version, bytes, offset of the first free block, address
_NODE = struct.Struct("<4sBxH")  # III.B: signature, version, entries
# III.C: offset of the name, header of the object, kind of what is cached, what is cached.
_SYMBOL = struct.Struct("<QQI4x16s")
_NOTHING, _GROUP, _SOFT_LINK = 0, 1, 2  # kinds of what is cached
_UNDEFINED = 2**64 - 1  # an address, or a length without a limit
_NO_FREE_BLOCK = 1
_MAX_RANK = 32
_FLAGS = 0x1 | 0x4  # of messages: constant, never shared; others refer to other places or types

# Section IV.A.2, by type of message.
_SPACE, _TYPE, _OLD_FILL, _FILL, _LAYOUT, _CONTINUATION, _SYMBOLS, _DATE = 0x1, 0x3, 0x4, 0x5, 0x8, 0x10, 0x11, 0x12
_EMPTY, _ATTRIBUTE = 0x0, 0xC
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
        objects: list[tuple[str, int, bytes | None]] = [("", *self._root())]
        while objects:
            path, address, cached = objects.pop()
            if len(path) > MAX_PATH_LENGTH:
                raise CheckpointError(f"has an object with a path of {len(path)} characters. {_ADVICE}")
            messages = self._messages(path, address)
            _require(cached in (None, messages.get(_SYMBOLS)), f"{quoted(path)} has a damaged header")
            if _SYMBOLS in messages:
                for name, child, repeated in self._members(messages[_SYMBOLS]):
                    objects.append((f"{path}/{name}".lstrip("/"), child, repeated))
            elif {_SPACE, _TYPE, _LAYOUT} <= messages.keys():
                self._add(path, messages)
            else:
                raise CheckpointError(f"{quoted(path)} is neither a group nor an array. {DOWNLOAD_AGAIN}")
        self._check_overlaps()

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

    def _root(self) -> tuple[int, bytes | None]:
        """Return the offset of the root group's header, and what the superblock repeats of it."""
        superblock = self._piece(0, _SUPERBLOCK.size)
        end = hdf5_end(superblock)
        *versions, leaf, inner, flags, base, free, driver, root, kind, cached = _SUPERBLOCK.unpack(superblock)
        if versions != [0, 0, 0, 0, 8, 8] or (flags, base) != (0, 0) or not leaf or not inner:
            raise CheckpointError(f"is an HDF5 file of a kind that Keras does not write. {_ADVICE}")
        _require(end <= self._size, f"has {self._size} bytes of {end}: it was cut short")
        is_plain = (free, driver) == (_UNDEFINED, _UNDEFINED) and kind in (_NOTHING, _GROUP)
        _require(is_plain, "has a damaged superblock")
        self._size, self._leaf_entries, self._inner_entries = end, 2 * leaf, 2 * inner
        return root, cached if kind == _GROUP else None

    def _messages(self, path: str, address: int) -> dict[int, bytes]:
        """Return the messages in an object's header, by type."""
        version, number, _, length = _OBJECT.unpack(self._piece(address, _OBJECT.size))
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
                body = data[at - count : at]
                number -= 1
                if kind in _REFUSED:
                    raise CheckpointError(f"{quoted(path)} {_REFUSED[kind]}. {_ADVICE}")
                is_whole = kind not in found and not count % 8 and at <= length and not flags & ~_FLAGS
                _require(is_whole and _is_whole(kind, body), f"{quoted(path)} has a damaged header")
                if kind == _CONTINUATION:
                    blocks.append(struct.unpack("<QQ", body))
                elif kind in (_SPACE, _TYPE, _LAYOUT, _SYMBOLS):
                    found[kind] = body
        _require(not number, f"{quoted(path)} has a damaged header")
        return found

    def _members(self, symbols: bytes) -> Iterator[tuple[str, int, bytes | None]]:
        """Yield the name and the header's offset of every object in a group, and what its entry repeats of a group."""
        tree, heap = struct.unpack("<QQ", symbols)
        names = self._names(heap)
        nodes: list[tuple[int, int | None, bytes, bytes | None]] = [(tree, None, b"", None)]
        neighbours: dict[int, tuple[int, int]] = {}  # level -> the last node on it, and its neighbour on the right
        for address, expected_level, low, high in nodes:  # grows while it is read
            data = self._piece(address, _TREE.size + 16 * self._inner_entries + 8)
            signature, kind, level, count, left, right = _TREE.unpack_from(data)
            before, after = neighbours.get(level, (_UNDEFINED, address))
            neighbours[level] = address, right
            is_node = (signature, kind, left, after) == (b"TREE", 0, before, address)
            is_node = is_node and expected_level in (None, level) and count <= self._inner_entries
            _require(is_node, "has a damaged tree of names")
            # The names in a child come after the key before it and not after the key behind it.
            keys, children = (struct.unpack_from(f"<{2 * count + 1}Q", data, _TREE.size)[start::2] for start in (0, 1))
            bounds = [_name(names, key) for key in keys]
            for child, first, last in zip(children, bounds, bounds[1:], strict=False):
                first, last = max(low, first), last if high is None else min(high, last)
                if level:
                    nodes.append((child, level - 1, first, last))
                else:
                    yield from self._symbols(child, names, first, last)
        _require(all(right == _UNDEFINED for _, right in neighbours.values()), "has a damaged tree of names")

    def _symbols(self, address: int, names: bytes, low: bytes, high: bytes) -> Iterator[tuple[str, int, bytes | None]]:
        """Yield the entries of a node, whose names are in order, above `low` and up to `high`."""
        data = self._piece(address, _NODE.size + _SYMBOL.size * self._leaf_entries)
        signature, version, count = _NODE.unpack_from(data)
        is_node = (signature, version) == (b"SNOD", 1) and count <= self._leaf_entries
        _require(is_node, "has a damaged table of names")
        for start, header, kind, cached in itertools.islice(_SYMBOL.iter_unpack(data[_NODE.size :]), count):
            name = _name(names, start)
            is_name = b"/" not in name and name != b"." and low < name <= high
            _require(is_name and kind <= _SOFT_LINK, f"has an object named {quoted(name.decode())}")
            if kind == _SOFT_LINK:
                raise CheckpointError(f"{quoted(name.decode())} is a link, which is never followed.")
            low = name
            yield name.decode(), header, cached if kind == _GROUP else None

    def _names(self, address: int) -> bytes:
        """Return a heap of names, after checking its list of free blocks."""
        signature, version, length, free, start = _HEAP.unpack(self._piece(address, _HEAP.size))
        names = self._piece(start, length)
        is_whole = (signature, version) == (b"HEAP", 0)
        blocks = 0
        while is_whole and free != _NO_FREE_BLOCK:
            following, size = struct.unpack_from("<QQ", names, free) if free + 16 <= length else (0, 0)
            blocks += 16
            is_whole = following > 0 and free + size <= length and blocks <= length
            free = following
        _require(is_whole, "has a damaged heap of names")
        return names

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

    def _check_overlaps(self) -> None:
        pieces = sorted(self._used.items())
        for (_, end), (start, _) in zip(pieces, pieces[1:], strict=False):
            _require(start >= end, f"has two objects at byte {start}")


def _require(is_whole: bool, damage: str) -> None:
    if not is_whole:
        raise CheckpointError(f"{damage}. {DOWNLOAD_AGAIN}")


def _is_whole(kind: int, body: bytes) -> bool:
    """Check a message that is not used: a date of version 1, or a fill value of version 2, which may have no bytes."""
    if kind == _DATE:
        return body[0] == 1
    if kind == _FILL:
        return body[0] == 2 and (not body[3] or 8 + int.from_bytes(body[4:8], "little") <= len(body))
    if kind == _OLD_FILL:
        return 4 + int.from_bytes(body[:4], "little") <= len(body)
    return kind in (_EMPTY, _SPACE, _TYPE, _LAYOUT, _ATTRIBUTE, _CONTINUATION, _SYMBOLS)


def _name(names: bytes, start: int) -> bytes:
    """Return the name at an offset of a heap."""
    return names[start : names.index(b"\0", start, start + MAX_PATH_LENGTH)]


def _shape(path: str, space: bytes) -> tuple[int, ...]:
    version, rank, flags = space[:3]
    if version != 1 or rank > _MAX_RANK or flags > 1:
        raise CheckpointError(f"tensor {quoted(path)} has a shape of version {version}. {_ADVICE}")
    shape: tuple[int, ...] = struct.unpack_from(f"<{rank}Q", space, 8)
    largest = struct.unpack_from(f"<{rank}Q", space, 8 + 8 * rank) if flags else shape
    _require(all(map(operator.le, shape, largest)), f"{quoted(path)} has a damaged header")
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
