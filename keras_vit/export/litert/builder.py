"""Write LiteRT (.tflite) files tensor by tensor, without a second copy of the weights in memory.

The flatbuffers package serialises the graph, which is small; the weights follow it, directly from their arrays.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from keras_vit._util.text import needs_extra

Shape = tuple[int | None, ...]  # None is a dimension of any size; only the batch may have it
Array = np.ndarray | None  # the content of a buffer

ALIGNMENT = 64  # bytes, of every weight; the schema requires 16, wide vector units read 64 at once
MAX_FLATBUFFER_BYTES = 2**31 - 1  # weights of larger files follow the flatbuffer
IDENTIFIER = b"TFL3"
MAX_RANK = 4  # dimensions that GPUs and NPUs accept
_GRAPH_BYTES = 2**24  # upper bound for everything in a file but its weights
_SMALL_BYTES = 64  # equal constants up to this size are stored once
_DATA, _OFFSET, _SIZE = 4, 6, 8  # vtable slots of the fields of the schema's table Buffer


def schema() -> Any:
    """Import the Python classes of the schema, which ai-edge-litert ships."""
    with needs_extra("Writing and reading .tflite files", "litert"):
        from ai_edge_litert import schema_py_generated
    return schema_py_generated


def fits_flatbuffer(weight_bytes: int) -> bool:
    """True if weights of this many bytes fit inside the flatbuffer."""
    return weight_bytes + _GRAPH_BYTES < MAX_FLATBUFFER_BYTES


@dataclass(frozen=True)
class Tensor:
    """A tensor of the graph: its index in the file, its shape, the NumPy name of its dtype, its name."""

    index: int
    shape: Shape
    dtype: str
    name: str


@dataclass
class Builder:
    """Collect the tensors and operators of a single graph, in the order in which they run, then write the file."""

    description: str = ""  # one line of text in the file
    _tensors: list[Any] = field(default_factory=list)
    _operators: list[Any] = field(default_factory=list)
    _opcodes: dict[tuple[str, int], int] = field(default_factory=dict)  # (operator, version) -> index in the file
    _buffers: list[Array] = field(default_factory=lambda: [None])  # buffer 0 is empty, as the schema requires
    _small_constants: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    _signatures: list[Any] = field(default_factory=list)
    _metadata: dict[str, int] = field(default_factory=dict)  # name -> index of its buffer

    def input(self, name: str, shape: Shape, dtype: str = "float32") -> Tensor:
        """Add a tensor whose values the caller of the file provides."""
        return self._tensor(name, shape, dtype)

    def constant(self, array: np.ndarray, name: str) -> Tensor:
        """Add a weight or a parameter; the array is referenced, not copied, until the file is written."""
        array = np.ascontiguousarray(array) if array.ndim else array
        key = None
        if array.nbytes <= _SMALL_BYTES:
            key = (array.dtype.str, array.shape, array.tobytes())
            if key in self._small_constants:
                return self._small_constants[key]
        self._buffers.append(array)
        tensor = self._tensor(name, array.shape, array.dtype.name, len(self._buffers) - 1)
        if key is not None:
            self._small_constants[key] = tensor
        return tensor

    def integers(self, values: np.ndarray, scales: np.ndarray, name: str, *, bits: int) -> Tensor:
        """Add a quantized weight: int8 values (outputs, ...) of 8 or 4 bits, float32 scales (outputs,)."""
        parameters = schema().QuantizationParametersT(scale=scales, zeroPoint=np.zeros(len(scales), np.int64))
        shape = values.shape
        if bits == 4:  # two in a byte, the first in the lower half
            pairs = np.resize(values, -(-values.size // 2) * 2).reshape(-1, 2) & 0xF
            values = (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8)
        self._buffers.append(np.ascontiguousarray(values))
        return self._tensor(name, shape, f"int{bits}", len(self._buffers) - 1, parameters)

    def operator(
        self,
        code: str,
        inputs: Sequence[Tensor | None],
        output: tuple[str, Shape, str],
        *,
        version: int = 1,
        options: str | None = None,
        **option_values: Any,
    ) -> Tensor:
        """Add a builtin operator of one output; the module `operators` explains code, version and options.

        None in `inputs` stands for an omitted optional input. `output` is name, shape and dtype: the runtime checks
        the shape when it loads the file.
        """
        s = schema()
        result = self._tensor(*output)
        row = s.OperatorT(
            opcodeIndex=self._opcodes.setdefault((code, version), len(self._opcodes)),
            inputs=[-1 if tensor is None else tensor.index for tensor in inputs],
            outputs=[result.index],
        )
        if options:
            row.builtinOptionsType = getattr(s.BuiltinOptions, options)
            row.builtinOptions = getattr(s, f"{options}T")(**option_values)
        self._operators.append(row)
        return result

    def signature(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Name inputs and outputs for callers. Those of the first signature become the graph's inputs and outputs."""
        s = schema()
        maps = ([s.TensorMapT(name, tensor.index) for name, tensor in side.items()] for side in (inputs, outputs))
        self._signatures.append(s.SignatureDefT(*maps, b"serving_default", 0))

    def metadata(self, name: str, content: bytes) -> None:
        """Attach bytes that the runtime does not read, such as "TFLITE_METADATA"."""
        self._buffers.append(np.frombuffer(content, np.uint8))
        self._metadata[name] = len(self._buffers) - 1

    def make_names_unique(self) -> None:
        """Number the tensors of equal names, as of a norm that is applied to several maps: quantizers need one each."""
        counts: dict[bytes, int] = {}
        for row in self._tensors:
            counts[row.name] = number = counts.get(row.name, 0) + 1
            row.name += b"" if number == 1 else f"/{number}".encode()

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file. This is not atomic: an interrupted call leaves a partial file."""
        if not self._signatures:
            raise ValueError("A LiteRT file needs a signature. Received: none; call signature(inputs, outputs)")
        padded = (-(-array.nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT for array in self._buffers if array is not None)
        inline = fits_flatbuffer(sum(padded))
        head = bytearray(self._pack(inline=inline))
        positions = _positions(self._buffers, start=len(head), header=4 if inline else 0)
        _set_positions(head, self._buffers, positions, inline=inline)
        with Path(path).open("wb") as file:
            file.write(head)
            for array, position in zip(self._buffers, positions, strict=True):
                if array is not None:
                    _write_at(file, position, array, header=inline)

    def _tensor(self, name: str, shape: Shape, dtype: str, buffer: int = 0, quantization: Any = None) -> Tensor:
        s = schema()
        row = s.TensorT(
            shape=[1 if size is None else size for size in shape],
            type=getattr(s.TensorType, dtype.upper()),
            buffer=buffer,
            name=name.encode(),
            hasRank=True,
            quantization=quantization,
        )
        if None in shape:
            row.shapeSignature = [-1 if size is None else size for size in shape]
        self._tensors.append(row)
        return Tensor(len(self._tensors) - 1, tuple(shape), dtype, name)

    def _pack(self, *, inline: bool) -> bytes:
        """Serialize the file without its weights, whose buffers hold placeholders to be overwritten."""
        import flatbuffers

        s = schema()
        opcodes = []
        for code, version in self._opcodes:
            number = getattr(s.BuiltinOperator, code)
            opcodes.append(s.OperatorCodeT(min(number, 127), None, version, number))
        first = self._signatures[0]
        graph = s.SubGraphT(
            tensors=self._tensors,
            inputs=[row.tensorIndex for row in first.inputs],
            outputs=[row.tensorIndex for row in first.outputs],
            operators=self._operators,
            name=b"main",
        )
        # Flatbuffers omit fields that hold their default: placeholders differ from it, so that each field exists.
        placeholder = s.BufferT(data=np.zeros(1, np.uint8)) if inline else s.BufferT(offset=2, size=2)
        model = s.ModelT(
            version=3,
            operatorCodes=opcodes,
            subgraphs=[graph],
            description=self.description.encode(),
            buffers=[s.BufferT() if array is None else placeholder for array in self._buffers],
            metadata=[s.MetadataT(name.encode(), buffer) for name, buffer in self._metadata.items()],
            signatureDefs=self._signatures,
        )
        packer = flatbuffers.Builder(1 << 20)
        packer.Finish(model.Pack(packer), file_identifier=IDENTIFIER)
        return bytes(packer.Output())


def _positions(arrays: Sequence[Array], *, start: int, header: int) -> list[int]:
    """Position of each array in the file: aligned, with `header` bytes of room before it."""
    positions, end = [], start
    for array in arrays:
        position = -(-(end + header) // ALIGNMENT) * ALIGNMENT
        positions.append(position)
        end = end if array is None else position + array.nbytes
    return positions


def _set_positions(head: bytearray, arrays: Sequence[Array], positions: Sequence[int], *, inline: bool) -> None:
    """Overwrite the placeholders in the file's Buffer tables.

    Inside of the flatbuffer, `data` counts from the field itself to the vector's length, 4 bytes in front of the
    content. Otherwise `offset` counts from the start of the file and may exceed 2 GB.
    """
    model = schema().Model.GetRootAs(head)
    for number, (array, position) in enumerate(zip(arrays, positions, strict=True)):
        if array is None:
            continue
        table = model.Buffers(number)._tab
        data, offset, size = (table.Pos + table.Offset(slot) for slot in (_DATA, _OFFSET, _SIZE))
        if inline:
            head[data : data + 4] = (position - 4 - data).to_bytes(4, "little")
        else:
            head[offset : offset + 8] = position.to_bytes(8, "little")
            head[size : size + 8] = array.nbytes.to_bytes(8, "little")


def _write_at(file: BinaryIO, position: int, array: np.ndarray, *, header: bool) -> None:
    """Write an array at a position behind the end of the file; the header of a vector is its length in bytes."""
    file.write(b"\0" * (position - (4 if header else 0) - file.tell()))
    if header:
        file.write(array.nbytes.to_bytes(4, "little"))
    file.write(array.reshape(-1).view(np.uint8).data if array.size else b"")
