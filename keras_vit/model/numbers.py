"""Parameters, operations, memory and file sizes of a model. Reading them needs neither Keras nor TensorFlow.

The numbers of the zoo's models are kept with their cards, in zoo/numbers.json; those of other configs are counted.
"""

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_vit._util import data_files
from keras_vit._util.checks import one_of
from keras_vit.model.config import ViTConfig

FLOAT = 4  # bytes of a float32
SCALE = 12  # bytes for each output of an int8 kernel: a float32 scale, and the int64 zero point that LiteRT stores
# Bits of a number in a kernel of a dense layer or convolution; all other numbers are float32.
PRECISIONS = {"float32": 32, "float16": 16, "int8": 8}

_NOT_COUNTED = {"labels", "preprocessing", "position_method", "norm_epsilon", "head_bias_init"}
_NOT_COUNTED |= {"dropout_rate", "attention_dropout_rate", "stochastic_depth"}


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


def numbers(config: ViTConfig) -> Numbers:
    """Return the numbers of a config's model: those kept with the cards, or else counted, which starts Keras."""
    if (known := _known().get(fingerprint(config))) is not None:
        return _from_json(known)
    from keras_vit.model.cost import count

    return count(config)


def fingerprint(config: ViTConfig) -> str:
    """Return a short name for the fields of a config on which its numbers depend, equal for equal fields."""
    fields, defaults = config.to_dict(), ViTConfig().to_dict()
    changed = {name: fields[name] for name in fields.keys() - _NOT_COUNTED if fields[name] != defaults[name]}
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:16]


def to_json(found: Numbers) -> dict[str, Any]:
    """Return numbers as zoo/numbers.json has them; each part is a list of its fields."""
    return {**vars(found), "parts": [list(dataclasses.astuple(part)) for part in found.parts]}


def _from_json(stored: dict[str, Any]) -> Numbers:
    parts = (
        Part(name, copies, tuple(output), parameters, flops)
        for name, copies, output, parameters, flops in stored["parts"]
    )
    return Numbers(**{**stored, "parts": tuple(parts)})


def path() -> Path:
    """Return the path of the file with the numbers of the zoo's models."""
    return data_files.folder("zoo") / "numbers.json"


@functools.cache
def _known() -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = json.loads(path().read_text(encoding="utf-8"))
    return known
