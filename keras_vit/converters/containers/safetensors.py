"""Read and write .safetensors: eight bytes of length, a JSON header, then the tensors without gaps."""

import json
import math
import operator
import os
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit._util.atomic import replacing
from keras_vit._util.integrity import directory_limit
from keras_vit.converters.containers.base import ITEM_BYTES, Container, Header, decoded, quoted, read_exactly, read_into
from keras_vit.errors import CheckpointError

# In the order in which the official library writes tensors: the widest type first, so that all are aligned.
_TYPES = {
    **{"U64": "uint64", "I64": "int64", "F64": "float64"},
    **{"F32": "float32", "U32": "uint32", "I32": "int32"},
    **{"BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16"},
    **{"I8": "int8", "U8": "uint8", "BOOL": "bool"},
}
# Bits of one element, also of the types that are not read.
_BITS = {code: 8 * ITEM_BYTES[name] for code, name in _TYPES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
_BITS |= dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
_LIMIT = 2**64  # of all numbers, also of the product of some of a shape's
_CODES = {name: code for code, name in _TYPES.items()}
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_ALIGNMENT = 8


class SafetensorsContainer(Container):
    """A .safetensors file, open for reading. Of the types that NumPy lacks, only bfloat16 can be read."""

    def _read_headers(self, size: int) -> None:
        length = int.from_bytes(read_exactly(self._file, _LENGTH_BYTES), "little")
        if length > (limit := min(directory_limit(size), size - _LENGTH_BYTES)):
            raise CheckpointError(f"claims a header of {length} bytes in a file of {size}; the limit is {limit}.")
        text = read_exactly(self._file, length).decode("utf-8")
        parse = lambda number: -1 if number.startswith("-") else int(number)  # noqa: E731  (-0 is no size)
        header: dict[str, Any] = json.loads(text, object_pairs_hook=_unique, parse_int=parse)
        self.metadata = _metadata(header.pop(_METADATA, {}))
        self._start = _LENGTH_BYTES + length
        self._offsets: dict[str, int] = {}
        spans = sorted((*_span(name, entry), name) for name, entry in header.items())
        end_of_last = 0
        for begin, end, name in spans:
            if begin != end_of_last:
                raise CheckpointError(f"tensor {quoted(name)} starts at byte {begin} instead of {end_of_last}.")
            end_of_last = end
            self._offsets[name] = begin
            self.headers[name] = _header(name, header[name], end - begin)
        if self._start + end_of_last != size:
            raise CheckpointError(f"has {size - self._start} bytes of data; its tensors take {end_of_last}.")

    def _read_tensor(self, header: Header) -> np.ndarray:
        self._file.seek(self._start + self._offsets[header.name])
        return decoded(read_into(self._file, header.bytes), header)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return JSON's pairs as a dict; a key that occurs twice is an error."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        (key + value if isinstance(value, str) else key).encode()  # an error for half of a character ("\\ud800")
        if key in table:
            raise CheckpointError(f"names {quoted(key)} twice in its header.")
        table[key] = value
    return table


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError(f"has a {_METADATA} that is not an object of texts.")
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LIMIT


def _span(name: str, entry: Any) -> tuple[int, int]:
    """Return the offsets at which a tensor's bytes begin and end."""
    match entry:
        case {"dtype": str(), "shape": list(), "data_offsets": [begin, end], **rest} if not rest:
            if _is_size(begin) and _is_size(end) and begin <= end:
                return begin, end
    raise CheckpointError(f"has no valid entry for tensor {quoted(name)}: {quoted(str(entry))}.")


def _header(name: str, entry: dict[str, Any], held: int) -> Header:
    shape, code = entry["shape"], entry["dtype"]
    is_shape = all(_is_size(size) for size in shape) and all(n < _LIMIT for n in accumulate(shape, operator.mul))
    if not is_shape or code not in _BITS:
        raise CheckpointError(f"tensor {quoted(name)} has no valid shape and type: {quoted(str(entry))}.")
    header = Header(name, tuple(shape), _TYPES.get(code, code))
    bits = _BITS[code] * math.prod(shape)
    if bits != 8 * held:
        raise CheckpointError(
            f"tensor {quoted(name)} claims {bits // 8} bytes (shape {str(shape)[:200]}, {code}) "
            f"but its offsets hold {held}."
        )
    return header


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
    header: dict[str, Any] = {_METADATA: _metadata(dict(metadata))} if metadata else {}
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
