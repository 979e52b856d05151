"""Read and write NumPy's .npz, a zip archive with one .npy file for each tensor. Files are not trusted.

Reading goes through zipfile and NumPy, behind limits for all sizes that a file claims. Pickles are never read.
"""

import io
import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from keras_vit._util.atomic import replacing
from keras_vit._util.untrusted import parse_object
from keras_vit.converters.containers.archive import LimitedFile, open_archive
from keras_vit.converters.containers.base import (
    ITEM_BYTES,
    Container,
    Header,
    bfloat16_to_float32,
    checked_pairs,
    quoted,
)
from keras_vit.errors import CheckpointError

_MAX_NPY_HEADER = 10_000  # NumPy's own limit; a longer literal could exhaust Python's parser
_BFLOAT16 = np.dtype("V2")  # NumPy has no bfloat16: it saves two opaque bytes

# Version of a .npy file -> reader of its header. NumPy writes version 3 only for records.
_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

# Last part of a member's name -> kind of zip archive that has such a member.
_FOREIGN_MEMBERS = {
    "data.pkl": "a PyTorch file of an unknown kind (a pickle, which is never read): save its tensors as .safetensors",
    "model.weights.h5": "a .keras file, which is a model: converters.load opens it by its suffix .keras",
    "[Content_Types].xml": "an office document",
}


class NpzContainer(Container):
    """An .npz archive, open for reading. Pickled members are listed and never read."""

    def _read_headers(self, size: int) -> None:
        file = self._open_files.enter_context(LimitedFile(self.path))
        self._archive = open_archive(file, size)
        self.metadata = _metadata(self._archive.comment)
        self._members: dict[str, zipfile.ZipInfo] = {}
        members = self._archive.infolist()
        _check_names([info.orig_filename for info in members])
        for info in members:
            name = info.filename.removesuffix(".npy")
            self._members[name] = info
            with self._archive.open(info) as stream:
                self.headers[name] = _read_header(stream, name, info.file_size)

    def _read_tensor(self, header: Header) -> np.ndarray:
        with self._archive.open(self._members[header.name]) as stream:
            array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
        if header.dtype == "bfloat16":
            return bfloat16_to_float32(array)
        return array.astype(header.dtype, copy=False)


def _read_header(stream: IO[bytes], name: str, size: int) -> Header:
    """Read and check the header of a .npy member of `size` bytes."""
    start = io.BytesIO(stream.read(_MAX_NPY_HEADER))  # NumPy reads as many bytes as a header claims to have
    try:
        version = np.lib.format.read_magic(start)
    except ValueError as error:
        raise CheckpointError(f"member {quoted(name)} is not a .npy array.") from error
    if version not in _HEADER_READERS:
        raise CheckpointError(f"member {quoted(name)} is a .npy array of version {version}, which is not read.")
    shape, _, dtype = _HEADER_READERS[version](start)
    if any(side < 0 for side in shape):
        raise CheckpointError(f"tensor {quoted(name)} has the impossible shape {str(shape)[:200]}.")
    dtype_name = "bfloat16" if dtype == _BFLOAT16 else dtype.name
    header = Header(name, shape, dtype_name if dtype_name in ITEM_BYTES or dtype.hasobject else str(dtype))
    held = size - start.tell()
    if header.dtype in ITEM_BYTES and header.bytes != held:
        raise CheckpointError(
            f"tensor {quoted(name)} claims {header.bytes} bytes (shape {str(shape)[:200]}, {header.dtype}) "
            f"but the archive holds {held} for it."
        )
    return header


def _check_names(names: list[str]) -> None:
    for name in names:
        if foreign := _FOREIGN_MEMBERS.get(name.rpartition("/")[2]):
            raise CheckpointError(f"is {foreign}.")
    for name in names:
        _check_name(name)


def _check_name(name: str) -> None:
    """Raise for a name that no .npz has. (No name is used as a path here, but other programs may unpack the file.)"""
    if not name.endswith(".npy"):
        raise CheckpointError(f"has a member {quoted(name)}, which is not a .npy array, so the file is not an .npz.")
    if name.startswith("/") or "\\" in name or not name.isprintable() or ".." in name.split("/"):
        raise CheckpointError(f"has a member {quoted(name)}, which is a path and not a tensor's name.")


def _metadata(comment: bytes) -> dict[str, str]:
    """Return the metadata that `write_npz` put into an archive's comment; comments of other programs are ignored."""
    if not comment.startswith(b"{"):
        return {}
    metadata = parse_object(comment)
    if not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError("has a comment that is not an object of texts.")
    return metadata


def write_npz(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write an uncompressed .npz as `numpy.savez` does; the same tensors always give the same bytes.

    Args:
        path: the file to write; it appears complete or not at all.
        tensors: arrays by name, or pairs of both; from an iterator, only one is in memory at a time.
            bfloat16 arrays (ml_dtypes) are written as NumPy does, as two opaque bytes per element.
        metadata: texts for the archive's comment, which NumPy ignores; less than 64 KiB.
    """
    with replacing(Path(path)) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in checked_pairs(tensors):
            _check_name(f"{name}.npy")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:  # dated 1980-01-01, as numpy.savez does
                raw = array.view("V2") if array.dtype.name == "bfloat16" else array
                np.lib.format.write_array(stream, raw, allow_pickle=False)
            del array, raw  # before the next one is made
        if metadata:
            archive.comment = json.dumps(dict(metadata)).encode()
    return Path(path)
