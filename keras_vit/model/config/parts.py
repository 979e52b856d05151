"""Parts of a `ViTConfig`: how images are prepared, and the ResNet of a hybrid or a BiT."""

import math
from dataclasses import dataclass

from keras_vit._util.checks import is_count, one_of

RESIZES = ("squash", "crop")
CROP_ROUNDINGS = ("nearest", "down", "half_even")
INTERPOLATIONS = ("bilinear", "bicubic", "area", "nearest", "lanczos3")
LEAST_CROP = 1 / 16  # images are resized to size / crop_fraction: a smaller one would take any memory


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Preparation of images for a model. The default is the official evaluation (vit_jax/input_pipeline.py).

    Args:
        resize: "squash" scales both sides to size / crop_fraction and ignores the aspect ratio (vit_jax); "crop" scales
            the shorter side to size / crop_fraction (big_vision, timm). Then the centre is taken.
        interpolation: "bilinear", "bicubic", "area", "nearest" or "lanczos3", as `tf.image.resize` computes them; the
            results are clipped to pixels, 0 to 255.
        antialias: whether the kernel widens when images shrink, as in Pillow; vit_jax has no antialias.
        crop_fraction: the share of the resized (shorter) side that is kept, in [1/16, 1].
        crop_rounding: "nearest" rounds the longer side to the nearest pixel and the crop's corner down (big_vision);
            "down" rounds both down (Hugging Face), "half_even" the side down and the corner half to even (timm).
        round_pixels: whether pixels are rounded to whole numbers after each direction of the resize (timm, Hugging
            Face). With antialias, bilinear, bicubic and lanczos3 then equal Pillow 13 to the byte. In a .tflite file
            that resizes images itself, a sum next to a half may be rounded to the other side.
        mean: subtracted first, one for each channel or one for all, for pixels on a scale of 0 to 1.
        std: the result is divided by it, one for each channel or one for all, above 0. The defaults give -1 to 1.

    Raises:
        ValueError: a value is not accepted.

    Example:
        >>> timm = keras_vit.Preprocessing(resize="crop", crop_fraction=0.9, interpolation="bicubic", antialias=True)
        >>> keras_vit.ViTConfig(preprocessing=timm).preprocessing.crop_fraction
        0.9
    """

    resize: str = "squash"
    interpolation: str = "bilinear"
    antialias: bool = False
    crop_fraction: float = 1.0
    crop_rounding: str = "nearest"
    round_pixels: bool = False
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        one_of("resize", self.resize, RESIZES)
        one_of("interpolation", self.interpolation, INTERPOLATIONS)
        one_of("crop_rounding", self.crop_rounding, CROP_ROUNDINGS)
        for name in ("mean", "std"):
            try:
                object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
            except (TypeError, ValueError):
                received = f"{getattr(self, name)!r:.200}"
                raise ValueError(f"{name} must be a tuple of numbers. Received: {received}") from None
        if not LEAST_CROP <= self.crop_fraction <= 1:
            raise ValueError(f"crop_fraction must be in [{LEAST_CROP}, 1]. Received: {self.crop_fraction!r:.200}")
        if not self.mean or len(self.mean) != len(self.std) or not all(0 < value < math.inf for value in self.std):
            raise ValueError(
                "mean and std have one value for each channel or one for all, std above 0. "
                f"Received: mean={self.mean}, std={self.std}"
            )

    @property
    def overshoots(self) -> bool:
        """True if the interpolation alone gives values below 0 or above 255, which are clipped."""
        return self.interpolation in ("bicubic", "lanczos3")

    @property
    def is_pillows(self) -> bool:
        """True if images are resized exactly as Pillow does."""
        return self.round_pixels and self.antialias and self.interpolation in ("bilinear", "bicubic", "lanczos3")


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """ResNet in front of a hybrid's patches, or a whole BiT: weight-standardized convolutions, GroupNorm.

    Source: google-research/vision_transformer, vit_jax/models_resnet.py (paper, section 3.1, "Hybrid Architecture").

    Args:
        num_layers: number of units in each stage; () is the stem alone.
        width_factor: the stem has 64 * width_factor channels, a multiple of `groups`.
        norm_epsilon: epsilon of GroupNorm.
        conv_epsilon: epsilon of the weight standardization.
        conv_epsilon_place: "std" divides by std + epsilon (Google), "variance" by sqrt(variance + epsilon) (timm, BiT).
        version: 1 has norms after the convolutions (hybrids); 2 has them in front, pads both sides with zeros, and ends
            in a norm and ReLU (BiT, arXiv 1912.11370; google-research/big_transfer).
        stage_widths: channels of the 3x3 convolutions of each stage; () doubles them from stage to stage, beginning
            with the stem's.
        stage_channels: channels of the output of each stage; () is four times its width.
        groups: number of GroupNorm's groups of channels, which divides all numbers of channels.

    Raises:
        ValueError: a value is not accepted.

    Example:
        >>> r50 = keras_vit.ResNetConfig(num_layers=(3, 4, 9))
        >>> keras_vit.ViTConfig(resnet=r50, patch_size=1).grid  # R50+ViT-B/16: the map has stride 16
        (14, 14)
    """

    num_layers: tuple[int, ...] = ()
    width_factor: float = 1.0
    norm_epsilon: float = 1e-6
    conv_epsilon: float = 1e-5
    conv_epsilon_place: str = "std"
    version: int = 1
    stage_widths: tuple[int, ...] = ()
    stage_channels: tuple[int, ...] = ()
    groups: int = 32

    def __post_init__(self) -> None:
        for name in ("num_layers", "stage_widths", "stage_channels"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        one_of("conv_epsilon_place", self.conv_epsilon_place, ("std", "variance"))
        has_groups = is_count(self.groups, least=1) and self.width > 0 and self.width % self.groups == 0
        if not has_groups or not all(is_count(units, least=1) for units in self.num_layers):
            raise ValueError(
                "The width 64 * width_factor is a multiple of GroupNorm's groups, and every stage has a unit. "
                f"Received: width_factor={self.width_factor}, groups={self.groups!r:.200}, num_layers={self.num_layers}"
            )
        fits = len(self.widths) == len(self.outputs) == len(self.num_layers) and all(
            is_count(w, least=1) and not w % self.groups for w in (*self.widths, *self.outputs)
        )
        if self.version not in (1, 2) or not fits:
            raise ValueError(
                "version is 1 or 2, and stage_widths and stage_channels have a multiple of the groups for each stage "
                f"of num_layers, or are (). Received: version={self.version!r}, stage_widths={self.stage_widths}, "
                f"stage_channels={self.stage_channels}, groups={self.groups}, num_layers={self.num_layers}"
            )

    @property
    def width(self) -> int:
        """Channels of the stem."""
        return int(64 * self.width_factor)

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of the 3x3 convolutions of each stage."""
        return self.stage_widths or tuple(self.width * 2**stage for stage in range(len(self.num_layers)))

    @property
    def outputs(self) -> tuple[int, ...]:
        """Channels of the output of each stage."""
        return self.stage_channels or tuple(4 * width for width in self.widths)

    @property
    def channels(self) -> int:
        """Channels of the feature map."""
        return (self.width, *self.outputs)[-1]
