"""The operators that a Vision Transformer needs, as functions of tensors; XNNPACK runs every one of them.

Nothing here has more than four dimensions: GPU delegates refuse more (LiteRT issue 2540).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from keras_vit.export.litert.builder import Builder, Shape, Tensor
from keras_vit.export.litert.storage import FLOAT32, Storage

FUSED = {None: 0, "relu": 1}  # the schema's ActivationFunctionType
SAME, VALID = 0, 1


@dataclass
class Operators:
    """Adds operators to a file, one call each; an operator's name becomes the name of what it gives.

    Args:
        builder: of the file.
        storage: how the kernels of dense layers and convolutions are kept.
    """

    builder: Builder
    storage: Storage = field(default=FLOAT32)

    def constant(self, array: np.ndarray, name: str) -> Tensor:
        """A float32 or integer parameter, as it is (float64 becomes float32)."""
        return self.builder.constant(array.astype(np.float32) if array.dtype == np.float64 else array, name)

    def dense(self, x: Tensor, kernel: np.ndarray, bias: np.ndarray | None, name: str) -> Tensor:
        """x @ kernel.T + bias over the last axis.

        Args:
            x: (..., inputs).
            kernel: (outputs, inputs).
            bias: (outputs,).
            name: of the result; the constants are called name/kernel and name/bias.
        """
        weights = self.storage.kernel(self.builder, kernel, f"{name}/kernel")
        added = None if bias is None else self.constant(bias, f"{name}/bias")
        (made,) = self.builder.operator(
            "FULLY_CONNECTED",
            [x, weights, added],
            [(name, (*x.shape[:-1], len(kernel)), "float32")],
            version=self.storage.dense_version,
            options="FullyConnectedOptions",
            keepNumDims=True,
            asymmetricQuantizeInputs=self.storage.quantizes,
        )
        return made

    def convolution(
        self, x: Tensor, kernel: np.ndarray, bias: np.ndarray, name: str, *, strides: tuple[int, int], same: bool
    ) -> Tensor:
        """A convolution.

        Args:
            x: (batch, height, width, inputs).
            kernel: (outputs, height, width, inputs).
            bias: (outputs,).
            name: of the result.
            strides: (height, width).
            same: TensorFlow's SAME padding, or VALID.
        """
        weights = self.storage.kernel(self.builder, kernel, f"{name}/kernel")
        sides = zip(x.shape[1:3], kernel.shape[1:3], strides, strict=True)
        height, width = (
            -(-known(side) // step) if same else (known(side) - size) // step + 1 for side, size, step in sides
        )
        (made,) = self.builder.operator(
            "CONV_2D",
            [x, weights, self.constant(bias, f"{name}/bias")],
            [(name, (x.shape[0], height, width, len(kernel)), "float32")],
            version=self.storage.convolution_version,
            options="Conv2DOptions",
            padding=SAME if same else VALID,
            strideH=strides[0],
            strideW=strides[1],
        )
        return made

    def max_pool(self, x: Tensor, name: str, *, size: int, strides: int) -> Tensor:
        """The maximum over windows, SAME padding. x: (batch, height, width, channels)."""
        batch, height, width, channels = x.shape
        (made,) = self.builder.operator(
            "MAX_POOL_2D",
            [x],
            [(name, (batch, -(-known(height) // strides), -(-known(width) // strides), channels), x.dtype)],
            options="Pool2DOptions",
            padding=SAME,
            strideH=strides,
            strideW=strides,
            filterHeight=size,
            filterWidth=size,
        )
        return made

    def matmul(self, a: Tensor, b: Tensor, name: str, *, transpose_b: bool = False) -> Tensor:
        """a @ b over the last two axes; the others broadcast."""
        columns = b.shape[-2] if transpose_b else b.shape[-1]
        (made,) = self.builder.operator(
            "BATCH_MATMUL",
            [a, b],
            [(name, (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], columns), "float32")],
            options="BatchMatMulOptions",
            adjY=transpose_b,
        )
        return made

    def add(self, a: Tensor, b: Tensor, name: str, *, activation: str | None = None) -> Tensor:
        """a + b, broadcast."""
        return self._arithmetic("ADD", a, b, name, activation)

    def subtract(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """a - b, broadcast."""
        return self._arithmetic("SUB", a, b, name, None)

    def multiply(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """a * b, broadcast."""
        return self._arithmetic("MUL", a, b, name, None)

    def _arithmetic(self, code: str, a: Tensor, b: Tensor, name: str, activation: str | None) -> Tensor:
        shape = broadcast(a.shape, b.shape)
        options = f"{code.title()}Options"
        (made,) = self.builder.operator(
            code, [a, b], [(name, shape, a.dtype)], options=options, fusedActivationFunction=FUSED[activation]
        )
        return made

    def unary(self, code: str, x: Tensor, name: str) -> Tensor:
        """An elementwise operator without options: "RSQRT", "TANH", "LOGISTIC", "RELU"."""
        (made,) = self.builder.operator(code, [x], [(name, x.shape, x.dtype)])
        return made

    def gelu(self, x: Tensor, name: str, *, approximate: bool) -> Tensor:
        """GELU, with tanh where approximate, else with erf."""
        (made,) = self.builder.operator(
            "GELU", [x], [(name, x.shape, x.dtype)], options="GeluOptions", approximate=approximate
        )
        return made

    def softmax(self, x: Tensor, name: str) -> Tensor:
        """Softmax over the last axis."""
        (made,) = self.builder.operator("SOFTMAX", [x], [(name, x.shape, x.dtype)], options="SoftmaxOptions", beta=1.0)
        return made

    def mean(self, x: Tensor, axes: Sequence[int], name: str, *, keep: bool) -> Tensor:
        """The mean over axes, which stay with length 1 where `keep`."""
        return self._reduced("MEAN", x, axes, name, keep=keep)

    def sum(self, x: Tensor, axes: Sequence[int], name: str, *, keep: bool) -> Tensor:
        """The sum over axes, which stay with length 1 where `keep`."""
        return self._reduced("SUM", x, axes, name, keep=keep)

    def _reduced(self, code: str, x: Tensor, axes: Sequence[int], name: str, *, keep: bool) -> Tensor:
        gone = [axis % len(x.shape) for axis in axes]
        shape = tuple(1 if axis in gone else side for axis, side in enumerate(x.shape) if keep or axis not in gone)
        (made,) = self.builder.operator(
            code,
            [x, self.constant(np.array(gone, np.int32), f"{name}/axes")],
            [(name, shape, x.dtype)],
            options="ReducerOptions",
            keepDims=keep,
        )
        return made

    def space_to_depth(self, x: Tensor, size: int, name: str) -> Tensor:
        """Cells of size x size places as one each, their channels row by row. x: (batch, height, width, channels)."""
        batch, height, width, channels = x.shape
        shape = (batch, known(height) // size, known(width) // size, known(channels) * size * size)
        (made,) = self.builder.operator(
            "SPACE_TO_DEPTH", [x], [(name, shape, x.dtype)], options="SpaceToDepthOptions", blockSize=size
        )
        return made

    def reshape(self, x: Tensor, shape: Shape, name: str) -> Tensor:
        """The same numbers in another shape, of which one side may be open (None)."""
        numbers = [-1 if side is None else side for side in shape]
        (made,) = self.builder.operator(
            "RESHAPE",
            [x, self.constant(np.array(numbers, np.int32), f"{name}/shape")],
            [(name, shape, x.dtype)],
            options="ReshapeOptions",
            newShape=numbers,
        )
        return made

    def transpose(self, x: Tensor, order: Sequence[int], name: str) -> Tensor:
        """The axes in another order."""
        places = self.constant(np.array(order, np.int32), f"{name}/order")
        shape = tuple(x.shape[axis] for axis in order)
        (made,) = self.builder.operator("TRANSPOSE", [x, places], [(name, shape, x.dtype)], options="TransposeOptions")
        return made

    def pad(self, x: Tensor, before: Sequence[int], name: str) -> Tensor:
        """Zeros in front: `before` says how many along each axis."""
        widths = self.constant(np.array([(count, 0) for count in before], np.int32), f"{name}/widths")
        shape = tuple(None if side is None else side + count for side, count in zip(x.shape, before, strict=True))
        (made,) = self.builder.operator("PAD", [x, widths], [(name, shape, x.dtype)], options="PadOptions")
        return made

    def take(self, x: Tensor, axis: int, start: int, stop: int, name: str) -> Tensor:
        """The slice start:stop along an axis, start and stop being places from the front."""
        places = {"begin": start, "end": stop, "strides": 1}
        bounds = [
            self.constant(
                np.array([place if at == axis else 1 for at in range(len(x.shape))], np.int32), f"{name}/{bound}"
            )
            for bound, place in places.items()
        ]
        shape = tuple(stop - start if at == axis else side for at, side in enumerate(x.shape))
        whole = 2 ** len(x.shape) - 1 - 2**axis  # a bit for every other axis: not SLICE, which XNNPACK takes not open
        (made,) = self.builder.operator(
            "STRIDED_SLICE",
            [x, *bounds],
            [(name, shape, x.dtype)],
            options="StridedSliceOptions",
            beginMask=whole,
            endMask=whole,
        )
        return made

    def cast(self, x: Tensor, dtype: str, name: str) -> Tensor:
        """The same numbers in another dtype."""
        (made,) = self.builder.operator("CAST", [x], [(name, x.shape, dtype)], options="CastOptions")
        return made

    def squared_difference(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        """(a - b) squared, broadcast."""
        (made,) = self.builder.operator(
            "SQUARED_DIFFERENCE",
            [a, b],
            [(name, broadcast(a.shape, b.shape), a.dtype)],
            options="SquaredDifferenceOptions",
        )
        return made

    def resize_bilinear(self, x: Tensor, size: tuple[int, int], name: str) -> Tensor:
        """Bilinear, half-pixel centres, no antialias. x: (batch, height, width, channels), float32."""
        (made,) = self.builder.operator(
            "RESIZE_BILINEAR",
            [x, self.constant(np.array(size, np.int32), f"{name}/size")],
            [(name, (x.shape[0], *size, x.shape[3]), x.dtype)],
            version=3,
            options="ResizeBilinearOptions",
            halfPixelCenters=True,
        )
        return made


def broadcast(a: Shape, b: Shape) -> Shape:
    """The shape of an elementwise operator's result; an open side stays open."""
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return tuple(None if x is None or y is None else max(x, y) for x, y in pairs)


def known(side: int | None) -> int:
    """A side other than the batch, which alone is ever open."""
    assert side is not None
    return side
