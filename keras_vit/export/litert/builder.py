"""A LiteRT (.tflite) file, built tensor by tensor and written without a copy of the weights.

The schema is the one that ai-edge-litert ships. The flatbuffers library packs the small part of the file; the weights
follow behind it, straight from their arrays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from keras_vit._util.text import install_command

Shape = tuple[int | None, ...]  # None: open, the batch

ALIGNMENT = 64  # of every weight in the file; the schema asks for 16, vector units like more
LARGEST = 2**31 - 1  # bytes that a flatbuffer may have; what is larger keeps its weights outside of it
IDENTIFIER = b"TFL3"
_DTYPES = {
    "float32": "FLOAT32",
    "float16": "FLOAT16",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "int8": "INT8",
}


def schema() -> Any:
    """The schema's Python classes.

    Raises:
        ImportError: without ai-edge-litert.
    """
    try:
        from ai_edge_litert import schema_py_generated
    except ImportError:
        raise ImportError(f"Writing and running .tflite files needs `{install_command('litert')}`") from None
    return schema_py_generated


@dataclass(frozen=True)
class Tensor:
    """A value of the graph: its place in the file's list, its shape, its dtype as NumPy calls it, its name."""

    index: int
    shape: Shape
    dtype: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Scales:
    """How the numbers of a quantized tensor are meant: value = scale * (number - zero point).

    Args:
        scale: one for all or one for each slice along `axis`, float32.
        zero_point: likewise; None means zeros.
        axis: the quantized dimension.
    """

    scale: np.ndarray
    zero_point: np.ndarray | None = None
    axis: int = 0


@dataclass
class Builder:
    """Collects tensors and operators in the order in which they are computed, then writes the file.

    Args:
        description: one line for whoever inspects the file.
    """

    description: str = ""
    _tensors: list[Any] = field(default_factory=list)
    _operators: list[Any] = field(default_factory=list)
    _codes: dict[tuple[str, int], int] = field(default_factory=dict)
    _data: list[np.ndarray | None] = field(default_factory=lambda: [None])  # buffer 0 is the empty one
    _small: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    _signatures: list[Any] = field(default_factory=list)
    _metadata: dict[str, int] = field(default_factory=dict)

    def input(self, name: str, shape: Shape, dtype: str = "float32") -> Tensor:
        """What the caller gives."""
        return self._tensor(name, shape, dtype)

    def constant(self, array: np.ndarray, name: str, scales: Scales | None = None) -> Tensor:
        """A weight or a parameter; the array is kept, not copied, until the file is written."""
        array = np.ascontiguousarray(array) if array.ndim else array
        key = (array.dtype.str, array.shape, array.tobytes()) if array.nbytes <= 64 and scales is None else None
        if key in self._small:
            return self._small[key]
        self._data.append(array)
        tensor = self._tensor(name, array.shape, array.dtype.name, buffer=len(self._data) - 1, scales=scales)
        if key is not None:
            self._small[key] = tensor
        return tensor

    def operator(
        self,
        code: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[tuple[str, Shape, str]],
        *,
        version: int = 1,
        options: str | None = None,
        **values: Any,
    ) -> list[Tensor]:
        """Adds a builtin operator.

        Args:
            code: its name in the schema's BuiltinOperator, such as "FULLY_CONNECTED".
            inputs: its arguments; None is an optional one that is left out.
            outputs: name, shape and dtype of each result.
            version: of the operator, the least that has what is used.
            options: the schema's table of its options, such as "FullyConnectedOptions"; None for none.
            **values: of those options.
        """
        s = schema()
        made = [self._tensor(*output) for output in outputs]
        row = s.OperatorT(
            opcodeIndex=self._codes.setdefault((code, version), len(self._codes)),
            inputs=[-1 if tensor is None else tensor.index for tensor in inputs],
            outputs=[tensor.index for tensor in made],
        )
        if options:
            row.builtinOptionsType = getattr(s.BuiltinOptions, options)
            row.builtinOptions = getattr(s, f"{options}T")(**values)
        self._operators.append(row)
        return made

    def signature(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], key: str = "serving_default"
    ) -> None:
        """What a caller by name sees; the first one's tensors are also the graph's inputs and outputs."""
        s = schema()
        maps = ([s.TensorMapT(name, tensor.index) for name, tensor in side.items()] for side in (inputs, outputs))
        self._signatures.append(s.SignatureDefT(*maps, key.encode(), 0))

    def metadata(self, name: str, content: bytes) -> None:
        """Attaches bytes that the runtime does not read, such as "TFLITE_METADATA"."""
        self._data.append(np.frombuffer(content, np.uint8))
        self._metadata[name] = len(self._data) - 1

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file. The caller sees to it that an interrupted one is not taken for a whole one.

        Raises:
            ValueError: where there is no signature.
        """
        if not self._signatures:
            raise ValueError("A LiteRT file needs a signature. Received: none; call signature(inputs, outputs)")
        inline = sum(_padded(array.nbytes) for array in self._data if array is not None) + 2**24 < LARGEST
        head = bytearray(self._packed(inline=inline))
        places = _places(self._data, start=len(head), header=4 if inline else 0)
        (_point_inline if inline else _point_outside)(head, self._data, places)
        with Path(path).open("wb") as file:
            file.write(head)
            for array, place in zip(self._data, places, strict=True):
                if array is not None:
                    _write_at(file, place, array, header=inline)

    def _tensor(self, name: str, shape: Shape, dtype: str, *, buffer: int = 0, scales: Scales | None = None) -> Tensor:
        s = schema()
        row = s.TensorT(
            shape=[1 if side is None else side for side in shape],
            type=getattr(s.TensorType, _DTYPES[dtype]),
            buffer=buffer,
            name=name.encode(),
            hasRank=True,
        )
        if None in shape:
            row.shapeSignature = [-1 if side is None else side for side in shape]
        if scales is not None:
            zeros = np.zeros(scales.scale.size, np.int64) if scales.zero_point is None else scales.zero_point
            row.quantization = s.QuantizationParametersT(
                scale=np.ravel(scales.scale).astype(np.float32),
                zeroPoint=np.ravel(zeros).astype(np.int64),
                quantizedDimension=scales.axis,
            )
        self._tensors.append(row)
        return Tensor(len(self._tensors) - 1, tuple(shape), dtype, name)

    def _packed(self, *, inline: bool) -> bytes:
        """The file without its weights; every buffer that has data has a field to point with."""
        import flatbuffers

        s = schema()
        codes = []
        for code, version in self._codes:
            number = getattr(s.BuiltinOperator, code)
            codes.append(s.OperatorCodeT(min(number, 127), None, version, number))
        first = self._signatures[0]
        graph = s.SubGraphT(
            tensors=self._tensors,
            inputs=[row.tensorIndex for row in first.inputs],
            outputs=[row.tensorIndex for row in first.outputs],
            operators=self._operators,
            name=b"main",
        )
        mark = s.BufferT(data=np.zeros(1, np.uint8)) if inline else s.BufferT(offset=2, size=2)
        model = s.ModelT(
            version=3,
            operatorCodes=codes,
            subgraphs=[graph],
            description=self.description.encode(),
            buffers=[s.BufferT() if array is None else mark for array in self._data],
            metadata=[s.MetadataT(name.encode(), buffer) for name, buffer in self._metadata.items()],
            signatureDefs=self._signatures,
        )
        packer = flatbuffers.Builder(1 << 20)
        packer.Finish(model.Pack(packer), file_identifier=IDENTIFIER)
        return bytes(packer.Output())


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT + ALIGNMENT


def _places(data: Sequence[np.ndarray | None], *, start: int, header: int) -> list[int]:
    """Where in the file each array's bytes begin, room for a `header` in front of each."""
    places, end = [], start
    for array in data:
        place = -(-(end + header) // ALIGNMENT) * ALIGNMENT
        places.append(place)
        end = end if array is None else place + array.nbytes
    return places


def _buffers(head: bytearray, data: Sequence[np.ndarray | None], places: Sequence[int]) -> Any:
    """Of every array: the file's table of its buffer, the array, and its place."""
    model = schema().Model.GetRootAs(head)
    for number, (array, place) in enumerate(zip(data, places, strict=True)):
        if array is not None:
            yield model.Buffers(number)._tab, array, place


def _point_inline(head: bytearray, data: Sequence[np.ndarray | None], places: Sequence[int]) -> None:
    """Makes every buffer's `data` point behind the head: a flatbuffer's offsets reach as far as the file goes."""
    for table, _, place in _buffers(head, data, places):
        here = table.Pos + table.Offset(4)
        head[here : here + 4] = (place - 4 - here).to_bytes(4, "little")


def _point_outside(head: bytearray, data: Sequence[np.ndarray | None], places: Sequence[int]) -> None:
    """Fills in every buffer's `offset` and `size`, which count from the start of the file and may exceed 2 GB."""
    for table, array, place in _buffers(head, data, places):
        for field_, value in ((6, place), (8, array.nbytes)):
            here = table.Pos + table.Offset(field_)
            head[here : here + 8] = value.to_bytes(8, "little")


def _write_at(file: BinaryIO, place: int, array: np.ndarray, *, header: bool) -> None:
    file.write(b"\0" * (place - (4 if header else 0) - file.tell()))
    if header:
        file.write(array.nbytes.to_bytes(4, "little"))
    file.write(array.reshape(-1).view(np.uint8).data if array.size else b"")
