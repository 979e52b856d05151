"""Options of a LiteRT file, and what is wrong with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from keras_vit._util.checks import is_count, pair
from keras_vit._util.fields import field_rules
from keras_vit.export.litert.storage import FLOAT32, Storage
from keras_vit.model.config import ViTConfig

Patches = Literal["dense", "convolution"]
ARGUMENTS = {  # fields that `FieldRule` checks -> arguments of `export.tflite`
    "dtype": "input_dtype",
    "resize": "resize",
    "output": "output",
    "patches": "patches",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices for a LiteRT file, most of them arguments of `export.tflite`; `check` tests them against a model."""

    batch: int | None = 1  # None is any number, which the caller sets with `resize_tensor_input`
    storage: Storage = FLOAT32
    dtype: Literal["float32", "uint8"] = "float32"  # the argument input_dtype
    source_size: int | tuple[int, int] | None = None
    resize: Literal["exact", "builtin"] = "exact"
    output: Literal["logits", "probabilities"] = "logits"
    patches: Patches | None = "dense"  # None in arguments: the mode's
    attention: bool = False
    labels: Sequence[str] | None = None  # class names, in the order of the logits
    # "block_3/norm1" -> factors (hidden_size,) above 0: the norm's result is multiplied by them and the next kernel is
    # divided by them, which moves outliers of activations into the kernel (SmoothQuant, arXiv 2211.10438).
    smoothing: Mapping[str, np.ndarray] = field(default_factory=dict)
    # "block_3/norm1" -> constants (hidden_size,) that are subtracted from the norm's result, before its gain, and added
    # again in the next bias: channels that are nearly constant need no range (Outlier Suppression+, arXiv 2304.09145).
    shifts: Mapping[str, np.ndarray] = field(default_factory=dict)
    # (hidden_size,) above 0: the residual stream keeps its channels multiplied by them, which takes large ones out of
    # the ranges that integers must cover. None is all 1.
    scales: np.ndarray | None = None

    @property
    def source_sides(self) -> tuple[int, int] | None:
        """`source_size` as (height, width)."""
        return None if self.source_size is None else pair(self.source_size, "source_size")

    def check(self, config: ViTConfig) -> None:
        """Raise one ValueError with everything that is wrong with the options or impossible for the model."""
        if problems := [*self.problems(), *self.model_problems(config)]:
            raise ValueError("Options: " + "; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each option that is wrong for every model."""
        rules = field_rules(Options)
        for name, argument in ARGUMENTS.items():
            yield from rules[name].problems(getattr(self, name), argument)
        if self.batch is not None and not is_count(self.batch, least=1):
            yield f"batch must be an integer >= 1, or None for any. Received: {self.batch!r}"
        try:
            _ = self.source_sides
        except ValueError as error:
            yield str(error)

    def model_problems(self, config: ViTConfig) -> Iterator[str]:
        """Yield one sentence for each option that a file of this model cannot have."""
        if self.source_size is not None and self.dtype != "uint8":
            yield (
                "source_size needs input_dtype='uint8' (--input uint8): only pixels are resized. "
                f"Received: {self.dtype!r}"
            )
        if self.output == "probabilities" and not config.num_classes:
            yield "output='probabilities' needs a head. Received: a model of num_classes=0"
        if self.attention and not (config.class_token and config.has_attention):
            received = "class token" if config.has_attention else "attention"
            yield f"attention=True needs attention and a class token. Received: a model without {received}"
