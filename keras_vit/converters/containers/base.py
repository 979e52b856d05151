"""What every container of tensors has in common: headers first, then one tensor at a time."""

import abc
import io
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np

from keras_vit.converters.containers.errors import AGAIN, reading, shown
from keras_vit.errors import CheckpointError

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""The types that are read, and what one element takes in a file."""

MAX_DIRECTORY_BYTES = 16 << 20
"""The most a file may spend on naming its tensors: 100,000 fit. Parsed, it takes tenfold in memory."""

_CHUNK_BYTES = 1 << 24  # one read() of an operating system stops at 2 GiB


@dataclass(frozen=True)
class Header:
    """What a file says about one tensor.

    Attributes:
        name: The tensor's name in the file.
        shape: Its shape.
        dtype: A NumPy name or "bfloat16"; a type that is not read keeps the name the file gives it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size in the file, unpacked; 0 for a type that is not read."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)


class Container(abc.ABC):
    """A file of named tensors, open for reading; close it, or use it in a `with` statement.

    Opening reads and checks every header and unpacks nothing. Tensors are read one at a time into memory of
    their own: they outlive the container, and a caller that drops each after use needs memory for one.
    (Mapping the file would save a copy, but mapped pages count as memory of the process, and a file that
    another process cuts short would end it.) One container must not be read by two threads at once.

    Attributes:
        path: The file.
        headers: Header of every tensor by name, in the order of the file.
        metadata: Texts that the file carries beside its tensors.
    """

    def __init__(self, path: Path) -> None:
        """Opens `path` and reads its headers.

        Raises:
            CheckpointError: The file is damaged or breaks a rule of its format.
        """
        self.path = path
        self.headers: dict[str, Header] = {}
        self.metadata: dict[str, str] = {}
        self._joined: list[Container] = []
        self._file = io.FileIO(path)
        try:
            with reading(path):
                self._read_headers(path.stat().st_size)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor.

        Args:
            name: One of `headers`.

        Returns:
            A writable array of the header's shape and dtype in native byte order. bfloat16 comes as float32.

        Raises:
            CheckpointError: There is no such tensor, its type is not read, or its data are damaged.
        """
        for other in self._joined:
            if name in other.headers:
                return other.read(name)
        with reading(self.path):
            if (header := self.headers.get(name)) is None:
                raise CheckpointError(f"has no tensor {shown(name)} among its {len(self.headers)}.")
            if header.dtype == "object":
                raise CheckpointError(f"tensor {shown(name)} holds pickled objects, which are never read.")
            if header.dtype not in ITEM_BYTES:
                raise CheckpointError(
                    f"tensor {shown(name)} is {shown(header.dtype)}. Types read: {', '.join(ITEM_BYTES)}."
                )
            return self._read_tensor(header)

    def join(self, other: "Container") -> None:
        """Takes in another file of the same model, its tensors too; closing this one closes both.

        Raises:
            CheckpointError: Both have a tensor of the same name.
        """
        self._joined.append(other)
        if twice := self.headers.keys() & other.headers.keys():
            raise CheckpointError(f"{other.path}: has tensor {shown(min(twice))}, as {self.path} has.")
        self.headers |= other.headers

    def close(self) -> None:
        """Closes the file and those joined to it; arrays already read stay valid."""
        self._file.close()
        for other in self._joined:
            other.close()

    def __enter__(self) -> Self:
        """Returns the container itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the file."""
        self.close()

    @abc.abstractmethod
    def _read_headers(self, size: int) -> None:
        """Fills `headers` and `metadata` from a file of `size` bytes, or raises."""

    @abc.abstractmethod
    def _read_tensor(self, header: Header) -> np.ndarray:
        """Reads the tensor of a header whose type is read."""


def read_exactly(stream: io.RawIOBase | io.BufferedIOBase, count: int) -> bytes:
    """Reads `count` bytes; fewer are an error."""
    data = stream.read(count) or b""
    if len(data) != count:
        raise CheckpointError(f"ends {count - len(data)} bytes early: it was cut short. {AGAIN}")
    return data


def read_into(stream: io.RawIOBase | io.BufferedIOBase, count: int) -> np.ndarray:
    """Reads `count` bytes into a new uint8 array; fewer are an error."""
    data = np.empty(count, np.uint8)
    view = data.data
    for start in range(0, count, _CHUNK_BYTES):
        piece = view[start : start + _CHUNK_BYTES]
        if stream.readinto(piece) != len(piece):
            raise CheckpointError(f"ends in the middle of a tensor: it was cut short. {AGAIN}")
    return data


def decoded(
    data: np.ndarray, header: Header, byteorder: Literal["<", ">"] = "<", order: Literal["C", "F"] = "C"
) -> np.ndarray:
    """Gives the bytes of a tensor its type and shape.

    Args:
        data: uint8 array of `header.bytes`.
        header: A header whose dtype is one of `ITEM_BYTES`.
        byteorder: "<" or ">", that of the file.
        order: "C" or "F", that of the file.

    Returns:
        An array in native byte order; a view of `data` where that is possible.
    """
    if header.dtype == "bfloat16":  # the upper half of a float32
        wide = data.view(f"{byteorder}u2").astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32).reshape(header.shape, order=order)
    stored = data.view(np.dtype(header.dtype).newbyteorder(byteorder))
    return stored.astype(header.dtype, copy=False).reshape(header.shape, order=order)
