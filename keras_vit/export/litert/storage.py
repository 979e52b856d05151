"""Storage formats of kernels in a LiteRT file: float32, float16, int8 and int4."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from keras_vit.export.litert.builder import Builder, Tensor

StorageName = Literal["float32", "float16", "int8"]  # of all kernels of a file


class Integers(NamedTuple):
    """A kernel as integers: value[i, j] = scales[i, j // block] * values[i, j], with inputs in blocks of equal size."""

    values: np.ndarray  # int8 (outputs, ...)
    scales: np.ndarray  # float32 (outputs, blocks)

    def floats(self) -> np.ndarray:
        """Return the values of a dense layer's kernel, float32."""
        outputs, blocks = self.scales.shape
        return (self.values.reshape(outputs, blocks, -1) * self.scales[..., None]).reshape(self.values.shape)


class StorageRules(Protocol):
    """Choice of the storage of each kernel, and of tables: a `Storage` for all kernels, or a quantization mode."""

    def storage_of(self, kind: str, name: str, *, few_rows: bool = False) -> "Storage":
        """Return the storage of an operator's kernel, by the operator's kind in the schema and its name.

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
    block: int | None = None  # number of inputs that share a scale; None: all inputs of an output
    dense_version: int = 5  # lowest version of FULLY_CONNECTED that takes such kernels; 5: keep_num_dims
    convolution_version: int = 1  # lowest version of CONV_2D that takes such kernels

    def storage_of(self, kind: str, name: str, *, few_rows: bool = False) -> "Storage":
        """Return this storage, for every kernel: float16 instead of int8 for few rows; float32 for tables."""
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
        blocks = np.asarray(kernel, np.float32).reshape(*scales.shape, -1)
        integers = np.rint(blocks / scales[..., None]).clip(-self.largest, self.largest).astype(np.int8)
        return Integers(integers.reshape(kernel.shape), scales)

    def scales(self, kernel: np.ndarray, share: float = 1.0) -> np.ndarray:
        """Return scales whose largest integers are a share of the largest weights, float32 (outputs, blocks)."""
        rows = np.asarray(kernel, np.float32).reshape(len(kernel), -1)
        has_blocks = self.block is not None and rows.shape[1] % self.block == 0
        blocks = rows.reshape(len(rows), -1, self.block or 1) if has_blocks else rows[:, None]
        scales = np.abs(blocks).max(axis=-1) * np.float32(share) / np.float32(self.largest)
        scales = np.where(scales > 0, scales, np.float32(1))
        return _as_block_scales(scales) if has_blocks else scales

    @property
    def largest(self) -> int:
        """The largest integer. Kernels that are rounded to the nearest have none below its negative."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def least(self) -> int:
        """The least integer: -127 of 8 bits, which the runtime's kernels ask for, -8 of 4 bits."""
        return -self.largest if self.bits == 8 else -self.largest - 1


def _as_block_scales(scales: np.ndarray) -> np.ndarray:
    """Round the scales of blocks as XNNPACK reads them: float16 with the 8 significant bits of a bfloat16."""
    mantissa, exponent = np.frexp(scales)
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent).astype(np.float16).astype(np.float32)


FLOAT32 = Storage("float32", 32)
# Half the size. The runtime converts the kernels to float32 when it loads the file.
FLOAT16 = Storage("float16", 16)
# Symmetric (-127 to 127), with one scale for each output. FULLY_CONNECTED 9: asymmetric inputs; 12: a scale for each
# output. CONV_2D 5: a scale for each output; 7 is for int4 kernels, and GPUs take up to 6.
INT8 = Storage("int8", 8, quantizes_inputs=True, dense_version=12, convolution_version=5)
# Symmetric (-7 to 7), two in a byte.
INT4 = Storage("int4", 4, quantizes_inputs=True, dense_version=12)
STORAGES: dict[StorageName, Storage] = {"float32": FLOAT32, "float16": FLOAT16, "int8": INT8}
