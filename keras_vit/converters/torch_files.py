"""Read the files of PyTorch without PyTorch: `torch.save` of both its formats, and TorchScript's archives.

Their pickle is read as data, one operation after the other: nothing in it is imported or called. A tensor is a part of
a storage; other objects, such as the arguments of a training program, become a `Record` of their names and values.
Sources: CPython's pickletools; PyTorch, torch/serialization.py (_save, _legacy_save) and torch/_utils.py (_rebuild_*).
"""

import abc
import contextlib
import io
import math
import os
import pickletools
import struct
import sys
import zipfile
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import IO, Any, NamedTuple

import numpy as np

from keras_vit.errors import CheckpointError

# Operations of a pickle that are carried out, and bytes of one in an archive. A ViT-L with its optimizer takes 100,000.
MAX_OPERATIONS = 2_000_000
MAX_PICKLE_BYTES = 64 << 20
# Limits where a few operations could name much: letters of a name, models in a file, axes of a tensor, a count.
_MOST_LETTERS, _MOST_MODELS, _MOST_AXES, _LARGEST = 300, 8, 64, 2**63
_CHUNK = 1 << 20
_LEGACY_HEADERS = 3  # pickles in front of the content: a magic number, the version, the byte order
_PICKLE = "/data.pkl"  # behind the name of the archive's folder
_STORAGES = {
    **{"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Bool": "bool"},
    **{"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Untyped": "uint8"},
    **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
_NUMPY = [*_STORAGES.values(), "uint16", "uint32", "uint64"]
_CODES = {name: "u2" if name == "bfloat16" else np.dtype(name).str[1:] for name in _NUMPY}
# Packages of Python itself whose functions only make a value, which is not needed and not made. A file that would call
# another one of Python's is refused; what other packages would make is an object of theirs, and not made either.
_VALUES = ("pathlib", "datetime", "collections", "decimal", "fractions", "uuid", "zoneinfo", "_codecs", "copyreg")
_BUILTINS = {f"builtins.{name}" for name in ("bytearray", "complex", "slice", "range", "object")}
_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names that pickles of protocol 2 still have
_HARMLESS = {*_BUILTINS, "functools.partial", "argparse.Namespace"}
_REBUILD = "torch._utils._rebuild_"
# Operations that push what follows them: a number, a text or bytes. ("any" is what another operation made.)
_LITERALS = {
    operation.name
    for operation in pickletools.opcodes
    if operation.arg and operation.stack_after not in ([], [pickletools.anyobject])
}
_PUSHED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, type[Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": list}


class Global(NamedTuple):
    """A function or class that a pickle names; it is not imported."""

    name: str  # "torch.FloatStorage"


class Storage(NamedTuple):
    """The numbers of one or more tensors, of one type, in a part of the file."""

    dtype: str
    key: str
    size: int  # in bytes


class Tensor(NamedTuple):
    """A tensor: where its numbers lie in a storage, counted in numbers as PyTorch does."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str  # of NumPy, "bfloat16", or one that is not read


class Record(dict[str, Any]):
    """An object of some class: its items as a dict, and its attributes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.attributes: Any = {}


class TorchFile(abc.ABC):
    """An open file of PyTorch: its content, with `Tensor` in place of tensors, which are read one at a time."""

    content: Any
    _order = "<"  # of bytes, as in NumPy's types

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # of storages, in bytes, by their keys
        self._last: tuple[Storage, np.ndarray] | None = None

    def read(self, tensor: Tensor) -> np.ndarray:
        """Read a tensor, whose type NumPy has, into memory of its own; bfloat16 as uint16."""
        # Of a storage with many tensors, such as those of FSDP, one read is kept for the next tensor.
        if self._last is None or self._last[0] != tensor.storage:
            self._last = None
            self._last = (tensor.storage, self._read_bytes(tensor.storage.key))
        data = self._last[1]
        size = _itemsize(tensor.dtype)
        strides = [stride * size for stride in tensor.strides]
        values = np.ndarray(tensor.shape, self._order + _CODES[tensor.dtype], data, tensor.offset * size, strides)
        if data.size == values.nbytes and values.flags.c_contiguous and values.dtype.isnative:
            self._last = None  # most storages have one tensor: it takes the memory
            return values
        return values.astype(values.dtype.newbyteorder("="), order="C")

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise a CheckpointError if a tensor reaches beyond its storage."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
        needed = (tensor.offset + last + 1) * _itemsize(tensor.dtype) if math.prod(tensor.shape) else 0
        claimed, held = max(needed, tensor.storage.size), self._sizes.get(tensor.storage.key, 0)
        if claimed > held:
            raise CheckpointError(f"tensor {name!r:.200} claims {claimed} bytes, and the file holds {held} for it.")

    @abc.abstractmethod
    def _open(self, key: str) -> AbstractContextManager[IO[bytes]]:
        """Open a storage at its first byte."""

    def _read_bytes(self, key: str) -> np.ndarray:
        data = np.empty(self._sizes[key], np.uint8)
        with self._open(key) as stream:
            for start in range(0, len(data), _CHUNK):
                part = stream.read(min(_CHUNK, len(data) - start))
                data[start : start + _CHUNK] = np.frombuffer(part, np.uint8)
        return data


class ArchiveFile(TorchFile):
    """The zip archive of `torch.save` since PyTorch 1.6, or of `torch.jit.save`, whose directory has been checked."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        super().__init__()
        self._archive = archive
        path = next(name for name in archive.namelist() if name.endswith(_PICKLE))
        self._folder = path.removesuffix(_PICKLE)
        if (size := archive.getinfo(path).file_size) > MAX_PICKLE_BYTES:
            raise CheckpointError(f"has a pickle of {size:,} bytes; at most {MAX_PICKLE_BYTES:,} are read.")
        start = f"{self._folder}/data/"
        for info in archive.infolist():
            if info.filename.startswith(start):
                self._sizes[info.filename.removeprefix(start)] = info.file_size
        if f"{self._folder}/byteorder" in archive.namelist():
            self._order = ">" if archive.read(f"{self._folder}/byteorder") == b"big" else "<"
        self.content = weights_of(read_pickle(io.BytesIO(archive.read(path))))

    def _open(self, key: str) -> AbstractContextManager[IO[bytes]]:
        return self._archive.open(f"{self._folder}/data/{key}")


class LegacyFile(TorchFile):
    """The format of `torch.save` before PyTorch 1.6: pickles, and behind them one storage after the other."""

    def __init__(self, raw: io.FileIO, size: int) -> None:
        super().__init__()
        self._file = file = _Clamped(raw)
        *_, system = [read_pickle(file) for _ in range(_LEGACY_HEADERS)]
        self._order = "<" if system["little_endian"] else ">"
        storages: dict[str, Storage] = {}
        self.content = weights_of(read_pickle(file, storages))
        self._starts: dict[str, int] = {}
        for key in read_pickle(file):
            (length,) = struct.unpack(f"{self._order}q", file.read(8))
            self._starts[key] = file.tell()
            if (dtype := storages[key].dtype) not in _CODES:
                raise CheckpointError(f"has a storage of type {dtype!r:.100}, which is not read.")
            self._sizes[key] = length * _itemsize(dtype)
            if not 0 <= self._sizes[key] <= size - file.tell():
                raise CheckpointError(f"is cut short: it states {self._sizes[key]} bytes for one of its storages.")
            file.seek(self._sizes[key], os.SEEK_CUR)

    def _open(self, key: str) -> AbstractContextManager[IO[bytes]]:
        self._file.seek(self._starts[key])
        return contextlib.nullcontext(self._file)


class _Clamped(io.BufferedReader):
    """A file that does not take the memory for more bytes than are left in it."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = os.fstat(self.fileno()).st_size - self.tell()
        return super().read(left if size is None or size < 0 else min(size, left))


def _itemsize(dtype: str) -> int:
    """Bytes of one number; 1 for types that are not read."""
    return np.dtype(_CODES[dtype]).itemsize if dtype in _CODES else 1


def is_archive(names: Iterable[str]) -> bool:
    """Recognise an archive of PyTorch by the names of its members."""
    return any(name.endswith(_PICKLE) for name in names)


def is_legacy(start: bytes) -> bool:
    """Recognise the older format by its first bytes, a pickle of a magic number."""
    return b"\x8a\nl\xfc\x9cF\xf9" in start[:24]


# ---- objects


def weights_of(content: Any) -> Any:
    """Replace whole models, also those in a dict, by a dict of their tensors with the names that `state_dict` gives."""
    if isinstance(content, Record) and content.attributes:
        return _named_tensors(content)
    if not isinstance(content, dict):
        return content
    models = [key for key, value in content.items() if _is_model(value)][:_MOST_MODELS]
    return {**content, **{key: _named_tensors(content[key]) for key in models}}


def _is_model(value: Any) -> bool:
    return isinstance(value, Record) and isinstance(value.attributes, dict) and "_modules" in value.attributes


def _named_tensors(model: Record) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    todo, seen = [("", model)], set()
    while todo:
        prefix, record = todo.pop()
        if id(record) in seen or not isinstance(record.attributes, dict):
            continue
        seen.add(id(record))
        parts = [record.attributes]  # of TorchScript; Python's modules have theirs in three dicts
        if _is_model(record):
            parts = [record.attributes.get(part) or {} for part in ("_parameters", "_buffers", "_modules")]
        left_out = record.attributes.get("_non_persistent_buffers_set", ())
        for name, value in (item for part in parts for item in part.items()):
            if len(prefix) + len(name) > _MOST_LETTERS:
                continue
            if isinstance(value, Tensor) and name not in left_out:
                tensors[prefix + name] = value
            elif isinstance(value, Record):
                todo.append((f"{prefix}{name}.", value))
    return tensors


def _make(function: Any, args: Any) -> Any:
    """Make what a call in a pickle stands for: a tensor, a dict, a tuple, or a record."""
    name = function.name
    match name.removeprefix(_REBUILD), args:
        case "tensor" | "tensor_v2" | "tensor_v3", (Storage() as storage, int(offset), shape, strides, *rest):
            dtype = rest[2].name.removeprefix("torch.") if name.endswith("v3") else storage.dtype
            is_counted = len(shape) == len(strides) <= _MOST_AXES
            if not is_counted or not all(map(_is_count, (offset, *shape, *strides))):
                raise CheckpointError("has a tensor whose shape, strides or place are no counts.")
            if any(part for part in rest[2:] if isinstance(part, dict)):  # negated or conjugated when it is used
                dtype = f"lazy {dtype}"
            return Tensor(storage, offset, tuple(shape), tuple(strides), dtype)
        case "parameter" | "parameter_with_state", (Tensor() as tensor, *_):
            return tensor
        case "torch._tensor._rebuild_from_type_v2", (Global() as inner, Global(kind), tuple(values), _) if kind in (
            "torch.Tensor",
            "torch.nn.parameter.Parameter",
        ):
            return _make(inner, values)
        case "torch.Size", (tuple(sizes),):
            return sizes
        case "collections.OrderedDict", ():
            return {}
        case "collections.OrderedDict", (list(pairs),):  # of Python 2
            items = {key: value for key, value in pairs if isinstance(key, str)}
            pairs.clear()  # a list that is named a thousand times costs as much as once
            return items
        case "builtins.set" | "builtins.frozenset", (list(items),):
            return items
        case "copyreg._reconstructor", (Global(kind), *_):
            return Record(kind)
        case _ if name.startswith((_REBUILD, "torch._tensor._rebuild_")):  # sparse, quantized, of a class of its own
            return Tensor(Storage("uint8", "", 0), 0, (0,), (1,), name)
    package = name.partition(".")[0]
    if name not in _HARMLESS and package in sys.stdlib_module_names and package not in _VALUES:
        raise CheckpointError(
            f"is a PyTorch file that holds more than weights and is not run: it would call {name!r:.200}. Save its "
            "tensors alone where it was written: checkpoint = torch.load(path, weights_only=False); "
            'torch.save(dict(checkpoint["state_dict"]), "weights.pth"), with the key that it has for them.'
        )
    return Record(name)


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number < _LARGEST


def _storage(reference: Any, storages: dict[str, Storage]) -> Any:
    """Read what a pickle says of a storage; `storages` collects them."""
    match reference:
        case "module", Global() as kind, *_:  # with the source code of its class
            return kind
        case "storage", Global(name), str(key), _, length, *view if view in ([], [None]) and _is_count(length):
            dtype = _STORAGES.get(name.rpartition(".")[2].removesuffix("Storage"), name)
            storages[key] = Storage(dtype, key, length * _itemsize(dtype))
            return storages[key]
    raise CheckpointError("has a storage that is part of another, which is not read: save it with a newer PyTorch.")


# ---- the pickle


def read_pickle(stream: IO[bytes], storages: dict[str, Storage] | None = None) -> Any:
    """Read the next pickle in a stream; `storages` collects those that it names.

    Keys of dicts that are no texts, such as the numbers of an optimizer's tensors, are left out.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}  # by number
    marks: list[int] = []
    storages = {} if storages is None else storages

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    for count, (operation, value, _) in enumerate(pickletools.genops(stream)):
        if count > MAX_OPERATIONS:
            raise CheckpointError(f"has a pickle of more than {MAX_OPERATIONS:,} operations.")
        match operation.name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case name if name in _PUSHED:
                stack.append(_PUSHED[name])
            case name if name in _EMPTY:
                stack.append(_EMPTY[name]())
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                size = int(name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "FROZENSET":
                stack.append(since_mark())
            case "SETITEM" | "SETITEMS" as name:
                items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark()
                pairs = zip(items[::2], items[1::2], strict=True)
                stack[-1].update((key, value) for key, value in pairs if isinstance(key, str))
            case "APPEND" | "APPENDS" | "ADDITEMS" as name:
                items = [stack.pop()] if name == "APPEND" else since_mark()
                if isinstance(stack[-1], list):  # or an object of a class that is a list
                    stack[-1].extend(items)
            case "POP":
                del stack[-1]
            case "POP_MARK":
                since_mark()
            case "GLOBAL":
                module, _, name = str(value).partition(" ")
                stack.append(Global(f"{_PYTHON_2.get(module, module)}.{name}"))
            case "STACK_GLOBAL":
                name = ".".join(stack[-2:])
                stack[-2:] = [Global(name if len(name) <= _MOST_LETTERS else f"{name[:_MOST_LETTERS]}...")]
            case "BINPERSID":
                stack[-1] = _storage(stack[-1], storages)
            case "REDUCE":
                stack[-2:] = [_make(stack[-2], stack[-1])]
            case "NEWOBJ":
                stack[-2:] = [Record(stack[-2].name)]
            case "NEWOBJ_EX":
                stack[-3:] = [Record(stack[-3].name)]
            case "BUILD":
                attributes = stack.pop()
                if isinstance(stack[-1], Record):  # not a dict, whose attributes nothing needs
                    stack[-1].attributes = attributes
            case name if name in _LITERALS:
                stack.append(value)
            case name:
                raise CheckpointError(f"has a pickle with the operation {name}, which PyTorch does not write.")
    return stack.pop()
