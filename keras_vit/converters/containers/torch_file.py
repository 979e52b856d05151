"""Read PyTorch's .pth and .bin files, zip archives of a pickle and tensors, through PyTorch; no code in them is run."""

import argparse
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit._util.text import install_command
from keras_vit._util.untrusted import directory_limit
from keras_vit.converters.containers.archive import LimitedFile, open_archive
from keras_vit.converters.containers.base import DOWNLOAD_AGAIN, Container, Header, quoted
from keras_vit.errors import CheckpointError

PICKLE = "data.pkl"
_INSTALL_TORCH = (
    "is a PyTorch file (a pickle, which is never read by itself): save its tensors as .safetensors, or let PyTorch "
    f"read them weights-only: {install_command('torch')}"
)
# Tensors may share their data, such as tied weights, and together describe this many times the bytes of the file.
_SHARING_RATIO = 2
_STATE_KEYS = ("state_dict", "model")  # under which training programs (timm, DeiT, Lightning) keep the weights


def is_torch(start: bytes) -> bool:
    """Return whether a file starts as PyTorch's do: a zip archive whose first member is a pickle in a folder."""
    length = int.from_bytes(start[26:28], "little")
    return start.startswith(b"PK\3\4") and start[30 : 30 + length].endswith(f"/{PICKLE}".encode())


class TorchContainer(Container):
    """A file of `torch.save`, open for reading: PyTorch reads it weights-only. The tensors stay in the file."""

    def _read_headers(self, size: int) -> None:
        self._tensors: dict[str, Any] = {}
        self._check_archive(size)
        for name, tensor in _state_dict(self._load()).items():
            kind = str(tensor.dtype if str(tensor.layout) == "torch.strided" else tensor.layout)
            header = Header(name, tuple(tensor.shape), kind.removeprefix("torch."))
            if header.bytes > size:  # a view that repeats its elements
                raise CheckpointError(
                    f"is a PyTorch file whose tensor {quoted(name)} is larger than the file. {DOWNLOAD_AGAIN}"
                )
            self._tensors[name], self.headers[name] = tensor, header
        described = sum(header.bytes for header in self.headers.values())
        if described > _SHARING_RATIO * size:
            raise CheckpointError(
                f"is a PyTorch file of {size} bytes whose tensors share their data and describe {described} bytes; "
                f"at most {_SHARING_RATIO} times the file are read. Save copies of the tensors (tensor.clone())."
            )

    def _check_archive(self, size: int) -> None:
        """Limit what PyTorch unpacks, because it trusts the sizes that an archive claims."""
        with LimitedFile(self.path) as file:
            members = open_archive(file, size).infolist()
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"is a PyTorch file with a compressed member {quoted(member.filename)}.")
            if member.filename.endswith(f"/{PICKLE}") and member.file_size > directory_limit(size):
                raise CheckpointError(f"is a PyTorch file with a pickle of {member.file_size} bytes.")

    def _load(self) -> Any:
        try:
            import torch
        except ImportError as error:
            raise CheckpointError(f"{_INSTALL_TORCH}.") from error
        try:
            # Training programs save their command line, an argparse.Namespace, beside the weights.
            with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings(action="ignore"):
                return torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(f"is a PyTorch file that holds more than weights and is not run: {reason}") from error
        except Exception as error:  # PyTorch documents no errors for damaged files
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            raise CheckpointError(f"is a PyTorch file that PyTorch cannot read: {reason}. {DOWNLOAD_AGAIN}") from error

    def _read_tensor(self, header: Header) -> np.ndarray:
        tensor = self._tensors[header.name].detach()
        # A copy, as in the other containers; NumPy has no bfloat16.
        tensor = tensor.float() if header.dtype == "bfloat16" else tensor.clone()
        array: np.ndarray = tensor.contiguous().numpy()
        return array

    def close(self) -> None:
        """Close the file; arrays already read stay valid."""
        self._tensors = {}
        super().close()


def _state_dict(loaded: Any) -> dict[str, Any]:
    """Return the tensors by name, under whichever key a training program saved them."""
    for key in _STATE_KEYS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    tensors = {}
    if isinstance(loaded, Mapping):
        tensors = {name: value for name, value in loaded.items() if isinstance(name, str) and hasattr(value, "layout")}
    if not tensors:
        raise CheckpointError(f"is a PyTorch file without tensors by name. It holds: {str(type(loaded))[:100]}")
    return tensors
