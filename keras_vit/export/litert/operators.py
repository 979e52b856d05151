"""LiteRT's builtin operators that a Vision Transformer needs, as functions of tensors.

To add an operator, write a method that computes the shape of its result and calls `Builder.operator` with
- its name in the schema's enum BuiltinOperator, and the name and fields of its options table (schema_py_generated.py of
  ai-edge-litert; flatbuffer names in camelCase),
- its inputs in the order of the runtime's kernel; axes, shapes and sizes are int32 constants,
- its version: the lowest that supports the options and dtypes used (tensorflow/lite/tools/versioning/op_version.cc).

Two rules hold for all of them, and tests/export/test_litert.py checks both. XNNPACK must run it, also with batch None.
No tensor has more than four dimensions: GPU delegates refuse more (LiteRT issue 2540).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from keras_vit.export.litert.builder import Builder, Shape, Tensor, schema

StorageName = Literal["float32", "float16", "int8"]  # of all kernels of a file


class Integers(NamedTuple):
    """A kernel as integers: value[i, j] = scales[i] * values[i, j]."""

    values: np.ndarray  # int8 (outputs, ...)
    scales: np.ndarray  # float32 (outputs,)

    def floats(self) -> np.ndarray:
        """Convert to floats, the values of a dense layer's kernel, float32."""
        return self.values * self.scales.reshape(-1, *[1] * (self.values.ndim - 1))


class StorageRules(Protocol):
    """Choice of the storage of each kernel, and of tables: a `Storage` for all kernels, or a quantization mode."""

    def storage_of(self, kind: str, name: str, *, few_rows: bool = False) -> "Storage":
        """Choose the storage of an operator's kernel, by the operator's kind in the schema and its name.

        Of an ADD it is the storage of the table that is added to all images' tokens.
        With `few_rows` of inputs, a product of floats takes hardly longer than one of int8.
        """


@dataclass(frozen=True)
class Storage:
    """Storage format of the kernels of dense layers and convolutions."""

    dtype: str
    bits: int  # of a weight
    # Whether the runtime quantizes the inputs of these layers, row by row, in every call.
    quantizes_inputs: bool = False
    dense_version: int = 5  # lowest version of FULLY_CONNECTED that takes such kernels; 5: keep_num_dims
    convolution_version: int = 1  # lowest version of CONV_2D that takes such kernels

    def storage_of(self, kind: str, name: str, *, few_rows: bool = False) -> "Storage":
        """Use this storage for every kernel: float16 instead of int8 for few rows, float32 for tables."""
        del name
        if kind == "ADD":
            return FLOAT32
        return FLOAT16 if few_rows and self == INT8 else self

    def add_kernel(self, builder: Builder, kernel: np.ndarray | Integers, name: str) -> Tensor:
        """Add a kernel, (outputs, ...), and return the tensor that a dense layer or a convolution takes."""
        if self.bits <= 8:
            integers = kernel if isinstance(kernel, Integers) else self.rounded(kernel)
            return builder.integers(*integers, name, bits=self.bits)
        assert isinstance(kernel, np.ndarray)
        if self.dtype == "float16":
            half = builder.constant(kernel.astype(np.float16), f"{name}_float16")
            return builder.operator("DEQUANTIZE", [half], (name, kernel.shape, "float32"), version=3)
        return builder.constant(kernel.astype(np.float32), name)

    def rounded(self, kernel: np.ndarray) -> Integers:
        """Round a kernel, float (outputs, ...), to the nearest integers."""
        scales = self.scales(kernel)
        rows = np.asarray(kernel, np.float32).reshape(len(kernel), -1)
        integers = np.rint(rows / scales[:, None]).clip(-self.largest, self.largest).astype(np.int8)
        return Integers(integers.reshape(kernel.shape), scales)

    def scales(self, kernel: np.ndarray, share: float = 1.0) -> np.ndarray:
        """Scales, float32 (outputs,), whose largest integers are a share of the largest weights."""
        rows = np.asarray(kernel, np.float32).reshape(len(kernel), -1)
        scales = np.abs(rows).max(axis=-1) * np.float32(share) / np.float32(self.largest)
        return np.where(scales > 0, scales, np.float32(1))

    @property
    def largest(self) -> int:
        """The largest integer; the least is its negative. LiteRT's builtin kernels, without XNNPACK, read -8 as 8."""
        return int(2 ** (self.bits - 1) - 1)


FLOAT32 = Storage("float32", 32)
# Half the size. The runtime converts the kernels to float32 when it loads the file.
FLOAT16 = Storage("float16", 16)
# Symmetric (-127 to 127), with one scale for each output. FULLY_CONNECTED 9: asymmetric inputs; 12: a scale for each
# output. CONV_2D 5: a scale for each output; 7 is for int4 kernels, and GPUs take up to 6.
INT8 = Storage("int8", 8, quantizes_inputs=True, dense_version=12, convolution_version=5)
# Symmetric (-7 to 7), two in a byte.
INT4 = Storage("int4", 4, quantizes_inputs=True, dense_version=12)
STORAGES: dict[StorageName, Storage] = {"float32": FLOAT32, "float16": FLOAT16, "int8": INT8}


FUSED_ACTIVATIONS = {None: 0, "relu": 1}  # the schema's ActivationFunctionType
SAME, VALID = 0, 1  # the schema's Padding


class RoundedDense(NamedTuple):
    """Weights of a dense layer whose kernel is rounded, and whose bias may make up for it."""

    kernel: Integers
    bias: np.ndarray  # (outputs,)
    noise: float = 0.0  # power of the outputs' error, as a share of the power of the outputs


@dataclass
class Operators:
    """Add operators to a file, one for each call. `name` is the result's; constants are called `name/kernel` etc."""

    builder: Builder
    storage: StorageRules = field(default=FLOAT32)  # of the kernels of dense layers and convolutions
    rounded: Mapping[str, RoundedDense] = field(default_factory=dict)  # name of a dense layer -> its new weights
    norms: str = "float"  # how norms compute, as `FilePlan.norms`; "int16" also replaces what has no kernel of 16 bits

    def constant(self, array: np.ndarray, name: str) -> Tensor:
        """Add a float32 or integer parameter; float64 becomes float32."""
        return self.builder.constant(array.astype(np.float32) if array.dtype == np.float64 else array, name)

    def table(self, array: np.ndarray, name: str) -> Tensor:
        """Add a parameter that is added to the same tensor of every image."""
        return self.storage.storage_of("ADD", name).add_kernel(self.builder, array, name)

    def add_table(self, x: Tensor, table: np.ndarray, name: str) -> Tensor:
        """Compute x + table with broadcasting; the table is called `name/embedding`."""
        return self.add(x, self.table(table, f"{name}/embedding"), name)

    def dense(
        self, x: Tensor, kernel: np.ndarray, bias: np.ndarray | None, name: str, *, few_rows: bool = False
    ) -> Tensor:
        """Compute x @ kernel.T + bias. x: (..., inputs), kernel: (outputs, inputs), bias: (outputs,).

        `few_rows` of x matter to the kernel's storage.
        """
        storage = self.storage.storage_of("FULLY_CONNECTED", name, few_rows=few_rows)
        values: np.ndarray | Integers = kernel
        if name in self.rounded and storage.bits <= 8:  # a stem's outer layers stay floats
            values, bias, _ = self.rounded[name]
        weights = storage.add_kernel(self.builder, values, f"{name}/kernel")
        return self.builder.operator(
            "FULLY_CONNECTED",
            [x, weights, None if bias is None else self.constant(bias, f"{name}/bias")],
            (name, (*x.shape[:-1], len(kernel)), "float32"),
            version=storage.dense_version,
            options="FullyConnectedOptions",
            keepNumDims=True,
            asymmetricQuantizeInputs=storage.quantizes_inputs,
        )

    def convolution(
        self,
        x: Tensor,
        kernel: np.ndarray,
        bias: np.ndarray,
        name: str,
        *,
        strides: tuple[int, int],
        same: bool,
        activation: str | None = None,
    ) -> Tensor:
        """Compute a 2-D convolution, padded as SAME or VALID. kernel: (outputs, height, width, inputs).

        `activation` is one of `FUSED_ACTIVATIONS`.
        """
        storage = self.storage.storage_of("CONV_2D", name)
        weights = storage.add_kernel(self.builder, kernel, f"{name}/kernel")
        sides = zip(x.shape[1:3], kernel.shape[1:3], strides, strict=True)
        height, width = (window_count(static_dim(side), size, step, same=same) for side, size, step in sides)
        return self.builder.operator(
            "CONV_2D",
            [x, weights, self.constant(bias, f"{name}/bias")],
            (name, (x.shape[0], height, width, len(kernel)), "float32"),
            version=storage.convolution_version,
            options="Conv2DOptions",
            padding=SAME if same else VALID,
            strideH=strides[0],
            strideW=strides[1],
            fusedActivationFunction=FUSED_ACTIVATIONS[activation],
        )

    def depthwise_convolution(self, x: Tensor, kernel: np.ndarray, name: str, *, same: bool) -> Tensor:
        """Filter each channel by itself, with step 1; kernel: (height, width, channels), which stays float32."""
        height, width, channels = kernel.shape
        rows, columns = (
            window_count(static_dim(side), size, 1, same=same)
            for side, size in zip(x.shape[1:3], (height, width), strict=True)
        )
        return self.builder.operator(
            "DEPTHWISE_CONV_2D",
            [x, self.constant(kernel[None], f"{name}/kernel"), self.constant(np.zeros(channels), f"{name}/bias")],
            (name, (x.shape[0], rows, columns, channels), "float32"),
            options="DepthwiseConv2DOptions",
            padding=SAME if same else VALID,
            strideH=1,
            strideW=1,
            depthMultiplier=1,
        )

    def transposed_convolution(
        self, x: Tensor, kernel: np.ndarray, bias: np.ndarray, name: str, *, strides: tuple[int, int], same: bool
    ) -> Tensor:
        """Compute a transposed 2-D convolution, padded as SAME or VALID. kernel: (outputs, height, width, inputs).

        Where each cell becomes a square of its own, it is a dense layer: the runtime quantizes each cell by itself.
        """
        outputs, height, width, inputs = kernel.shape
        batch, rows, columns, _ = x.shape
        if (height, width) == strides and height == width:
            matrix = np.moveaxis(kernel, 0, 2).reshape(-1, inputs)
            cells = self.dense(x, matrix, np.tile(bias, height * width), f"{name}/cells")
            return self.depth_to_space(cells, height, name)
        sides = zip((rows, columns), (height, width), strides, strict=True)
        size = [static_dim(side) * step + (0 if same else max(cell - step, 0)) for side, cell, step in sides]
        storage = self.storage.storage_of("TRANSPOSE_CONV", name)
        shape = self.constant(np.array([1 if batch is None else batch, *size, outputs], np.int32), f"{name}/shape")
        return self.builder.operator(
            "TRANSPOSE_CONV",
            [
                shape,
                storage.add_kernel(self.builder, kernel, f"{name}/kernel"),
                x,
                self.constant(bias, f"{name}/bias"),
            ],
            (name, (batch, *size, outputs), x.dtype),
            version=3,
            options="TransposeConvOptions",
            padding=SAME if same else VALID,
            strideH=strides[0],
            strideW=strides[1],
        )

    def max_pool(self, x: Tensor, name: str, *, size: int, strides: int, same: bool) -> Tensor:
        """Compute the maximum over square windows, padded as SAME or VALID. x: (batch, height, width, channels)."""
        batch, *sides, channels = x.shape
        height, width = (window_count(static_dim(side), size, strides, same=same) for side in sides)
        return self.builder.operator(
            "MAX_POOL_2D",
            [x],
            (name, (batch, height, width, channels), x.dtype),
            options="Pool2DOptions",
            padding=SAME if same else VALID,
            strideH=strides,
            strideW=strides,
            filterHeight=size,
            filterWidth=size,
        )

    def matmul(self, a: Tensor, b: Tensor, name: str, *, transpose_b: bool = False) -> Tensor:
        """Compute a @ b over the last two axes; the other axes broadcast."""
        columns = b.shape[-2] if transpose_b else b.shape[-1]
        shape = (*broadcast_shape(a.shape[:-2], b.shape[:-2]), a.shape[-2], columns)
        return self.builder.operator(
            "BATCH_MATMUL", [a, b], (name, shape, "float32"), options="BatchMatMulOptions", adjY=transpose_b
        )

    def add(self, a: Tensor, b: Tensor, name: str, *, activation: str | None = None) -> Tensor:
        """Compute a + b with broadcasting, then the activation, one of `FUSED_ACTIVATIONS`."""
        fused = FUSED_ACTIVATIONS[activation]
        return self._binary("ADD", a, b, name, options="AddOptions", fusedActivationFunction=fused)

    def subtract(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """Compute a - b with broadcasting."""
        return self._binary("SUB", a, b, name, options="SubOptions")

    def multiply(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """Compute a * b with broadcasting."""
        return self._binary("MUL", a, b, name, options="MulOptions")

    def divide(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """Compute a / b with broadcasting."""
        return self._binary("DIV", a, b, name, options="DivOptions")

    def squared_difference(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """Compute (a - b)**2 with broadcasting; the quantizer leaves SQUARED_DIFFERENCE in floats."""
        if self.norms == "int16":
            difference = self.subtract(a, b, f"{name}/difference")
            return self.multiply(difference, difference, name)
        return self._binary("SQUARED_DIFFERENCE", a, b, name, options="SquaredDifferenceOptions")

    def _binary(self, code: str, a: Tensor, b: Tensor, name: str, **options: Any) -> Tensor:
        return self.builder.operator(code, [a, b], (name, broadcast_shape(a.shape, b.shape), a.dtype), **options)

    def equal(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """Compare with broadcasting; the result is boolean."""
        output = (name, broadcast_shape(a.shape, b.shape), "bool")
        return self.builder.operator("EQUAL", [a, b], output, options="EqualOptions")

    def unary(self, code: str, x: Tensor, name: str, **options: Any) -> Tensor:
        """Compute an elementwise operator of one input, such as "RSQRT", "TANH", "LOGISTIC", "RELU" or "FLOOR"."""
        return self.builder.operator(code, [x], (name, x.shape, x.dtype), **options)

    def gelu(self, x: Tensor, name: str, *, approximate: bool) -> Tensor:
        """Compute GELU, approximated with tanh or exactly with erf."""
        output = (name, x.shape, x.dtype)
        return self.builder.operator("GELU", [x], output, options="GeluOptions", approximate=approximate)

    def softmax(self, x: Tensor, name: str) -> Tensor:
        """Compute softmax over the last axis."""
        return self.builder.operator("SOFTMAX", [x], (name, x.shape, x.dtype), options="SoftmaxOptions", beta=1.0)

    def mean(self, x: Tensor, axes: Sequence[int], name: str, *, keepdims: bool) -> Tensor:
        """Compute the mean over axes; with `keepdims` they remain with length 1."""
        return self._reduce("MEAN", x, axes, name, keepdims=keepdims)

    def sum(self, x: Tensor, axes: Sequence[int], name: str, *, keepdims: bool) -> Tensor:
        """Compute the sum over axes; with `keepdims` they remain with length 1."""
        return self._reduce("SUM", x, axes, name, keepdims=keepdims)

    def _reduce(self, code: str, x: Tensor, axes: Sequence[int], name: str, *, keepdims: bool) -> Tensor:
        reduced = [axis % len(x.shape) for axis in axes]
        shape = tuple(
            1 if axis in reduced else size for axis, size in enumerate(x.shape) if keepdims or axis not in reduced
        )
        places = self.constant(np.array(reduced, np.int32), f"{name}/axes")
        return self.builder.operator(
            code, [x, places], (name, shape, x.dtype), options="ReducerOptions", keepDims=keepdims
        )

    def space_to_depth(self, x: Tensor, size: int, name: str) -> Tensor:
        """Move each cell of size x size pixels, row by row, into channels. x: (batch, height, width, channels)."""
        batch, *sides, channels = x.shape
        height, width = (static_dim(side) // size for side in sides)
        output = (name, (batch, height, width, static_dim(channels) * size * size), x.dtype)
        return self.builder.operator("SPACE_TO_DEPTH", [x], output, options="SpaceToDepthOptions", blockSize=size)

    def depth_to_space(self, x: Tensor, size: int, name: str) -> Tensor:
        """Move channels into cells of size x size pixels, row by row: the inverse of `space_to_depth`.

        The quantizer leaves DEPTH_TO_SPACE in floats. A transpose does the same, but to GPUs its first axis is images.
        """
        batch, *sides, channels = x.shape
        height, width = (static_dim(side) * size for side in sides)
        if self.norms == "int16":
            rows, columns, row = *map(static_dim, sides), static_dim(channels) // size
            x = self.reshape(x, (batch and batch * rows, columns, size, row), f"{name}/rows")
            x = self.transpose(x, (0, 2, 1, 3), f"{name}/rows/apart")
            return self.reshape(x, (batch, height, width, row // size), name)
        output = (name, (batch, height, width, static_dim(channels) // size**2), x.dtype)
        return self.builder.operator("DEPTH_TO_SPACE", [x], output, options="DepthToSpaceOptions", blockSize=size)

    def arg_max(self, x: Tensor, name: str) -> Tensor:
        """Find the int32 index of the first largest value of the last axis."""
        axis = self.constant(np.array(len(x.shape) - 1, np.int32), f"{name}/axis")
        output, kind = (name, x.shape[:-1], "int32"), schema().TensorType.INT32
        return self.builder.operator("ARG_MAX", [x, axis], output, options="ArgMaxOptions", outputType=kind)

    def reciprocal_root(self, x: Tensor, name: str) -> Tensor:
        """Compute 1 / sqrt(x); for integers of 16 bits a step of Newton's follows: r * (1.5 - x * r * r / 2).

        Their RSQRT interpolates linearly between few values, which is inexact for small x.
        """
        root = self.unary("RSQRT", x, f"{name}/rsqrt")
        if self.norms == "float":
            return root
        unit = self.multiply(self.multiply(x, root, f"{name}/root"), root, f"{name}/unit")
        half = self.multiply(unit, self.constant(np.array(-0.5), "minus_half"), f"{name}/unit/half")
        factor = self.add(half, self.constant(np.array(1.5), "three_halves"), f"{name}/unit/factor")
        return self.multiply(root, factor, f"{name}/reciprocal")

    def reshape(self, x: Tensor, shape: Shape, name: str) -> Tensor:
        """Reshape; one dimension may be open (None)."""
        sizes = [-1 if size is None else size for size in shape]
        constant = self.constant(np.array(sizes, np.int32), f"{name}/shape")
        return self.builder.operator(
            "RESHAPE", [x, constant], (name, shape, x.dtype), options="ReshapeOptions", newShape=sizes
        )

    def transpose(self, x: Tensor, order: Sequence[int], name: str) -> Tensor:
        """Put the axes in another order."""
        constant = self.constant(np.array(order, np.int32), f"{name}/order")
        shape = tuple(x.shape[axis] for axis in order)
        return self.builder.operator("TRANSPOSE", [x, constant], (name, shape, x.dtype), options="TransposeOptions")

    def pad(self, x: Tensor, before: Sequence[int], name: str, *, after: Sequence[int] | None = None) -> Tensor:
        """Insert zeros at the front and the back of each axis, as many as `before[axis]` and `after[axis]`."""
        counts = np.stack([before, after or [0] * len(before)], axis=1).astype(np.int32)
        if not counts.any():
            return x
        widths = self.constant(counts, f"{name}/widths")
        added = counts.sum(axis=1).tolist()
        shape = tuple(None if size is None else size + count for size, count in zip(x.shape, added, strict=True))
        return self.builder.operator("PAD", [x, widths], (name, shape, x.dtype), options="PadOptions")

    def slice(self, x: Tensor, axis: int, start: int, stop: int, name: str) -> Tensor:
        """Take start:stop along an axis, both counted from the front."""
        rank = len(x.shape)
        bounds = []
        for bound, value in {"begin": start, "end": stop, "strides": 1}.items():
            vector = np.array([value if at == axis else 1 for at in range(rank)], np.int32)
            bounds.append(self.constant(vector, f"{name}/{bound}"))
        shape = tuple(stop - start if at == axis else size for at, size in enumerate(x.shape))
        # XNNPACK runs no SLICE of an open batch; the masks of STRIDED_SLICE leave the other axes whole.
        other_axes = 2**rank - 1 - 2**axis  # one bit for each
        return self.builder.operator(
            "STRIDED_SLICE",
            [x, *bounds],
            (name, shape, x.dtype),
            options="StridedSliceOptions",
            beginMask=other_axes,
            endMask=other_axes,
        )

    def concatenate(self, tensors: Sequence[Tensor], axis: int, name: str) -> Tensor:
        """Join tensors along an axis, counted from the front; their other sizes are equal."""
        shape = list(tensors[0].shape)
        shape[axis] = sum(static_dim(x.shape[axis]) for x in tensors)
        output = (name, tuple(shape), tensors[0].dtype)
        return self.builder.operator("CONCATENATION", tensors, output, options="ConcatenationOptions", axis=axis)

    def cast(self, x: Tensor, dtype: str, name: str) -> Tensor:
        """Convert to another dtype."""
        return self.builder.operator("CAST", [x], (name, x.shape, dtype), options="CastOptions")

    def gather(self, x: Tensor, indices: Tensor, name: str) -> Tensor:
        """Take x[i, indices[i]] for every i of the batch. x: (batch, rows, width), indices: (batch,)."""
        output = (name, (*indices.shape, *x.shape[2:]), x.dtype)
        axes = {"axis": 1, "batchDims": 1}
        return self.builder.operator("GATHER", [x, indices], output, version=5, options="GatherOptions", **axes)

    def embedding_lookup(self, table: Tensor, ids: Tensor, name: str) -> Tensor:
        """Take the rows of a table, (rows, width), that the ids of any shape choose."""
        count = None if None in ids.shape else math.prod(map(static_dim, ids.shape))
        flat = self.reshape(ids, (count,), f"{name}/ids")
        output = (f"{name}/rows", (count, table.shape[1]), "float32")
        version = 1 if table.dtype == "float32" else 4
        rows = self.builder.operator("EMBEDDING_LOOKUP", [flat, table], output, version=version)
        return self.reshape(rows, (*ids.shape, static_dim(table.shape[1])), name)

    def resize_bilinear(self, x: Tensor, size: tuple[int, int], name: str, *, align_corners: bool = False) -> Tensor:
        """Resize float32 images (batch, height, width, channels): bilinear, no antialias.

        Cells have half-pixel centres, or the centres of the corner cells are aligned.
        """
        return self.builder.operator(
            "RESIZE_BILINEAR",
            [x, self.constant(np.array(size, np.int32), f"{name}/size")],
            (name, (x.shape[0], *size, x.shape[3]), x.dtype),
            version=3,
            options="ResizeBilinearOptions",
            alignCorners=align_corners,
            halfPixelCenters=not align_corners,
        )


def broadcast_shape(a: Shape, b: Shape) -> Shape:
    """Shape of an elementwise operator's result; an open dimension stays open."""
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return tuple(None if x is None or y is None else max(x, y) for x, y in pairs)


def window_count(side: int, size: int, step: int, *, same: bool) -> int:
    """Count the windows of `size`, `step` apart, that fit a side, padded as SAME or VALID."""
    return -(-side // step) if same else (side - size) // step + 1


def static_dim(size: int | None) -> int:
    """Dimension that is known when the file is written: every one but an open batch."""
    assert size is not None
    return size
