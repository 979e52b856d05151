"""Arithmetic and memory of a layer for one image, which every layer returns from a method `cost` beside its `call`."""

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]  # of one image, without the batch


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Arithmetic and memory of a layer for one image. `+` gives the cost of two layers in a row.

    Args:
        multiply_adds: in matrix products and convolutions.
        kept: values that the gradient keeps, in the compute dtype.
        kept_float32: values that the gradient keeps in float32 under every dtype policy.
        kept_masks: values that the gradient keeps in one byte each.
        kernel_outputs: output channels of all kernels; a file with 8-bit kernels has a scale for each.
        peak: the most values that exist at once in inference.
        widest: values of the largest tensor.
    """

    multiply_adds: int = 0
    kept: int = 0
    kept_float32: int = 0
    kept_masks: int = 0
    kernel_outputs: int = 0
    peak: int = 0
    widest: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        pairs = {one.name: (getattr(self, one.name), getattr(other, one.name)) for one in dataclasses.fields(Cost)}
        return Cost(**{name: max(pair) if name in ("peak", "widest") else sum(pair) for name, pair in pairs.items()})

    def beside(self, values: int) -> "Cost":
        """Return the cost while other values exist beside those of the layer."""
        return dataclasses.replace(self, peak=self.peak + values)

    def kept_bytes(self, value_bytes: int) -> int:
        """Return what the gradient keeps, in bytes, if a value of the compute dtype has `value_bytes`."""
        return value_bytes * self.kept + 4 * self.kept_float32 + self.kept_masks


def dense_cost(positions: int, inputs: int, outputs: int) -> Cost:
    """Return the cost of a dense layer of (inputs, outputs) at some positions of an image."""
    values = positions * (inputs + outputs)
    return Cost(
        multiply_adds=positions * inputs * outputs, kept=positions * inputs, kernel_outputs=outputs, peak=values
    )
