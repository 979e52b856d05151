"""How the kernels of dense layers and convolutions lie in a LiteRT file."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np

from keras_vit.export.litert.builder import Builder, Scales, Tensor


class Storage(abc.ABC):
    """A way to keep kernels.

    Attributes:
        quantizes: whether their inputs are quantized, row by row, while the file runs.
        dense_version: least version of FULLY_CONNECTED that computes with them.
        convolution_version: likewise of CONV_2D.
    """

    quantizes = False
    dense_version = 5  # 5: keep_num_dims
    convolution_version = 1

    @abc.abstractmethod
    def kernel(self, builder: Builder, array: np.ndarray, name: str) -> Tensor:
        """The kernel as a tensor that a dense layer or a convolution takes.

        Args:
            builder: of the file.
            array: float (outputs, ...).
            name: of the tensor.
        """


@dataclass(frozen=True)
class Float32(Storage):
    """As they are."""

    def kernel(self, builder: Builder, array: np.ndarray, name: str) -> Tensor:
        """See `Storage`."""
        return builder.constant(array.astype(np.float32), name)


@dataclass(frozen=True)
class Float16(Storage):
    """Half the size; the runtime makes them float32 when it loads the file."""

    def kernel(self, builder: Builder, array: np.ndarray, name: str) -> Tensor:
        """See `Storage`."""
        half = builder.constant(array.astype(np.float16), f"{name}_float16")
        (made,) = builder.operator("DEQUANTIZE", [half], [(name, array.shape, "float32")], version=3)
        return made


@dataclass(frozen=True)
class Int8(Storage):
    """8 bits, one scale for each output: symmetric, -127..127."""

    quantizes = True
    dense_version = 12  # 9: asymmetric inputs; 12: a scale for each output
    convolution_version = 7  # likewise

    def kernel(self, builder: Builder, array: np.ndarray, name: str) -> Tensor:
        """See `Storage`."""
        whole, scale = rounded(array)
        return builder.constant(whole, name, Scales(scale=scale))


def rounded(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A kernel (outputs, ...) as int8 of the same shape, and its scales, float32 (outputs,)."""
    rows = np.asarray(array, np.float32).reshape(len(array), -1)
    scale = np.abs(rows).max(axis=1) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1))
    whole = np.rint(rows / scale[:, None]).clip(-127, 127).astype(np.int8)
    return whole.reshape(array.shape), scale


FLOAT32 = Float32()
