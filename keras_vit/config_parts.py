"""The parts of a ViTConfig that are configs of their own: how images are prepared, and a hybrid's ResNet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

RESIZES = ("squash", "crop")
INTERPOLATIONS = ("bilinear", "bicubic", "area", "nearest", "lanczos3")


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How an image becomes the model's input. The default is the official evaluation of vit_jax.

    Args:
        resize: "squash" scales both sides to the model's size, whatever the aspect ratio (vit_jax);
            "crop" scales the shorter side to size / crop_fraction and cuts the centre out (big_vision, timm).
        interpolation: "bilinear", "bicubic", "area", "nearest" or "lanczos3".
        antialias: whether the kernel widens when shrinking, as Pillow does; vit_jax does not.
        crop_fraction: share of the resized shorter side that is kept, in (0, 1]; for "crop" only.
        mean: per channel, or one for all, on a scale of 0 to 1, subtracted first.
        std: likewise, divided by. The defaults map 0..255 onto -1..1.
    """

    resize: str = "squash"
    interpolation: str = "bilinear"
    antialias: bool = False
    crop_fraction: float = 1.0
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        one_of("resize", self.resize, RESIZES)
        one_of("interpolation", self.interpolation, INTERPOLATIONS)
        object.__setattr__(self, "mean", tuple(float(value) for value in self.mean))
        object.__setattr__(self, "std", tuple(float(value) for value in self.std))
        if not 0 < self.crop_fraction <= 1:
            raise ValueError(f"crop_fraction lies in (0, 1]. Received: {self.crop_fraction}")
        if not self.mean or len(self.mean) != len(self.std) or not all(0 < value < math.inf for value in self.std):
            raise ValueError(
                "mean and std have one value a channel or one for all, std above 0. "
                f"Received: mean={self.mean}, std={self.std}"
            )


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """The ResNet of a hybrid: version 1, weight-standardised convolutions, GroupNorm (vit_jax/models_resnet.py).

    Args:
        num_layers: units in each stage; () is the stem alone.
        width_factor: times 64 is the width of the stem and of the first stage.
        norm_epsilon: of GroupNorm.
        conv_epsilon: of the weight standardisation.
        conv_epsilon_place: "std": divide by std + epsilon (Google); "variance": by sqrt(variance + epsilon) (timm).
    """

    num_layers: tuple[int, ...] = ()
    width_factor: float = 1.0
    norm_epsilon: float = 1e-6
    conv_epsilon: float = 1e-5
    conv_epsilon_place: str = "std"

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_layers", tuple(self.num_layers))
        one_of("conv_epsilon_place", self.conv_epsilon_place, ("std", "variance"))
        if self.width <= 0 or self.width % 32 or not all(is_count(units, least=1) for units in self.num_layers):
            raise ValueError(
                "A hybrid's width, 64 * width_factor, is a multiple of GroupNorm's 32 groups; every stage has a unit. "
                f"Received: width_factor={self.width_factor}, num_layers={self.num_layers}"
            )

    @property
    def width(self) -> int:
        """Channels of the stem."""
        return int(64 * self.width_factor)


def is_count(value: Any, *, least: int) -> bool:
    """Whether a value is a whole number from `least`: NumPy's integers are, booleans are not."""
    return not isinstance(value, bool) and hasattr(value, "__index__") and int(value) >= least


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise a ValueError that names the field where its value is not a known one."""
    if value not in known:
        raise ValueError(f"{name} is one of {list(known)}. Received: {value!r}")
