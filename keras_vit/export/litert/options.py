"""Options of a LiteRT file, and what is wrong with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np

from keras_vit._util.checks import Count, as_python, field_rules, given, option, option_names, pair
from keras_vit.export.litert.operators import FLOAT32, RoundedDense, StorageRules
from keras_vit.model.config import ViTConfig
from keras_vit.model.task import Task, from_config

Patches = Literal["dense", "convolution"]
# How a norm computes the mean square and its reciprocal root: in floats, or in a way that integers of 16 bits keep.
Norms = Literal["float", "int16"]
Cosine = Annotated[float, "[-1, 1]"]
Fraction = Annotated[float, "[0, 1]"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `export.tflite` and `keras-vit export`, and below them what follows from these."""

    quantize: Any = option("dynamic", "A mode (none, float16, dynamic, int8 ...) or a .toml file.")
    batch: Count | None = option(1, "Images per call; 0: any number.")  # None in Python
    image_size: Any = option(None, "Pixels: 384 or HEIGHTxWIDTH.", is_size=True)
    patch_size: Any = option(None, "Pixels: 12 or HEIGHTxWIDTH; for FlexiViT, see resized.", is_size=True)
    input_dtype: Literal["float32", "uint8"] = option(
        "float32", "float32 (preprocessed images) or uint8 (pixels).", flag="--input"
    )
    source_size: Any = option(None, "Size of the images that the file resizes itself.", is_size=True)
    resize: Literal["exact", "builtin"] = option("exact", "Resize method: exact (as preprocess) or builtin.")
    output: Literal["logits", "probabilities", "classes"] = option(
        "logits", "logits or probabilities; of a model of maps logits or classes."
    )
    attention: bool = option(False, "Also output the class token's attention.")
    patches: Patches | None = option(None, "How patches are embedded: dense or convolution; default: the mode's.")
    labels: Any = option(None, "A list of the zoo, or a text file with one class per line.")
    least_cosine: Cosine | None = option(
        None, "Least cosine similarity, also of differences between images; default: the mode's."
    )
    least_agreement: Fraction | None = option(
        None, "Least share of images with the same best class or a near tie; default: the mode's."
    )
    threads: Count = option(2, "Threads for timing the file.")

    storage: StorageRules = FLOAT32  # the mode's
    norms: Norms = "float"  # the mode's
    rounded: Mapping[str, RoundedDense] = field(default_factory=dict)  # name of a dense layer -> what replaces its own
    class_names: Sequence[str] | None = None  # in the order of the logits
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

    @property
    def sizes(self) -> dict[str, Any]:
        """`image_size` and `patch_size`, if given."""
        return given(image_size=self.image_size, patch_size=self.patch_size)

    @property
    def least(self) -> dict[str, Any]:
        """The thresholds, as `export.verify` takes them."""
        return {"least_cosine": self.least_cosine, "least_agreement": self.least_agreement}

    def output_name(self, outputs: Sequence[str]) -> str:
        """Return the name of the file's first output: `output` if the model's task has it among its outputs."""
        return self.output if self.output in outputs else outputs[0]

    def check(self, config: ViTConfig) -> None:
        """Raise one ValueError with everything that is wrong with the options or impossible for the model."""
        if problems := [*self.problems(), *self.model_problems(config, from_config(config))]:
            raise ValueError("Options: " + "; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each option that is wrong for every model."""
        rules = field_rules(Options)
        for name in option_names(Options):
            yield from rules[name].problems(as_python(getattr(self, name)), name)
        try:
            _ = self.source_sides
        except ValueError as error:
            yield str(error)

    def model_problems(self, config: ViTConfig, task: Task) -> Iterator[str]:
        """Yield one sentence for each option that a file of this model cannot have."""
        if self.source_size is not None and self.input_dtype != "uint8":
            yield (
                "source_size needs input_dtype='uint8' (--input uint8): only pixels are resized. "
                f"Received: {self.input_dtype!r}"
            )
        if self.output == "probabilities" != self.output_name(task.outputs):
            yield f"output='probabilities' needs a head. Received: a model of num_classes={config.num_classes}"
        if self.output == "classes" != self.output_name(task.outputs):
            yield f"output='classes' needs a model with a class for every pixel. Received: outputs {list(task.outputs)}"
        if self.attention and not (config.class_token and config.has_attention):
            received = "class token" if config.has_attention else "attention"
            yield f"attention=True needs attention and a class token. Received: a model without {received}"


def image_config(model: Any) -> ViTConfig:
    """Return a config with the size, channels and preprocessing of a model's images: its own, or for another Keras
    model one with the default preprocessing.
    """
    own = getattr(model, "config", None)
    if isinstance(own, ViTConfig):
        return own
    _, height, width, channels = model.input_shape
    return ViTConfig(image_size=(height, width), patch_size=1, num_channels=channels, num_classes=0)
