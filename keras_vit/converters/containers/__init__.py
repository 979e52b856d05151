"""Open files of tensors; the kind of file is recognised from its first bytes, not from its name."""

import os
from pathlib import Path

from keras_vit._util.untrusted import HDF5_MAGIC
from keras_vit.converters.containers.base import Container, Header, reading
from keras_vit.converters.containers.hdf5 import Hdf5Container
from keras_vit.converters.containers.npz import NpzContainer, write_npz
from keras_vit.converters.containers.safetensors import SafetensorsContainer, write_safetensors
from keras_vit.converters.containers.torch_file import TorchContainer, is_torch
from keras_vit.errors import CheckpointError

__all__ = ["CheckpointError", "Container", "Header", "open_container", "write_npz", "write_safetensors"]

_READABLE = "Files that can be read: .npz, .safetensors, Keras' .weights.h5 and, with PyTorch installed, .pth"

_ZIP_MARKS = (b"PK\3\4", b"PK\5\6")

# Offset of a mark, the mark, and the kind of file that has it.
_FOREIGN: tuple[tuple[int, bytes | tuple[bytes, ...], str], ...] = (
    (0, b"\x80\2\x8a\nl\xfc\x9cF\xf9", "a file of PyTorch before 1.6, a pickle: save it again with a newer PyTorch"),
    (0, (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"), "a pickle, which could run code and is never read"),
    (0, b"\x93NUMPY", "a single .npy array"),
    (0, b"version https://git-lfs", "a Git LFS pointer to the file (run git lfs pull)"),
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard file"),
    (0, b"GGUF", "a GGUF file"),
    (0, b"<", "an HTML or XML page, perhaps a server's error message"),
    (0, b"{", "a JSON file"),
    (4, b"TFL3", "a TFLite model"),
    (257, b"ustar", "a tar archive"),
)
_SNIFFED_BYTES = 512


def open_container(path: str | os.PathLike[str]) -> Container:
    """Open a file of tensors, whatever its name, for a `with` statement; only its headers are read."""
    path = Path(path)
    with reading(path):
        path.stat()
        if not path.is_file():
            raise CheckpointError(f"is {'a folder' if path.is_dir() else 'not a regular file'}. {_READABLE}.")
        with path.open("rb") as file:
            container_class = _container_class(file.read(_SNIFFED_BYTES))
    return container_class(path)


def _container_class(start: bytes) -> type[Container]:
    """Return the class that reads a file with these first bytes."""
    if is_torch(start):
        return TorchContainer
    if start.startswith(_ZIP_MARKS):
        return NpzContainer
    if start[8:9] == b"{":  # after the eight bytes of length, which can have any value
        return SafetensorsContainer
    if start.startswith(HDF5_MAGIC):
        return Hdf5Container
    for offset, mark, kind in _FOREIGN:
        if start.startswith(mark, offset):
            raise CheckpointError(f"is {kind}. {_READABLE}.")
    seen = f"starts with the bytes {start[:8].hex(' ')}" if start else "is empty"
    raise CheckpointError(f"{seen}. {_READABLE}.")
