"""Read files of named tensors: the headers first, then one tensor at a time."""

import abc
import contextlib
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from keras_vit._util.text import printable
from keras_vit.errors import CheckpointError

_CODES = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1")
# The types that are read, and the bytes of one element in a file.
ITEM_BYTES = {np.dtype(code).name: int(code[1]) for code in _CODES} | {"bfloat16": 2, "bool": 1}
DOWNLOAD_AGAIN = "Download it again."


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
        self._joined: dict[str, Container] = {}  # by the names of their tensors
        self._is_closed = False
        self._open_files = contextlib.ExitStack()
        try:
            with reading(path):
                self._read_headers(path.stat().st_size)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> np.ndarray:
        """Read one of `headers` as a writable array of its shape in native byte order; bfloat16 becomes float32."""
        if name in self._joined:
            return self._joined[name].read(name)
        with reading(self.path):
            if self._is_closed:
                raise CheckpointError("is closed.")
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
        self._open_files.enter_context(other)
        if duplicates := self.headers.keys() & other.headers.keys():
            raise CheckpointError(f"{other.path}: has tensor {quoted(min(duplicates))}, as {self.path} has.")
        self.headers |= other.headers
        self._joined |= dict.fromkeys(other.headers, other)

    def close(self) -> None:
        """Close the file and those joined to it; arrays already read stay valid."""
        self._is_closed = True
        self._open_files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def _read_headers(self, size: int) -> None:
        """Open the file, which has `size` bytes, and fill `headers` and `metadata`."""

    @abc.abstractmethod
    def _read_tensor(self, header: Header) -> np.ndarray:
        """Read one tensor; its dtype has been checked."""


def read_exactly(stream: io.RawIOBase | io.BufferedIOBase, count: int) -> bytes:
    """Read `count` bytes; raise if there are fewer."""
    data = stream.read(count) or b""
    if len(data) != count:
        raise CheckpointError(f"ends {count - len(data)} bytes early: it was cut short. {DOWNLOAD_AGAIN}")
    return data


def checked_pairs(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a file to write, one in memory at a time; raise a ValueError for a wrong name or type."""
    names: set[str] = set()
    for name, value in tensors.items() if isinstance(tensors, Mapping) else tensors:
        array = np.asarray(value)
        if name in names:
            raise ValueError(f"Two tensors are named {quoted(name)}.")
        if array.dtype.name not in ITEM_BYTES:
            raise ValueError(f"Tensor {quoted(name)} is {array.dtype}. Types written: {', '.join(ITEM_BYTES)}.")
        names.add(name)
        yield name, array
        del array, value


def bfloat16_to_float32(array: np.ndarray) -> np.ndarray:
    """Convert bfloat16, in any dtype of two bytes: it is the upper half of a float32."""
    wide = array.view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Replace every error that the bytes of a file can cause in a parser by a CheckpointError that names the file."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__
    except Exception as error:  # zipfile, zlib, ast, struct, NumPy and safetensors raise more than ten types for damage
        reason = printable(f"{type(error).__name__}: {error}"[:300])
        raise CheckpointError(f"{path}: cannot be read ({reason}). If it is damaged, download it again.") from error


def quoted(text: str) -> str:
    """Quote, escape and shorten a name from a file for a message."""
    return repr(text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}")
