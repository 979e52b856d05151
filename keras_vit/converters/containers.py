"""Open files of named tensors: .npz, .safetensors, Keras' .weights.h5 and .keras, PyTorch's .pth.

The kind of file is recognised by its first bytes, not by its name. Headers are read first, then one tensor at a time.
NumPy, safetensors and h5py read the files; PyTorch's are read by `torch_files`. No pickle is run, and what zip archives
and headers claim to hold has limits. The HDF5 library trusts its files: a crafted .h5 or .keras can end the process.
"""

import abc
import collections
import contextlib
import math
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import h5py
import numpy as np
from safetensors import SafetensorError, safe_open

from keras_vit._util.checks import as_path
from keras_vit._util.files import MAX_JSON_BYTES, parse_object
from keras_vit._util.text import abbreviated, printable, warn
from keras_vit.converters import torch_files
from keras_vit.converters.config_json import read_object
from keras_vit.errors import CheckpointError

_CODES = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1")
# The types that are read, and the bytes of one element in a file.
ITEM_BYTES = {np.dtype(code).name: int(code[1]) for code in _CODES} | {"bfloat16": 2, "bool": 1}
_BFLOAT16 = np.dtype("V2")  # NumPy and h5py have no bfloat16: they save two opaque bytes

# A compressed file may unpack to the larger of this many bytes and this many times its own size. Trained weights hardly
# compress. A file of zeros beyond that must be stored uncompressed, as all official files are.
MAX_UNPACKED_BYTES = 256 << 20
MAX_UNPACKED_RATIO = 100

DOWNLOAD_AGAIN = "Download it again."
_READABLE = "Files that can be read: .npz, .safetensors, Keras' .weights.h5 and PyTorch's .pth"
_ZIP_MARKS = (b"PK\3\4", b"PK\5\6")
# Offset of a mark, the mark, and the kind of file that has it.
_FOREIGN: tuple[tuple[int, bytes | tuple[bytes, ...], str], ...] = (
    (0, (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"), "a pickle, which could run code and is never read"),
    (0, b"\x93NUMPY", "a single .npy array"),
    (0, b"version https://git-lfs", "a Git LFS pointer to the file (run git lfs pull)"),
    (0, b"<", "an HTML or XML page, perhaps a server's error message"),
    (0, b"{", "a JSON file"),
    (4, b"TFL3", "a TFLite model, for keras_vit.export.load and keras-vit predict, embed, search, evaluate and bench"),
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

    Opening reads every header and no tensor. Each tensor is read into its own memory and outlives the container.
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
        if (header := self.headers.get(name)) is not None and header.name in self._joined:
            return self._joined[header.name].read(header.name)
        with reading(self.path):
            if self._is_closed:
                raise CheckpointError("is closed.")
            if header is None:
                raise CheckpointError(f"has no tensor {quoted(name)} among its {len(self.headers)}.")
            if header.dtype == "object":
                raise CheckpointError(f"tensor {quoted(name)} holds pickled objects, which are never read.")
            if header.dtype not in ITEM_BYTES:
                raise CheckpointError(
                    f"tensor {quoted(name)} is {quoted(header.dtype)}. Types read: {', '.join(ITEM_BYTES)}."
                )
            array = self._read_tensor(header)
            # NumPy has no bfloat16, which is the upper half of a float32.
            if header.dtype == "bfloat16" and array.dtype != np.float32:
                array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            return array

    def join(self, other: "Container") -> None:
        """Add the tensors of another file of the same model; closing this container closes both."""
        self._open_files.enter_context(other)
        if duplicates := self.headers.keys() & other.headers.keys():
            raise CheckpointError(f"{other.path}: has tensor {quoted(min(duplicates))}, as {self.path} has.")
        self.headers |= other.headers
        self._joined |= dict.fromkeys(other.headers, other)

    def select(self, names: Mapping[str, str]) -> None:
        """Keep some tensors alone, by other names: new name -> name until now."""
        self.headers = {new: self.headers[old] for new, old in names.items()}

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
        """Read one tensor, whose dtype has been checked; bfloat16 in any dtype of two bytes, or as float32."""


def open_container(path: str | os.PathLike[str]) -> Container:
    """Open a file of tensors, whatever its name, for a `with` statement; only its headers are read."""
    path = Path(path)
    with reading(path):
        path.stat()
        if not path.is_file():
            raise CheckpointError(f"is {'a folder' if path.is_dir() else 'not a regular file'}. {_READABLE}.")
        with path.open("rb") as file:
            container_class = _container_class(path, file.read(512))
    return container_class(path)


def _container_class(path: Path, start: bytes) -> type[Container]:
    """Find the class that reads a file with these first bytes."""
    if start.startswith(_ZIP_MARKS):
        with zipfile.ZipFile(path) as archive:
            return TorchContainer if torch_files.is_archive(archive.namelist()) else NpzContainer
    if torch_files.is_legacy(start):
        return TorchContainer
    if start[8:9] == b"{":  # after the eight bytes of length, which can have any value
        return SafetensorsContainer
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return Hdf5Container
    for offset, mark, kind in _FOREIGN:
        if start.startswith(mark, offset):
            raise CheckpointError(f"is {kind}. {_READABLE}.")
    received = f"starts with the bytes {start[:8].hex(' ')}" if start else "is empty"
    raise CheckpointError(f"{received}. {_READABLE}.")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Replace every error that the bytes of a file can cause in a parser by a CheckpointError that names the file."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__
    except Exception as error:  # zipfile, zlib, ast, struct, NumPy, h5py and safetensors raise many types for damage
        reason = printable(f"{type(error).__name__}: {error}"[:300])
        raise CheckpointError(f"{path}: cannot be read ({reason}). If it is damaged, download it again.") from error


def quoted(text: str) -> str:
    """Quote, escape and shorten a name from a file for a message."""
    return repr(text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}")


def _check_unpacked(unpacked: int, size: int) -> None:
    """Raise a CheckpointError if a file of `size` bytes claims to hold far more."""
    limit = max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * size)
    if unpacked > limit:
        raise CheckpointError(
            f"{size} bytes claim to unpack to {unpacked}; at most {limit} are unpacked. "
            "If the file is good, save it again uncompressed (an .npz with numpy.savez)."
        )


def _open_zip(path: Path) -> zipfile.ZipFile:
    """Open a zip archive and check what its directory claims; zipfile compares each member with it, and its CRC."""
    archive = zipfile.ZipFile(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(size - 22 - len(archive.comment))
        end = file.read(22)
    # zipfile accepts an archive that was cut within its comment, which holds metadata here.
    if end[:4] != b"PK\5\6" or int.from_bytes(end[20:], "little") != len(archive.comment):
        raise CheckpointError(f"has a damaged directory: it was cut short. {DOWNLOAD_AGAIN}")
    _check_unpacked(sum(info.file_size for info in archive.infolist()), size)
    return archive


# ---- .npz


class NpzContainer(Container):
    """An .npz, a zip archive with one .npy file for each tensor. Pickled tensors are listed and never read."""

    def _read_headers(self, size: int) -> None:
        self._archive = self._open_files.enter_context(_open_zip(self.path))
        names = self._archive.namelist()
        if "model.weights.h5" in names:
            raise CheckpointError("is a .keras file, which is a model: converters.load opens it by its suffix .keras.")
        if foreign := [name for name in names if not name.endswith(".npy")]:
            raise CheckpointError(f"has a member {quoted(foreign[0])}, which is no .npy array, so it is not an .npz.")
        if self._archive.comment.startswith(b"{"):  # by `write_npz`; comments of other programs are ignored
            self.metadata = parse_object(self._archive.comment)
        if not all(isinstance(text, str) for text in self.metadata.values()):
            raise CheckpointError("has a comment that is not an object of texts.")
        for info in self._archive.infolist():
            name = info.filename.removesuffix(".npy")
            with self._archive.open(info) as stream:
                self.headers[name] = _read_npy_header(stream, name, info.file_size)

    def _read_tensor(self, header: Header) -> np.ndarray:
        with self._archive.open(f"{header.name}.npy") as stream:
            array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
        return array if header.dtype == "bfloat16" else array.astype(header.dtype, copy=False)


def _read_npy_header(stream: IO[bytes], name: str, size: int) -> Header:
    """Read the header of a .npy member of `size` bytes, and check that the member holds what the header claims."""
    if np.lib.format.read_magic(stream) == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    dtype_name = "bfloat16" if dtype == _BFLOAT16 else dtype.name
    header = Header(name, shape, dtype_name if dtype_name in ITEM_BYTES or dtype.hasobject else str(dtype))
    held = size - stream.tell()
    if header.dtype in ITEM_BYTES and header.bytes != held:
        raise CheckpointError(
            f"tensor {quoted(name)} claims {header.bytes} bytes (shape {str(shape)[:200]}, {header.dtype}) "
            f"but the archive holds {held} for it."
        )
    return header


def check_npy(stream: IO[bytes], size: int) -> None:
    """Raise a ValueError unless a .npy file of `size` bytes has a header that can be read and what it claims.

    NumPy parses headers as Python, with errors of many types, and takes the memory that they claim.
    """
    try:
        if _read_npy_header(stream, "array", size).dtype not in ITEM_BYTES:
            raise ValueError("it has other things than numbers")
    except Exception as error:
        raise ValueError(f"is not a .npy file of numbers, or it is damaged: {str(error)[:200]}") from None


# ---- .safetensors

# By code: "F32" is float32.
TYPE_CODES = {name.replace("float", "f").replace("uint", "u").replace("int", "i").upper(): name for name in ITEM_BYTES}


class SafetensorsContainer(Container):
    """A .safetensors file. Of the types that NumPy lacks, only bfloat16 can be read."""

    def _read_headers(self, size: int) -> None:
        try:
            # The default back end maps the file into memory: the process crashes if another one cuts the file short.
            self._tensors = self._open_files.enter_context(safe_open(self.path, "numpy", backend="pread"))
        except SafetensorError as error:
            reason = printable(str(error)[:200])
            raise CheckpointError(f"has no valid safetensors header: {reason}. {DOWNLOAD_AGAIN}") from error
        self.metadata = self._tensors.metadata() or {}
        for name in self._tensors.offset_keys():
            tensor = self._tensors.get_slice(name)
            code = tensor.get_dtype()
            self.headers[name] = Header(name, tuple(tensor.get_shape()), TYPE_CODES.get(code, code))

    def _read_tensor(self, header: Header) -> np.ndarray:
        array: np.ndarray = self._tensors.get_tensor(header.name)
        return array


# ---- .weights.h5 and .keras

_KERAS_METADATA, _KERAS_CONFIG, _KERAS_WEIGHTS = "metadata.json", "config.json", "model.weights.h5"


class Hdf5Container(Container):
    """An HDF5 file of plain arrays; their names are their paths, "layers/dense/vars/0". Links are not followed."""

    def _read_headers(self, size: int) -> None:
        self._open_hdf5(self.path)

    def _open_hdf5(self, path: Path) -> None:
        self._file = self._open_files.enter_context(h5py.File(path, "r"))
        self._file.visititems(self._add)
        _check_unpacked(sum(header.bytes for header in self.headers.values()), path.stat().st_size)

    def _add(self, name: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset):
            known = "bfloat16" if item.dtype == _BFLOAT16 else item.dtype.name
            dtype = known if known in ITEM_BYTES else f"HDF5's {item.dtype}"
            self.headers[name] = Header(name, item.shape or (), dtype)

    def _read_tensor(self, header: Header) -> np.ndarray:
        array = np.asarray(self._file[header.name][()])
        return array if header.dtype == "bfloat16" else array.astype(header.dtype, copy=False)


class KerasContainer(Hdf5Container):
    """The weights of a .keras file, unpacked into a temporary folder as `weights_path` while the container is open."""

    def _read_headers(self, size: int) -> None:
        folder = self._open_files.enter_context(tempfile.TemporaryDirectory())
        with _open_keras_zip(self.path) as archive:
            self.weights_path = Path(archive.extract(_KERAS_WEIGHTS, folder))
        self._open_hdf5(self.weights_path)


def read_keras_config(path: Path) -> dict[str, Any]:
    """Read the config.json of a .keras file, without building anything from it."""
    with reading(path), _open_keras_zip(path) as archive:
        if (size := archive.getinfo(_KERAS_CONFIG).file_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"has a config.json of {size:,} bytes; the limit is {MAX_JSON_BYTES:,}.")
        try:
            return parse_object(archive.read(_KERAS_CONFIG))
        except ValueError as error:
            raise CheckpointError(f"has a config.json that {error}") from error


def _open_keras_zip(path: Path) -> zipfile.ZipFile:
    """Open a .keras file, and check that it has the members that Keras writes for a model."""
    archive = _open_zip(path)
    names = {*archive.namelist(), _KERAS_METADATA}
    known = [_KERAS_METADATA, _KERAS_CONFIG, _KERAS_WEIGHTS]
    if names != set(known):
        missing = [name for name in known if name not in names]
        wrong = f"no member {missing[0]!r}" if missing else f"a member {quoted(min(names.difference(known)))}"
        raise CheckpointError(f"has {wrong}; a .keras file of keras_vit has {known}.")
    return archive


# ---- .pth

# Tensors may share their data, such as tied weights, and together describe this many times the bytes of the file.
_SHARING_RATIO = 2
_MOST_LETTERS = 1000  # of the keys in front of a tensor, which a forged file can name many times


class TorchContainer(Container):
    """A file of `torch.save` or `torch.jit.save`; PyTorch is not needed, and nothing in it is run."""

    def _read_headers(self, size: int) -> None:
        self._torch: torch_files.TorchFile
        if zipfile.is_zipfile(self.path):
            self._torch = torch_files.ArchiveFile(self._open_files.enter_context(_open_zip(self.path)))
        else:
            file = self._open_files.enter_context(self.path.open("rb", buffering=0))
            self._torch = torch_files.LegacyFile(file, size)
        self._tensors = _tensors_by_name(self._torch.content)
        for name, tensor in self._tensors.items():
            self.headers[name] = Header(name, tensor.shape, tensor.dtype)
        described: collections.Counter[str] = collections.Counter()  # of each dict: one of them is read
        for name, header in self.headers.items():
            described[name.rpartition("/")[0]] += header.bytes
        if (most := max(described.values())) > _SHARING_RATIO * size:
            raise CheckpointError(
                f"is a PyTorch file of {size} bytes whose tensors share their data and describe {most} bytes; "
                f"at most {_SHARING_RATIO} times the file are read. Save copies of the tensors (tensor.clone())."
            )
        for name, tensor in self._tensors.items():
            self._torch.check(name, tensor)

    def _read_tensor(self, header: Header) -> np.ndarray:
        return self._torch.read(self._tensors[header.name])


def _tensors_by_name(loaded: Any) -> dict[str, Any]:
    """Collect the tensors of nested dicts by the path of keys to each, joined by slashes."""
    tensors: dict[str, Any] = {}
    groups: list[tuple[str, Any]] = [("", loaded)]
    seen: set[int] = set()
    while groups:
        place, group = groups.pop(0)
        if not isinstance(group, Mapping) or id(group) in seen or len(place) > _MOST_LETTERS:  # it can contain itself
            continue
        seen.add(id(group))
        tensors |= {f"{place}{name}": value for name, value in group.items() if isinstance(value, torch_files.Tensor)}
        groups += [(f"{place}{name}/", value) for name, value in group.items()]
    if not tensors:
        held = loaded.items() if isinstance(loaded, Mapping) else ()
        keys = ", ".join(f"{key!s:.40} ({type(value).__name__})" for key, value in [*held][:20])
        kind = f"an object of {loaded.name}" if isinstance(loaded, torch_files.Record) else type(loaded).__name__
        raise CheckpointError(
            f"is a PyTorch file without tensors by name. It holds: {keys or kind[:200]}. Where it was written, save "
            "model.state_dict()."
        )
    return tensors


# ---- the files of a checkpoint

# The files of weights in a folder; the first one found is read. A training run's folder has a model.keras.
_WEIGHTS = (
    "model.keras",
    "model.safetensors",
    "*.safetensors",
    "checkpoint.npz",
    "*.npz",
    "model.weights.h5",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
    *("*.pth", "*.pt", "*.ckpt", "*.pth.tar", "*.bin"),
    "tf_model.h5",
)
_SAVED_MODEL = "saved_model.pb"
_CHECKPOINTS, _BEST = "checkpoints", "best.keras"  # of a training run's folder, which it has before model.keras


def find_weights(path: str | os.PathLike[str]) -> Path:
    """Find the file of weights at a path: the path itself, or the one such file in a folder."""
    path = Path(as_path(path, "path"))
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {str(path)!r}")
    if not path.is_dir():
        return path
    for pattern in _WEIGHTS:
        files = sorted(path.glob(pattern))
        if not set(files[1:]).issubset(_files_of(files[0]) if files else ()):
            names = [file.name for file in files]
            raise CheckpointError(f"{path} holds more than one file of weights: name one of them: {abbreviated(names)}")
        if files:
            parts = re.compile(rf"{re.escape(files[0].stem)}-\d{{5}}-of-\d{{5}}{re.escape(files[0].suffix)}")
            if others := sorted(file.name for file in path.iterdir() if parts.fullmatch(file.name)):
                warn(
                    f"keras_vit: {path} holds {files[0].name}, which is read, and another checkpoint in several files: "
                    f"{abbreviated(others)}. To read that one, name one of its files."
                )
            return files[0]
    if (path / _CHECKPOINTS).is_dir():
        best = f", or name {path / _BEST}, its best model so far" if (path / _BEST).exists() else ""
        raise CheckpointError(
            f"{path} is a training run that has not finished: it has no {_WEIGHTS[0]} yet. Start the run again with "
            f"the same arguments to finish it{best}."
        )
    if (path / _SAVED_MODEL).exists():
        raise CheckpointError(
            f"{path} is a SavedModel, which servers and TensorFlow run (tf.saved_model.load), and keras-vit verify "
            "compares with its model. Expected: the model that it was exported from"
        )
    names = sorted(file.name for file in path.iterdir())[:10]
    raise CheckpointError(f"{path} holds none of {list(_WEIGHTS)}. It holds {names}")


def is_keras_file(path: Path) -> bool:
    """Recognise a file of `model.save("vit.keras")` by its name."""
    return path.suffix.casefold() == ".keras"


def open_files(file: Path) -> Container:
    """Open a file of weights, with all others if it is one of a checkpoint in several files."""
    first, *others = _files_of(file)
    container = open_container(first)
    for other in others:
        container.join(open_container(other))
    return container


def _files_of(file: Path) -> list[Path]:
    """List the files of a checkpoint: as many as the name of one says, and those that an index beside it names."""
    names = {file.name}
    if match := re.fullmatch(r"(.*-)\d{5}-of-(\d{5})(\..*)", file.name):
        start, count, end = match.groups()
        names |= {f"{start}{number:05}-of-{count}{end}" for number in range(1, int(count) + 1)}
    for index in file.parent.glob("*.index.json"):
        weight_map = read_object(index).get("weight_map")
        if isinstance(weight_map, dict) and file.name in (indexed := {str(name) for name in weight_map.values()}):
            names |= indexed
    if missing := sorted(names.difference(other.name for other in file.parent.iterdir())):
        raise CheckpointError(
            f"{file.parent} lacks {len(missing)} of the {len(names)} files of this checkpoint: {quoted(missing[0])}"
            f"{', ...' if missing[1:] else ''}. Download all of them again into one folder."
        )
    return [file.parent / name for name in sorted(names)]
