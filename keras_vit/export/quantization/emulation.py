"""Emulate a file with fixed ranges in float32, to find how much each tensor's rounding changes the output.

A tensor with a fixed range is rounded to multiples of a step by two additions, (x + c) - c with c = 1.5 * 2**23 steps:
float32 has no bits for anything smaller. Every c is an input of the emulating file, and zero leaves the tensor exact,
so one file answers for all choices of tensors. Kernels are not rounded, and nothing is clipped.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_vit.export.litert.builder import Builder, Shape, Tensor
from keras_vit.export.quantization.modes import FLOAT, Mode

ROUNDING = 1.5 * 2**23
STEPS = 255  # of 8 bits
# Operators whose 8-bit results have the same step whatever the range.
FIXED_STEPS = {"SOFTMAX": 1 / 256, "LOGISTIC": 1 / 256, "TANH": 1 / 128}
# Operators that move values: the result has the range of the input.
MOVES = {"RESHAPE", "TRANSPOSE", "STRIDED_SLICE", "PAD", "CONCATENATION", "MAX_POOL_2D", "SPACE_TO_DEPTH"}
PREFIX = "step/"  # of the names of the inputs


@dataclass
class RoundingBuilder(Builder):
    """A builder of a file that rounds inputs and results of the operators to which a mode gives fixed ranges."""

    mode: Mode | None = None
    fixed_steps: dict[str, float] = field(default_factory=dict)  # tensor -> step, where the range does not matter
    _steps: dict[str, Tensor] = field(default_factory=dict)  # tensor -> input of the file
    _rounded: dict[int, Tensor] = field(default_factory=dict)  # index of a tensor -> the same, rounded
    _computed: set[int] = field(default_factory=set)

    def input(self, name: str, shape: Shape, dtype: str = "float32") -> Tensor:
        """Add a tensor whose values the caller of the file provides."""
        tensor = super().input(name, shape, dtype)
        self._computed.add(tensor.index)
        return tensor

    def operator(
        self, code: str, inputs: Sequence[Tensor | None], output: tuple[str, Shape, str], **options: Any
    ) -> Tensor:
        """Add an operator; if it has fixed ranges, round its inputs and its result."""
        assert self.mode is not None
        rule = self.mode.rule(code, output[0])
        is_fixed = rule is not None and rule.activations < FLOAT and output[2] == "float32"
        if is_fixed and code not in MOVES:
            inputs = [x if x is None else self._round(x) for x in inputs]
        result = super().operator(code, inputs, output, **options)
        self._computed.add(result.index)
        if code in MOVES and any(x is not None and self._rounded.get(x.index) is x for x in inputs):
            self._rounded[result.index] = result
        elif is_fixed and code not in MOVES:
            if code in FIXED_STEPS:
                self.fixed_steps[result.name] = FIXED_STEPS[code]
            return self._round(result)
        return result

    def signature(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], key: str = "serving_default"
    ) -> None:
        """Name inputs and outputs for callers; the constants of the rounding are inputs."""
        steps = {PREFIX + name: tensor for name, tensor in self._steps.items()}
        super().signature({**inputs, **steps}, outputs, key)

    def _round(self, x: Tensor) -> Tensor:
        if x.index not in self._computed or x.dtype != "float32":
            return x
        if x.index not in self._rounded:
            constant = self._steps[x.name] = super().input(PREFIX + x.name, (1,))
            fused = {"fusedActivationFunction": 0}
            large = super().operator(
                "ADD", [x, constant], (f"{x.name}/large", x.shape, x.dtype), options="AddOptions", **fused
            )
            output = (f"{x.name}/rounded", x.shape, x.dtype)
            rounded = super().operator("SUB", [large, constant], output, options="SubOptions", **fused)
            self._computed.add(rounded.index)
            self._rounded[x.index] = self._rounded[rounded.index] = rounded
        return self._rounded[x.index]


class Emulation:
    """A file of a `RoundingBuilder` at work."""

    def __init__(self, path: str | os.PathLike[str], steps: Mapping[str, float]) -> None:
        """Load the file; `steps` are those of its tensors."""
        from ai_edge_litert.interpreter import Interpreter

        self._interpreter = Interpreter(model_path=os.fspath(path), num_threads=2)
        self._interpreter.allocate_tensors()
        inputs = {row["name"]: row["index"] for row in self._interpreter.get_input_details()}
        self._image = inputs.pop("image")
        self._inputs = {name.removeprefix(PREFIX): index for name, index in inputs.items()}
        self._steps = steps

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors that can be rounded."""
        return list(self._inputs)

    def run(self, images: np.ndarray, rounded: Iterable[str]) -> np.ndarray:
        """Return the outputs for images, (images, values), with these tensors rounded and all others exact."""
        rounded = set(rounded)
        for name, index in self._inputs.items():
            constant = ROUNDING * self._steps[name] if name in rounded else 0.0
            self._interpreter.set_tensor(index, np.array([constant], np.float32))
        return outputs(self._interpreter, self._image, images)


def outputs(interpreter: Any, index: int, images: np.ndarray) -> np.ndarray:
    """Return what a file computes for one image after another, (images, values); `index` is that of its input."""
    output = interpreter.get_output_details()[0]["index"]
    rows = []
    for image in images:
        interpreter.set_tensor(index, image[None])
        interpreter.invoke()
        rows.append(interpreter.get_tensor(output).reshape(-1))
    return np.array(rows, np.float64)
