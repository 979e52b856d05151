"""Storage formats of kernels in a LiteRT file: float32, float16 and int8."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from keras_vit.export.litert.builder import Builder, Tensor

StorageName = Literal["float32", "float16", "int8"]


@dataclass(frozen=True)
class Storage:
    """Storage format of the kernels of dense layers and convolutions."""

    dtype: StorageName
    # Whether the runtime quantizes the inputs of these layers, row by row, in every call.
    quantizes_inputs: bool = False
    dense_version: int = 5  # lowest version of FULLY_CONNECTED that takes such kernels; 5: keep_num_dims
    convolution_version: int = 1  # lowest version of CONV_2D that takes such kernels

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return 8 * np.dtype(self.dtype).itemsize

    def add_kernel(self, builder: Builder, array: np.ndarray, name: str) -> Tensor:
        """Add a kernel, float (outputs, ...), and return the tensor that a dense layer or a convolution takes."""
        if self.dtype == "int8":
            integers, scale = quantize_int8(array)
            return builder.constant(integers, name, scale)
        if self.dtype == "float16":
            half = builder.constant(array.astype(np.float16), f"{name}_float16")
            return builder.operator("DEQUANTIZE", [half], (name, array.shape, "float32"), version=3)
        return builder.constant(array.astype(np.float32), name)


FLOAT32 = Storage("float32")
# Half the size. The runtime converts the kernels to float32 when it loads the file.
FLOAT16 = Storage("float16")
# Symmetric (-127 to 127), with one scale for each output. FULLY_CONNECTED 9: asymmetric inputs; 12: a scale for each
# output. CONV_2D 5: a scale for each output; 7 is for int4 kernels, and GPUs take up to 6.
INT8 = Storage("int8", quantizes_inputs=True, dense_version=12, convolution_version=5)
STORAGES: dict[StorageName, Storage] = {storage.dtype: storage for storage in (FLOAT32, FLOAT16, INT8)}


def quantize_int8(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a kernel (outputs, ...) as int8 of the same shape, and its scales, float32 (outputs,)."""
    rows = np.asarray(array, np.float32).reshape(len(array), -1)
    scale = np.abs(rows).max(axis=1) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1))
    integers = np.rint(rows / scale[:, None]).clip(-127, 127).astype(np.int8)
    return integers.reshape(array.shape), scale
