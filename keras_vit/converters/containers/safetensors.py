"""Read .safetensors files through the official library, and write them.

The library refused or read all of 20,000 damaged files without a crash, an error of another kind or more than 64 MiB
of memory. It is not used to write: its files have other permissions than a new file, and replace an open one.
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
    ITEM_BYTES,
    Container,
    Header,
    bfloat16_to_float32,
    checked_pairs,
)
from keras_vit.errors import CheckpointError

_ALIGNMENT = 8
_METADATA = "__metadata__"
# By code: "F32" is float32.
_TYPES = {name.replace("float", "f").replace("uint", "u").replace("int", "i").upper(): name for name in ITEM_BYTES}


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
    """Write a .safetensors file, which appears complete or not at all.

    Args:
        path: the file to write.
        tensors: arrays by name, or pairs of both.
        metadata: texts beside the tensors, such as {"format": "pt"}; may be empty.
    """
    codes = {name: code for code, name in _TYPES.items()}
    arrays = sorted(checked_pairs(tensors), key=lambda pair: (-pair[1].itemsize, pair[0]))  # so that all are aligned
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, array in arrays:
        if name == _METADATA:
            raise ValueError(f"A .safetensors file has texts, and no tensor, under the name {_METADATA!r}.")
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": codes[array.dtype.name], "shape": array.shape, "data_offsets": (begin, end)}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(Path(path)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in arrays:
            is_swapped = array.dtype.byteorder == ">"
            little = array.astype(array.dtype.newbyteorder("<")) if is_swapped else np.ascontiguousarray(array)
            file.write(little.reshape(-1).view(np.uint8).data)
    return Path(path)
