"""HDF5 files as Keras writes them (.weights.h5), without the HDF5 library.

That library is written in C and follows a file's every pointer: a crafted file may end the process or take all of its
memory, and nothing in Python can prevent it. Keras needs little of the format: groups and arrays that each lie in one
piece. That little is read here, as the HDF5 File Format Specification (version 3.0) lays it down; all else is refused.
"""

import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from keras_vit.converters.containers.base import (
    ITEM_BYTES,
    MAX_DIRECTORY_BYTES,
    Container,
    Header,
    decoded,
    read_exactly,
    read_into,
)
from keras_vit.converters.containers.errors import AGAIN, shown
from keras_vit.errors import CheckpointError

MAGIC = b"\x89HDF\r\n\x1a\n"
LONGEST_PATH = 256
"""Characters in the path of an object. With the limit on the directory's bytes it bounds the memory of all names."""

_ADVICE = "h5py's default settings, which are Keras' own, write files that can be read."

# Section II.A: version 0; offsets and lengths of 8 bytes, base address, end of the file, header of the root group.
_SUPERBLOCK = struct.Struct("<8s5B2BB2HIQ8xQ8x8xQ24x")
_OBJECT = struct.Struct("<BxHII4x")  # IV.A.1.a: version, messages, references, bytes
_MESSAGE = struct.Struct("<HHB3x")  # type, bytes, flags
_TREE = struct.Struct("<4sBBH16x")  # III.A.1: signature, node type, level, entries
_HEAP = struct.Struct("<4sB3xQ8xQ")  # III.D: signature, version, bytes, address
_NODE = struct.Struct("<4sBxH")  # III.B: signature, version, entries
_SYMBOL = struct.Struct("<QQI4x16x")  # III.C: where the name is, header of the object, kind of what is cached
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

# IV.A.2.d: class bits, bytes, bit offset, precision, exponent at, its bits, mantissa at, its bits, exponent bias.
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

    def _read_headers(self, size: int) -> None:
        self._size = size
        self._spent = 0
        self._taken: dict[int, int] = {}
        self._places: dict[str, _Place] = {}
        objects = [("", self._root())]
        while objects:
            path, address = objects.pop()
            if len(path) > LONGEST_PATH:
                raise CheckpointError(f"has an object with a path of {len(path)} characters. {_ADVICE}")
            messages = self._messages(path, address)
            if _SYMBOLS in messages:
                objects += [(f"{path}/{name}".lstrip("/"), child) for name, child in self._members(messages[_SYMBOLS])]
            elif {_SPACE, _TYPE, _LAYOUT} <= messages.keys():
                self._add(path, messages)
            else:
                raise CheckpointError(f"{shown(path)} is neither a group nor an array. {AGAIN}")
        self._refuse_overlaps()

    def _read_tensor(self, header: Header) -> np.ndarray:
        start, byteorder = self._places[header.name]
        self._file.seek(start if header.bytes else 0)
        return decoded(read_into(self._file, header.bytes), header, byteorder)

    def _root(self) -> int:
        """Where the header of the root group is."""
        magic, version, *_, offsets, lengths, _, _, _, _, base, end, root = _SUPERBLOCK.unpack(
            self._piece(0, _SUPERBLOCK.size)
        )
        if magic != MAGIC or version != 0 or (offsets, lengths, base) != (8, 8, 0):
            raise CheckpointError(f"is an HDF5 file of a kind that Keras does not write. {_ADVICE}")
        if end > self._size:
            raise CheckpointError(f"has {self._size} bytes of {end}: it was cut short. {AGAIN}")
        return int(root)

    def _messages(self, path: str, address: int) -> dict[int, bytes]:
        """What an object's header says, by type of message."""
        version, _, _, length = _OBJECT.unpack(self._piece(address, _OBJECT.size))
        if version != 1:
            raise CheckpointError(f"{shown(path)} has a header of version {version}. {_ADVICE}")
        found: dict[int, bytes] = {}
        blocks = [(address + _OBJECT.size, length)]
        for start, length in blocks:  # it grows on the way
            data = self._piece(start, length)
            at = 0
            while at + _MESSAGE.size <= length:
                kind, count, flags = _MESSAGE.unpack_from(data, at)
                at += _MESSAGE.size + count
                body = data[at - count : at]
                if kind == _CONTINUATION:
                    blocks.append(struct.unpack("<QQ", body))
                elif kind in _REFUSED:
                    raise CheckpointError(f"{shown(path)} {_REFUSED[kind]}. {_ADVICE}")
                elif kind in (_SPACE, _TYPE, _LAYOUT, _SYMBOLS):
                    if kind in found or flags & _SHARED or at > length:
                        raise CheckpointError(f"{shown(path)} has a damaged header. {AGAIN}")
                    found[kind] = body
        return found

    def _members(self, symbols: bytes) -> Iterator[tuple[str, int]]:
        """Name and header of everything in a group."""
        tree, heap = struct.unpack("<QQ", symbols)
        names = self._names(heap)
        nodes = [tree]
        for address in nodes:  # it grows on the way
            signature, kind, level, count = _TREE.unpack(self._piece(address, _TREE.size))
            if (signature, kind) != (b"TREE", 0):
                raise CheckpointError(f"has a damaged tree of names. {AGAIN}")
            children = [child for _, child in struct.iter_unpack("<QQ", self._piece(address + _TREE.size, 16 * count))]
            if level:
                nodes += children
            else:
                yield from (entry for child in children for entry in self._symbols(child, names))

    def _symbols(self, address: int, names: bytes) -> Iterator[tuple[str, int]]:
        signature, version, count = _NODE.unpack(self._piece(address, _NODE.size))
        if (signature, version) != (b"SNOD", 1):
            raise CheckpointError(f"has a damaged table of names. {AGAIN}")
        for start, header, cached in _SYMBOL.iter_unpack(self._piece(address + _NODE.size, _SYMBOL.size * count)):
            name = names[start : names.index(b"\0", start, start + LONGEST_PATH)].decode()
            if not name or "/" in name:
                raise CheckpointError(f"has an object named {shown(name)}. {AGAIN}")
            if cached == _SOFT_LINK:
                raise CheckpointError(f"{shown(name)} is a link, which is never followed.")
            yield name, header

    def _names(self, address: int) -> bytes:
        signature, version, length, start = _HEAP.unpack(self._piece(address, _HEAP.size))
        if (signature, version) != (b"HEAP", 0):
            raise CheckpointError(f"has a damaged heap of names. {AGAIN}")
        return self._piece(start, length)

    def _add(self, path: str, messages: dict[int, bytes]) -> None:
        dtype, byteorder = _type(messages[_TYPE])
        header = Header(path, _shape(path, messages[_SPACE]), dtype)
        version, kind, start, length = struct.unpack("<BBQQ", messages[_LAYOUT][:18].ljust(18, b"\0"))
        if (version, kind) != (3, 1):
            raise CheckpointError(f"tensor {shown(path)} does not lie in one piece. {_ADVICE}")
        if dtype in ITEM_BYTES and header.bytes != length:
            raise CheckpointError(
                f"tensor {shown(path)} claims {header.bytes} bytes (shape {str(header.shape)[:200]}, {dtype}) "
                f"but the file holds {length} for it."
            )
        self._take(start, length)
        self.headers[path] = header
        self._places[path] = _Place(start, byteorder)

    def _piece(self, start: int, count: int) -> bytes:
        """Reads a piece of the directory."""
        self._spent += count
        if self._spent > MAX_DIRECTORY_BYTES:
            raise CheckpointError(f"names its tensors in more than {MAX_DIRECTORY_BYTES} bytes.")
        self._take(start, count)
        self._file.seek(start if count else 0)
        return read_exactly(self._file, count)

    def _take(self, start: int, count: int) -> None:
        """Notes what a piece of the file is used for; a second use of the same place is a loop or a lie."""
        if not count:  # what is empty may be anywhere
            return
        if start + count > self._size:
            raise CheckpointError(f"points to byte {start + count} of {self._size}: it was cut short. {AGAIN}")
        if start in self._taken:
            raise CheckpointError(f"has two objects at byte {start}. {AGAIN}")
        self._taken[start] = start + count

    def _refuse_overlaps(self) -> None:
        pieces = sorted(self._taken.items())
        for (_, end), (start, _) in zip(pieces, pieces[1:], strict=False):
            if start < end:
                raise CheckpointError(f"has two objects at byte {start}. {AGAIN}")


def _shape(path: str, space: bytes) -> tuple[int, ...]:
    version, rank = space[:2]
    if version != 1:
        raise CheckpointError(f"tensor {shown(path)} has a shape of version {version}. {_ADVICE}")
    return struct.unpack_from(f"<{rank}Q", space, 8)


def _type(message: bytes) -> tuple[str, _ByteOrder]:
    """The type of a tensor's elements, and their byte order."""
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
