"""Parts of a model and their numbers: parameters, operations, memory and file sizes."""

from dataclasses import dataclass

from keras_vit._util.checks import one_of

FLOAT = 4  # bytes of a float32
SCALE = 12  # bytes for each output of an int8 kernel: a float32 scale, and the int64 zero point that LiteRT stores
# Bits of a number in a kernel of a dense layer or convolution; all other numbers are float32.
PRECISIONS = {"float32": 32, "float16": 16, "int8": 8}


@dataclass(frozen=True)
class Part:
    """One part of a model, or several equal parts in a row.

    Args:
        name: what it is, in words.
        copies: number of equal parts.
        output: shape of its result for one image: (height, width, channels), (tokens, width) or (width,).
        parameters: of all copies.
        flops: operations of all copies for one image, in matrix products and convolutions; a multiply-add is two.
    """

    name: str
    copies: int
    output: tuple[int, ...]
    parameters: int
    flops: int


@dataclass(frozen=True)
class Numbers:
    """The numbers of a model.

    Args:
        parts: in the order of computation.
        block_flops: operations of the encoder blocks for one image.
        kernel_numbers: number of parameters in kernels of dense layers and convolutions.
        kernel_outputs: number of output channels of these kernels.
        activation_bytes: approximate bytes of activations for one float32 image, without the weights.
    """

    parts: tuple[Part, ...]
    block_flops: int
    kernel_numbers: int
    kernel_outputs: int
    activation_bytes: int

    @property
    def parameters(self) -> int:
        """Number of parameters, trained or frozen, as `model.count_params()` returns it."""
        return sum(part.parameters for part in self.parts)

    @property
    def flops(self) -> int:
        """Operations for one image, twice the multiply-adds (GFLOPs or GMACs) that papers and timm print."""
        return sum(part.flops for part in self.parts)

    def file_bytes(self, precision: str) -> int:
        """Return the approximate size of a LiteRT file, without its graph (20 to 50 kB).

        `precision` is that of the kernels, a key of `PRECISIONS`: "float32" for `quantize="none"` (and for checkpoints
        in float32), "float16" for "float16", "int8" for "dynamic".
        """
        one_of("precision", precision, tuple(PRECISIONS))
        size = PRECISIONS[precision] * self.kernel_numbers // 8 + FLOAT * (self.parameters - self.kernel_numbers)
        return size + (SCALE * self.kernel_outputs if precision == "int8" else 0)
