"""Read .safetensors files through the official library, and write them with one tensor in memory.

The library refused or read all of 20,000 damaged files without a crash, an error of another kind or more than 64 MiB
of memory. It is not used to write, because it takes the addresses of all tensors at once: a model that is converted to
float32, transposed or split would be in memory twice.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit._util.atomic import replacing
from keras_vit._util.text import printable
from keras_vit._util.untrusted import open_safetensors
from keras_vit.converters.containers.base import (
    DOWNLOAD_AGAIN,
    Container,
    Header,
    bfloat16_to_float32,
    quoted,
)
from keras_vit.errors import CheckpointError

# In the order in which the official library writes tensors: the widest type first, so that all are aligned.
_TYPES = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_CODES = {name: code for code, name in _TYPES.items()}
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_ALIGNMENT = 8


class SafetensorsContainer(Container):
    """A .safetensors file, open for reading. Of the types that NumPy lacks, only bfloat16 can be read."""

    def _read_headers(self, size: int) -> None:
        try:
            self._tensors = self._open_files.enter_context(open_safetensors(self.path))
        except ValueError as error:
            raise CheckpointError(f"{printable(str(error))}. {DOWNLOAD_AGAIN}") from error
        self.metadata = self._tensors.metadata() or {}
        for name in self._tensors.offset_keys():
            tensor = self._tensors.get_slice(name)
            code = tensor.get_dtype()
            self.headers[name] = Header(name, tuple(tensor.get_shape()), _TYPES.get(code, code))

    def _read_tensor(self, header: Header) -> np.ndarray:
        array: np.ndarray = self._tensors.get_tensor(header.name)
        return bfloat16_to_float32(array) if header.dtype == "bfloat16" else array


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, metadata: Mapping[str, str]
) -> Path:
    """Write a .safetensors file with the same bytes as the official library.

    Args:
        path: the file to write; it appears complete or not at all.
        tensors: arrays by name, or pairs of both; a `LazyTensor` is converted only when it is written.
        metadata: texts beside the tensors, such as {"format": "pt"}; may be empty.
    """
    arrays = _ordered(tensors.items() if isinstance(tensors, Mapping) else tensors)
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for name, array in arrays.items():
        end = begin + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype.name], "shape": array.shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(Path(path)) as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text)
        for array in arrays.values():
            file.write(_little_endian(np.asarray(array)))
    return Path(path)


def _ordered(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Check tensors and put them in the official order: by type, then by name."""
    arrays: dict[str, Any] = {}
    for name, value in pairs:
        array = value if hasattr(value, "nbytes") else np.asarray(value)
        if name in arrays or name == _METADATA:
            raise ValueError(f"Tensor names must be unique and not {_METADATA!r}. Received: {quoted(name)}")
        if array.dtype.name not in _CODES:
            raise ValueError(f"Tensor {quoted(name)} is {array.dtype}. Types written: {', '.join(_CODES)}.")
        arrays[name] = array
    types = list(_CODES)
    return dict(sorted(arrays.items(), key=lambda item: (types.index(item[1].dtype.name), item[0])))


def _little_endian(array: np.ndarray) -> memoryview:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.name != "bfloat16":  # NumPy cannot swap its bytes
        flat = flat.astype(flat.dtype.newbyteorder("<"), copy=False)
    return flat.view(np.uint8).data
