"""Read files of named tensors: the headers first, then one tensor at a time."""

import abc
import contextlib
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np

from keras_vit.errors import CheckpointError

# The types that are read, and the bytes of one element in a file.
_FLOATS, _INTEGERS = ("float64", "float32", "float16"), ("int64", "int32", "int16", "int8")
_OTHERS = (*_INTEGERS, "uint64", "uint32", "uint16", "uint8", "bool")
ITEM_BYTES = {name: 2 if name == "bfloat16" else np.dtype(name).itemsize for name in (*_FLOATS, "bfloat16", *_OTHERS)}

MAX_JSON_BYTES = 10 << 20  # of a config.json; an id2label of 21,843 classes takes 1.5 MB

_CHUNK_BYTES = 1 << 24  # one read() of an operating system stops at 2 GiB
DOWNLOAD_AGAIN = "Download it again."

# Everything that zipfile, zlib, json, ast, struct and NumPy raise when the bytes are wrong.
PARSER_ERRORS = (
    *(ArithmeticError, EOFError, LookupError, MemoryError, OSError, SyntaxError, TypeError),
    *(RuntimeError, ValueError),  # include NotImplementedError, RecursionError and UnicodeDecodeError
    *(struct.error, zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True)
class Header:
    """The name, shape and dtype that a file states for one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a NumPy name or "bfloat16"; a type that cannot be read keeps its name in the file

    @property
    def bytes(self) -> int:
        """Size in the file, unpacked; 0 for a type that cannot be read."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)


class Container(abc.ABC):
    """A file of named tensors, open for reading: use it in a `with` statement, in one thread at a time.

    Opening checks every header and unpacks nothing. Each tensor is read into its own memory and outlives the container.
    (Memory-mapping would save a copy, but the process would crash if another process cut the file short.)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.headers: dict[str, Header] = {}  # by name, in the order of the file
        self.metadata: dict[str, str] = {}  # texts that the file holds beside its tensors
        self._joined: list[Container] = []
        self._file = io.FileIO(path)
        try:
            with reading(path):
                self._read_headers(path.stat().st_size)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> np.ndarray:
        """Read one of `headers` as a writable array of its shape in native byte order; bfloat16 becomes float32."""
        for other in self._joined:
            if name in other.headers:
                return other.read(name)
        with reading(self.path):
            if (header := self.headers.get(name)) is None:
                raise CheckpointError(f"has no tensor {quoted(name)} among its {len(self.headers)}.")
            if header.dtype == "object":
                raise CheckpointError(f"tensor {quoted(name)} holds pickled objects, which are never read.")
            if header.dtype not in ITEM_BYTES:
                raise CheckpointError(
                    f"tensor {quoted(name)} is {quoted(header.dtype)}. Types read: {', '.join(ITEM_BYTES)}."
                )
            return self._read_tensor(header)

    def join(self, other: "Container") -> None:
        """Add the tensors of another file of the same model; closing this container closes both."""
        self._joined.append(other)
        if duplicates := self.headers.keys() & other.headers.keys():
            raise CheckpointError(f"{other.path}: has tensor {quoted(min(duplicates))}, as {self.path} has.")
        self.headers |= other.headers

    def close(self) -> None:
        """Close the file and those joined to it; arrays already read stay valid."""
        self._file.close()
        for other in self._joined:
            other.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def _read_headers(self, size: int) -> None:
        """Fill `headers` and `metadata` from a file of `size` bytes."""

    @abc.abstractmethod
    def _read_tensor(self, header: Header) -> np.ndarray:
        """Read one tensor; its dtype has been checked."""


def read_exactly(stream: io.RawIOBase | io.BufferedIOBase, count: int) -> bytes:
    """Read `count` bytes; fewer are an error."""
    data = stream.read(count) or b""
    if len(data) != count:
        raise CheckpointError(f"ends {count - len(data)} bytes early: it was cut short. {DOWNLOAD_AGAIN}")
    return data


def read_into(stream: io.RawIOBase | io.BufferedIOBase, count: int) -> np.ndarray:
    """Read `count` bytes into a new uint8 array; fewer are an error."""
    data = np.empty(count, np.uint8)
    view = data.data
    for start in range(0, count, _CHUNK_BYTES):
        piece = view[start : start + _CHUNK_BYTES]
        if stream.readinto(piece) != len(piece):
            raise CheckpointError(f"ends in the middle of a tensor: it was cut short. {DOWNLOAD_AGAIN}")
    return data


def decoded(
    data: np.ndarray, header: Header, byteorder: Literal["<", ">"] = "<", order: Literal["C", "F"] = "C"
) -> np.ndarray:
    """Return a tensor's bytes (uint8) as an array in native byte order, bfloat16 as float32; a view if possible."""
    if header.dtype == "bfloat16":  # the upper half of a float32
        wide = data.view(f"{byteorder}u2").astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32).reshape(header.shape, order=order)
    stored = data.view(np.dtype(header.dtype).newbyteorder(byteorder))
    return stored.astype(header.dtype, copy=False).reshape(header.shape, order=order)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Replace every error that the bytes of a file can cause in a parser by a CheckpointError that names the file."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__
    except PARSER_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise CheckpointError(f"{path}: cannot be read ({reason}). If it is damaged, download it again.") from error


def quoted(text: str) -> str:
    """Quote, escape and shorten a name from a file for a message."""
    return repr(text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}")
