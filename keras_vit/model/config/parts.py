"""Parts of a `ViTConfig`: how images are prepared, and the ResNet of a hybrid or a BiT."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from keras_vit._util.checks import Checked, Count, Positive

# Images are resized to size / crop_fraction: a smaller one would take any memory.
CropFraction = Annotated[float, "[0.0625, 1]"]
Finite = Annotated[float, "(-inf, inf)"]


@dataclass(frozen=True, kw_only=True)
class Preprocessing(Checked):
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

    resize: Literal["squash", "crop"] = "squash"
    interpolation: Literal["bilinear", "bicubic", "area", "nearest", "lanczos3"] = "bilinear"
    antialias: bool = False
    crop_fraction: CropFraction = 1.0
    crop_rounding: Literal["nearest", "down", "half_even"] = "nearest"
    round_pixels: bool = False
    mean: tuple[Finite, ...] = (0.5,)
    std: tuple[Positive, ...] = (0.5,)

    def _conflicts(self) -> Iterator[str]:
        if not self.mean or len(self.mean) != len(self.std):
            yield (
                "mean and std have one value for each channel or one for all. "
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
class ResNetConfig(Checked):
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

    num_layers: tuple[Count, ...] = ()
    width_factor: Positive = 1.0
    norm_epsilon: float = 1e-6
    conv_epsilon: float = 1e-5
    conv_epsilon_place: Literal["std", "variance"] = "std"
    version: Literal[1, 2] = 1
    stage_widths: tuple[Count, ...] = ()
    stage_channels: tuple[Count, ...] = ()
    groups: Count = 32

    def _conflicts(self) -> Iterator[str]:
        if not self.width or self.width % self.groups:
            yield (
                "the width 64 * width_factor is a multiple of GroupNorm's groups. "
                f"Received: width_factor={self.width_factor}, groups={self.groups}"
            )
        fits = len(self.widths) == len(self.outputs) == len(self.num_layers)
        if not fits or any(width % self.groups for width in (*self.widths, *self.outputs)):
            yield (
                f"stage_widths and stage_channels have a multiple of groups={self.groups} for each stage of "
                f"num_layers, or are (). Received: stage_widths={self.stage_widths}, "
                f"stage_channels={self.stage_channels}, num_layers={self.num_layers}"
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
