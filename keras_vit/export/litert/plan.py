"""Plan of a LiteRT file: everything that its writers need to know besides the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from keras_vit.export.litert.operators import FLOAT32, RoundedDense, StorageRules
from keras_vit.model.config import ViTConfig

Patches = Literal["dense", "convolution"]
# How a norm computes the mean square and its reciprocal root: in floats, or in a way that integers of 16 bits keep.
Norms = Literal["float", "int16"]


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """Contents and storage of a file; they follow from the options of `export.tflite`, the mode and the model."""

    batch: int | None = 1  # None: any number
    input_dtype: str = "float32"  # prepared images, or "uint8" for pixels
    source_size: tuple[int, int] | None = None  # height and width of pixels that the file resizes
    resize: str = "exact"
    output: str = "logits"  # of the task's outputs, or what follows from them; another one means the task's first
    attention: bool = False
    patches: Patches = "dense"
    class_names: Sequence[str] | None = None  # in the order of the logits

    storage: StorageRules = FLOAT32
    norms: Norms = "float"
    rounded: Mapping[str, RoundedDense] = field(default_factory=dict)  # name of a dense layer -> its new weights
    # "block_3/norm1" -> factors (hidden_size,) above 0: the norm's result is multiplied by them and the next kernel is
    # divided by them, which moves outliers of activations into the kernel (SmoothQuant, arXiv 2211.10438).
    smoothing: Mapping[str, np.ndarray] = field(default_factory=dict)
    # "block_3/norm1" -> constants (hidden_size,) that are subtracted from the norm's result, before its gain, and added
    # again in the next bias: channels that are nearly constant need no range (Outlier Suppression+, arXiv 2304.09145).
    shifts: Mapping[str, np.ndarray] = field(default_factory=dict)
    # (hidden_size,) above 0: the residual stream keeps its channels multiplied by them, which takes large ones out of
    # the ranges that integers must cover. None is all 1.
    scales: np.ndarray | None = None

    def output_name(self, outputs: Sequence[str]) -> str:
        """Name of the file's first output: `output` if the model's task has it, else the task's first."""
        return self.output if self.output in outputs else outputs[0]


def image_config(model: Any) -> ViTConfig:
    """Config with size, channels and preprocessing of a model's images: its own, or for another Keras
    model one with the default preprocessing.
    """
    own = getattr(model, "config", None)
    if isinstance(own, ViTConfig):
        return own
    _, height, width, channels = model.input_shape
    return ViTConfig(image_size=(height, width), patch_size=1, num_channels=channels, num_classes=0)
