"""Configuration of a Vision Transformer, and of a text tower: a frozen dataclass each, with the official names.

The fields of ViTConfig are in groups. Each group checks its own values and can be used alone, as in
`EncoderBlock(BlockConfig(...))`; ViTConfig inherits from all of them, so that every field keeps its flat spelling.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Self, assert_never, cast, get_args

from keras_vit._util.checks import Checked, Count, Positive, Share, WholeNumber, pair
from keras_vit._util.fields import documented
from keras_vit._util.text import in_our_words, nearest, warn
from keras_vit.model.architectures import architecture_fields

# Images are resized to size / crop_fraction: a smaller one would take any memory.
CropFraction = Annotated[float, "[0.0625, 1]"]
Bits = Annotated[int, "[8, 32]"]
Finite = Annotated[float, "(-inf, inf)"]


def uncounted(default: Any) -> Any:
    """Describe a field that changes none of the numbers of `model.cost`; of every other field that module must know."""
    return field(default=default, metadata={"is_counted": False})


@documented
@dataclass(frozen=True, kw_only=True)
class Preprocessing(Checked):
    """Preparation of images for a model. The default is the official evaluation (vit_jax/input_pipeline.py).

    Raises:
        ValueError: a value is not accepted.

    Example:
        >>> timm = keras_vit.Preprocessing(resize="crop", crop_fraction=0.9, interpolation="bicubic", antialias=True)
        >>> keras_vit.ViTConfig(preprocessing=timm).preprocessing.crop_fraction
        0.9
    """

    resize: Literal["squash", "crop"] = "squash"
    """Sides that are scaled to size / crop_fraction: "squash" scales both and ignores the aspect ratio (vit_jax),
    "crop" the shorter side (big_vision, timm). Then the centre is taken.
    """
    interpolation: Literal["bilinear", "bicubic", "area", "nearest", "lanczos3"] = "bilinear"
    """Kernel, as `tf.image.resize` computes it; the results are clipped to pixels, 0 to 255."""
    antialias: bool = False
    """Whether the kernel widens when images shrink, as in Pillow; vit_jax has no antialias."""
    crop_fraction: CropFraction = 1.0
    """The share of the resized (shorter) side that is kept, in [1/16, 1]."""
    crop_rounding: Literal["nearest", "down", "half_even"] = "nearest"
    """Whole pixels: "nearest" rounds the longer side to the nearest pixel and the crop's corner down (big_vision);
    "down" rounds both down (Hugging Face), "half_even" the side down and the corner half to even (timm).
    """
    round_pixels: bool = False
    """Whether pixels are rounded to whole numbers after each direction of the resize (timm, Hugging Face). With
    antialias, bilinear, bicubic and lanczos3 then equal Pillow 13 to the byte. In a .tflite file that resizes images
    itself, a sum next to a half may be rounded to the other side.
    """
    mean: tuple[Finite, ...] = (0.5,)
    """Mean to subtract from pixels on a scale of 0 to 1: one number for each channel, or one for all."""
    std: tuple[Positive, ...] = (0.5,)
    """Divisor of the result, above 0: one number for each channel, or one for all. The defaults give -1 to 1."""
    bits: Bits | None = None
    """Used bits of pictures whose values are not bytes (files of 16 bits, other arrays): 12 for values from 0 to 4,095.
    A larger value is an error. None: such files have 16 bits, and arrays values from 0 to 255.
    """
    range: tuple[Finite, ...] | None = None
    """Values of black and white in place of bits, such as (0, 1) for floats or (-160, 240) for a window of a CT. Values
    outside are clipped. A first value above the second inverts. Bytes are from 0 to 255 in any case.
    """

    def _convert(self) -> None:
        """Repeat one value for all if the other field has one for each channel: both then have equal lengths."""
        mean, std = self.mean, self.std
        if isinstance(mean, tuple) and isinstance(std, tuple) and 1 in (len(mean), len(std)):
            self._set("mean", mean * (len(std) if len(mean) == 1 else 1))
            self._set("std", std * (len(mean) if len(std) == 1 else 1))

    def _conflicts(self) -> Iterator[str]:
        if not self.mean or len(self.mean) != len(self.std):
            yield (
                "mean and std have one value for each channel or one for all. "
                f"Received: mean={self.mean}, std={self.std}"
            )
        if self.range is not None and (len(self.range) != 2 or self.range[0] == self.range[1]):
            yield f"range has two different values, of black and white. Received: {self.range}"
        if self.range is not None and self.bits is not None:
            yield f"bits and range both state the values: give one. Received: bits={self.bits}, range={self.range}"

    @property
    def limits(self) -> tuple[float, float] | None:
        """Values of black and white that `bits` or `range` states; None if neither does."""
        if self.bits is not None:
            return 0.0, 2.0**self.bits - 1
        return None if self.range is None else (self.range[0], self.range[1])

    def for_all_channels(self) -> Self:
        """Copy with one mean and one std for any number of channels, if those of all channels are equal.

        Example:
            >>> keras_vit.Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.5,)).for_all_channels().mean
            (0.5,)
        """
        if len({*self.mean}) == len({*self.std}) == 1:
            return replace(self, mean=self.mean[:1], std=self.std[:1])
        return self

    @property
    def overshoots(self) -> bool:
        """True if the interpolation alone gives values below 0 or above 255, which are clipped."""
        return self.interpolation in ("bicubic", "lanczos3")

    @property
    def matches_pillow(self) -> bool:
        """True if images are resized exactly as Pillow does."""
        return self.round_pixels and self.antialias and self.interpolation in ("bilinear", "bicubic", "lanczos3")


@documented
@dataclass(frozen=True, kw_only=True)
class ResNetConfig(Checked):
    """ResNet in front of a hybrid's patches, or a whole BiT: weight-standardized convolutions, GroupNorm.

    Source: google-research/vision_transformer, vit_jax/models_resnet.py (paper, section 3.1, "Hybrid Architecture").

    Raises:
        ValueError: a value is not accepted.

    Example:
        >>> r50 = keras_vit.ResNetConfig(num_layers=(3, 4, 9))
        >>> keras_vit.ViTConfig(resnet=r50, patch_size=1).grid  # R50+ViT-B/16: the map has stride 16
        (14, 14)
    """

    num_layers: tuple[Count, ...] = ()
    """Number of units in each stage; () is the stem alone."""
    width_factor: Positive = 1.0
    """The stem has 64 * width_factor channels, a multiple of `groups`."""
    norm_epsilon: float = uncounted(1e-6)
    """Epsilon of GroupNorm."""
    conv_epsilon: float = uncounted(1e-5)
    """Epsilon of the weight standardization."""
    conv_epsilon_place: Literal["std", "variance"] = uncounted("std")
    """Where the epsilon stands: "std" divides by std + epsilon (Google), "variance" by sqrt(variance + epsilon) (timm,
    BiT).
    """
    version: Literal[1, 2] = 1
    """Kind of units: 1 has norms after the convolutions (hybrids); 2 has them in front, pads both sides with zeros, and
    ends in a norm and ReLU (BiT, arXiv 1912.11370; google-research/big_transfer).
    """
    stage_widths: tuple[Count, ...] = ()
    """Channels of the 3x3 convolutions of each stage; () doubles the stem's from stage to stage."""
    stage_channels: tuple[Count, ...] = ()
    """Channels of the output of each stage; () is four times its width."""
    groups: Count = 32
    """Number of GroupNorm's groups of channels, which divides all numbers of channels."""

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


# fmt: off
Activation = Literal[
    "gelu_tanh", "gelu_erf", "gelu_quick", "relu", "relu6", "leaky_relu", "silu", "hard_swish", "sigmoid", "tanh",
    "linear",
]
# fmt: on
Classifier = Literal["token", "gap", "token_gap", "map", "unpooled", "token_unpooled"]
_READS_CLASS_TOKEN: dict[Classifier, bool] = {
    **dict.fromkeys(("token", "token_gap", "token_unpooled"), True),
    **dict.fromkeys(("gap", "map", "unpooled"), False),
}
# As position.METHODS, which needs NumPy.
PositionMethod = Literal["official", "bilinear", "bilinear-antialias", "bicubic", "bicubic-offset", "bicubic-antialias"]
ACTIVATIONS = get_args(Activation)
POSITION_METHODS = get_args(PositionMethod)

NonNegative = Annotated[float, "[0, 1e38)"]  # 1e38: nearly the largest float32
Frequency = Annotated[float, "[1, 1e38)"]
Float32 = Annotated[float, "(-1e38, 1e38)"]


@dataclass(frozen=True, kw_only=True)
class Group(Checked):
    """Base of the groups."""

    def _needs(self, feature: str, **needed: Any) -> Iterator[str]:
        """Yield a sentence if fields do not have the values that a feature needs."""
        if wrong := {name: getattr(self, name) for name, value in needed.items() if getattr(self, name) != value}:
            wants, has = (", ".join(f"{name}={values[name]!r:.200}" for name in wrong) for values in (needed, wrong))
            yield f"{feature} needs {wants}. Received: {has}"

    def to_dict(self) -> dict[str, Any]:
        """Convert the fields to plain values, for JSON, with which the class makes an equal config."""
        return asdict(self)

    @classmethod
    def part_of(cls, other: Any) -> Self:
        """Take the fields of this group from another object."""
        return cls(**{field.name: getattr(other, field.name) for field in fields(cls)})


def label_conflicts(labels: str | tuple[str, ...] | None) -> Iterator[str]:
    """Describe each name of a class that no file can have."""
    for label in labels if isinstance(labels, tuple) else ():
        if not label.isascii() and label.encode(errors="ignore").decode() != label:
            yield f"labels must be valid Unicode, or no file can have them. Received: {label!r:.200}"


@documented
@dataclass(frozen=True, kw_only=True)
class StemConfig(Group):
    """From pixels to tokens."""

    image_size: int | tuple[int, int] = 224
    """Pixels, an int or (height, width)."""
    patch_size: int | tuple[int, int] = 16
    """Pixels, or cells of the ResNet's feature map in a hybrid: an int or (height, width)."""
    num_channels: Count = 3
    """Channels of the image."""
    patch_bias: bool = True
    """Whether the patch embedding has a bias."""
    resnet: ResNetConfig | None = None
    """ResNet in front of the patches, which makes the model a hybrid: a ResNetConfig, or its fields as a dict."""
    class_token: bool | None = None
    """Whether there is a class token; None means only if the classifier needs one."""
    num_class_tokens: Count = 1
    """Number of class tokens, if there is one; the head reads the mean of several (Pixio, arXiv 2512.15715)."""
    distilled: bool = False
    """Whether DeiT's distillation token and head exist (arXiv 2012.12877); the logits are both heads' mean."""
    num_registers: WholeNumber = 0
    """Number of extra tokens after the class token that no head reads (arXiv 2309.16588)."""
    patch_norm: bool = False
    """Whether a LayerNorm follows the patch embedding, in front of positions and other tokens (AIMv2)."""
    pre_norm: bool = False
    """Whether a LayerNorm precedes the first block (CLIP)."""

    def _convert(self) -> None:
        super()._convert()
        self._set("image_size", pair(self.image_size, "image_size"))
        self._set("patch_size", pair(self.patch_size, "patch_size"))
        if isinstance(self.resnet, Mapping):
            self._set("resnet", ResNetConfig(**self.resnet))

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if min(self.grid) < 1:
            smallest = f"{self.stride[0]}x{self.stride[1]}"
            yield f"the image is smaller than one patch ({smallest} pixels). Received: image_size={self.image_size}"

    @property
    def size(self) -> tuple[int, int]:
        """Image size in pixels, (height, width)."""
        return cast(tuple[int, int], self.image_size)  # a pair since __post_init__

    @property
    def patch(self) -> tuple[int, int]:
        """Patch size, (height, width): pixels, or cells of the ResNet's map in a hybrid."""
        return cast(tuple[int, int], self.patch_size)

    @property
    def stride(self) -> tuple[int, int]:
        """Pixels from one token to the next, (height, width)."""
        height, width = self.patch
        return height * self._stem_stride, width * self._stem_stride

    @property
    def _stem_stride(self) -> int:
        if self.resnet is None:
            return 1
        return 4 * 2 ** max(0, len(self.resnet.num_layers) - 1)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches, (rows, columns). Pixels that fill no patch are dropped, as in the official code."""
        return self.grid_of(self.size)

    def grid_of(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Number of patches, (rows, columns), for another image size.

        Args:
            image_size: (height, width) of the image in pixels.
        """
        # SAME padding rounds up at every stride of 2 in the stem; together that is one division that rounds up.
        height, width = (
            -(-side // self._stem_stride) // cell for side, cell in zip(image_size, self.patch, strict=True)
        )
        return height, width

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens in front of the patches: class token, distillation token, registers."""
        return self.num_class_tokens * bool(self.class_token) + int(self.distilled) + self.num_registers

    @property
    def num_tokens(self) -> int:
        """Length of the sequence that the blocks process."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]


@documented
@dataclass(frozen=True, kw_only=True)
class PositionConfig(Group):
    """Where tokens are."""

    position: Literal["learned", "learned2d", "sincos2d", "relative", "none"] = "learned"
    """Kind of positions: "learned" (1-D), "learned2d" (one embedding of the column and one of the row, each half as
    wide), "relative" (in attention, see `model.layers.position_variants`), "none" (all paper, appendix D.4), or
    "sincos2d" (fixed; MoCo v3 and big_vision).
    """
    position_place: Literal["stem", "blocks", "shared"] = "stem"
    """Where they are added: "stem" adds the embedding once, after the patch embedding; "blocks" adds a different one to
    the input of every block, "shared" the same one. "relative" needs "blocks" or "shared".
    """
    position_prefix: bool = True
    """Whether prefix tokens have positions. True: class token and registers come first and the position embedding has
    rows for them (Google, Hugging Face); False: they are put in front afterwards (big_vision, timm's no_embed_class).
    """
    position_method: PositionMethod = uncounted("official")
    """Method, one of `position.METHODS`, by which positions and patches are resized."""
    rotary_theta: Frequency | None = None
    """Base of the frequencies of rotary positions (arXiv 2104.09864), which turn the queries and keys of patches in
    every block, beside `position`; None means no rotary positions.
    """
    rotary_grid: WholeNumber | None = uncounted(None)
    """Side in patches of the grid on which rotary positions were trained: patch i of n is at i * rotary_grid / n
    (EVA-02); 0: at i, on any grid (RoPE-ViT). None means centres of patches from -1 to 1, in full turns (DINOv3).
    """
    rotary_interleaved: bool = uncounted(False)
    """Whether the channels that are turned together are neighbours (EVA-02); False pairs channel i of a head with
    channel i + size / 2 (DINOv3).
    """
    rotary_offset: Float32 = uncounted(0.0)
    """Number of the first patch of a row or column (1 in Perception Encoders)."""
    rotary_axes: Literal["yx", "xy"] = uncounted("yx")
    """Order of the axes: "yx" turns the first half of a head's pairs by the row; "xy" by the column (RoPE-ViT)."""
    rotary_learned: bool = False
    """Whether the angles by which a patch's coordinates turn a pair are weights, other ones in every head and block,
    which begin with rotary_theta (RoPE-Mixed).
    """
    relative_bias: Literal["none", "blocks", "shared"] = "none"
    """Where numbers are added to the attention's scores, one for each head and offset of two patches in two dimensions,
    beside `position`: "blocks" (different ones in every block, BEiT), "shared" or "none".
    """
    relative_bias_mlp_dim: Count | None = None
    """Width of an MLP that computes these numbers from the offsets (timm's relpos models); None means a table."""

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.position == "relative":
            yield from self._needs("position='relative'", rotary_theta=None, relative_bias="none")
        if self.position == "relative" and self.position_place == "stem":
            yield (
                "position='relative' acts in the attention of every block: position_place is 'blocks' (one each) or "
                "'shared'. Received: 'stem'"
            )
        if self.rotary_learned:
            yield from self._needs("rotary_learned=True", relative_bias="none")
            if self.rotary_theta is None:
                yield "rotary_learned=True needs rotary_theta, a base of the first frequencies. Received: None"
        if self.relative_bias == "none":
            yield from self._needs("relative_bias='none'", relative_bias_mlp_dim=None)
        if self.position in ("sincos2d", "none"):
            yield from self._needs(f"position={self.position!r}", position_place="stem")


@documented
@dataclass(frozen=True, kw_only=True)
class BlockConfig(Group):
    """Encoder block (paper, equations 2 and 3): what mixes the tokens, the MLP, the norms."""

    num_heads: Count = 12
    """Number of attention heads; divides hidden_size."""
    mlp_dim: Count = 3072
    """Width of the MLP's hidden layer."""
    tokens_mlp_dim: Count | None = None
    """Width of the hidden layer of an MLP over the tokens, which replaces the attention of every block (MLP-Mixer,
    arXiv 2105.01601); None means attention.
    """
    qkv_bias: bool = True
    """Whether query, key and value have biases."""
    key_bias: bool = True
    """Whether the key has a bias where query and value have one."""
    dense_bias: bool = True
    """Whether attention's output projection and the layers of the MLP have biases."""
    gated_mlp: bool = False
    """Whether the MLP's activation is that of a second Dense layer, the gate, by which the first one is multiplied
    (SwiGLU with "silu", arXiv 2002.05202).
    """
    attention_norm: bool = False
    """Whether a LayerNorm of all heads together precedes attention's output projection (BEiT-3)."""
    mlp_norm: bool = False
    """Whether a LayerNorm precedes the MLP's last Dense layer (EVA-02)."""
    activation: Activation = "gelu_tanh"
    """Activation of the MLP: "gelu_tanh" (Google), "gelu_erf" (timm, Hugging Face), "gelu_quick" (OpenAI), "relu",
    "relu6", "leaky_relu" (of slope 0.01), "silu", "hard_swish", "sigmoid", "tanh" or "linear".
    """
    norm: Literal["layer", "rms"] = "layer"
    """Kind of norms: "layer" is a LayerNorm everywhere; "rms" an RMSNorm, which subtracts no mean and adds no shift
    (arXiv 1910.07467, AIMv2).
    """
    norm_epsilon: NonNegative = uncounted(1e-6)
    """Epsilon of every norm."""
    layer_scale: NonNegative | None = None
    """Initial value of LayerScale (arXiv 2103.17239); None means no LayerScale."""
    dropout_rate: Share = 0.0
    """Dropout after the stem and its position embedding, after attention and after both MLP layers, in [0, 1)."""
    attention_dropout_rate: Share = 0.0
    """Dropout of the attention weights, in [0, 1)."""

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.norm == "rms":
            yield from self._needs("norm='rms'", attention_norm=False, mlp_norm=False, tokens_mlp_dim=None)

    @property
    def norm_options(self) -> dict[str, Any]:
        """Arguments of every norm of tokens, a `model.layers.LayerNormalization`."""
        return {"epsilon": self.norm_epsilon, "is_rms": self.norm == "rms"}


@documented
@dataclass(frozen=True, kw_only=True)
class HeadConfig(Group):
    """From tokens to logits."""

    num_classes: WholeNumber = 1000
    """Number of classes; 0 means no head, the output is the feature."""
    classifier: Classifier = "token"
    """How tokens become the feature (the official configs' name for pooling): "token" (class token), "gap" (mean of the
    patch tokens), "token_gap" (both side by side, DINOv2's linear head), "map" (attention pooling), "unpooled" (the
    head is applied to every token) or "token_unpooled" (the same, with a class token).
    """
    token_blocks: Count = 1
    """Number of last blocks whose class tokens, each after the final norm, are side by side in the feature, the last
    block's last (4 in DINOv2's head "linear4").
    """
    mean_blocks: Count = 1
    """Number of last blocks whose means of the patch tokens follow. With "token" and "map" the last block's mean is
    left out, so 1 means no mean; the last block of "token" then computes the class token alone.
    """
    pool_heads: Count | None = None
    """Number of heads of attention pooling; None means num_heads."""
    pool_mlp_dim: WholeNumber | None = None
    """Width of the MLP in attention pooling; None means mlp_dim; 0 neither MLP nor norm, and a probe that is the query
    itself (AIMv2).
    """
    pool_prefix: bool = False
    """Whether attention pooling reads the class token and registers, too (Perception Encoder)."""
    representation_size: Count | None = None
    """Width of the pre_logits layer (Dense and tanh); None means no such layer."""
    representation_activation: Activation = "tanh"
    """Activation of the pre_logits layer."""
    final_norm: Literal["tokens", "pooled", "none"] = "tokens"
    """Place of the last norm: "tokens" normalizes, then pools; "pooled" pools, then normalizes (timm's fc_norm); "none"
    (RADIO).
    """
    normalize_features: bool = False
    """Whether the feature has length 1, before the head or as the output of a model without a head."""
    projection_head: bool = False
    """Whether the head gives an embedding (CLIP), not classes. A changed num_classes makes it False."""
    head_bias_init: Float32 = uncounted(0.0)
    """Initial bias of the head (big_vision: -10 for the sigmoid loss on ImageNet-21k)."""
    labels: str | tuple[str, ...] | None = uncounted(None)
    """Name of a list in zoo/labels, or the class names themselves; None means plain numbers."""
    probabilities: Literal["softmax", "sigmoid"] = uncounted("softmax")
    """Function from logits to probabilities: "softmax", or "sigmoid" of each class for itself (SigLIP), which need not
    add up to 1. A changed num_classes makes it "softmax".
    """

    def _convert(self) -> None:
        super()._convert()
        if self.num_classes == 0 and self.projection_head is True:
            self._set("projection_head", False)  # a file of CLIP without the projection

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.classifier == "token_gap":
            yield from self._needs("classifier='token_gap'", final_norm="tokens")
        for name, kinds in (
            ("token_blocks", ("token", "token_gap")),
            ("mean_blocks", ("token", "gap", "token_gap", "map")),
        ):
            if getattr(self, name) > 1:
                yield from self._needs(f"{name} above 1", final_norm="tokens")
                if self.classifier not in kinds:
                    yield f"{name} above 1 needs a classifier of {kinds}. Received: {self.classifier!r}"
        if self.is_unpooled:
            yield from self._needs(f"classifier={self.classifier!r}", normalize_features=False, projection_head=False)
        yield from label_conflicts(self.labels)
        if self.projection_head:
            yield from self._needs("projection_head", normalize_features=False, representation_size=None, labels=None)

    @property
    def is_unpooled(self) -> bool:
        """True if the head is applied to every token."""
        return self.classifier in ("unpooled", "token_unpooled")

    @property
    def has_map_head(self) -> bool:
        """True if the feature comes from attention pooling (big_vision's MAP head)."""
        return self.classifier == "map"

    @property
    def reads_class_token(self) -> bool:
        """True if the feature comes from the class token."""
        return _READS_CLASS_TOKEN[self.classifier]


# The fields of the last base come first.
@documented
@dataclass(frozen=True, kw_only=True)
class ViTConfig(HeadConfig, BlockConfig, PositionConfig, StemConfig):
    """Architecture of one Vision Transformer (arXiv 2010.11929). Frozen; `replace` returns a changed copy.

    The defaults are ViT-B/16 for 224 pixels and 1,000 classes. All fields are spelled flat. Most belong to a group,
    which documents them: `StemConfig` (from pixels to tokens), `PositionConfig`, `BlockConfig` or `HeadConfig`.

    Raises:
        ValueError: fields are wrong or contradict each other; one message names all of them.

    Example:
        >>> config = keras_vit.ViTConfig.from_name("B/16", num_classes=10)
        >>> config.hidden_size, config.grid, config.num_tokens
        (768, (14, 14), 197)
        >>> config.replace(image_size=384).grid, config.grid_of((384, 512))
        ((24, 24), (24, 32))
        >>> keras_vit.ViTConfig(**config.to_dict()) == config
        True
    """

    hidden_size: Count = 768
    """Width of a token."""
    num_layers: WholeNumber = 12
    """Number of encoder blocks. 0 is a ResNet without a Transformer (BiT): it needs `resnet`, patch_size=1,
    position="none", and the ResNet's channels as hidden_size.
    """
    stochastic_depth: Share = 0.0
    """Probability of dropping a branch of the last block, in [0, 1); it grows linearly from 0 at the first block
    (AugReg, arXiv 2106.10270).
    """
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    """A Preprocessing, or its fields as a dict."""

    def _convert(self) -> None:
        super()._convert()
        if isinstance(self.preprocessing, Mapping):
            self._set("preprocessing", Preprocessing(**self.preprocessing))
        if isinstance(self.preprocessing, Preprocessing) and len(self.preprocessing.mean) != self.num_channels:
            self._set("preprocessing", self.preprocessing.for_all_channels())
        if self.class_token is None:
            self._set("class_token", str(self.classifier).startswith("token"))
        if self.pool_mlp_dim == self.mlp_dim:
            self._set("pool_mlp_dim", None)

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if not self.num_layers:
            channels = self.resnet.channels if self.resnet else None
            needed = {"hidden_size": channels, "patch_size": (1, 1), "position": "none", "final_norm": "tokens"}
            needed |= {"patch_norm": False, "pre_norm": False, "num_prefix_tokens": 0, "tokens_mlp_dim": None}
            yield from self._needs("num_layers=0, a ResNet without a Transformer,", **needed)
        if self.hidden_size % self.num_heads and (self.has_attention or self.has_map_head):
            yield f"hidden_size is a multiple of num_heads. Received: {self.hidden_size} and {self.num_heads}"
        if self.has_map_head and self.hidden_size % (self.pool_heads or 1):
            yield f"hidden_size is a multiple of pool_heads. Received: {self.hidden_size} and {self.pool_heads}"
        if self.norm == "rms" and self.has_map_head:
            yield from self._needs("norm='rms' with classifier='map'", pool_mlp_dim=0)
        if self.classifier.startswith("token") and not self.class_token:
            yield f"classifier={self.classifier!r} needs the class token. Received: class_token=False"
        if self.num_read_blocks > max(1, self.num_layers):
            most, received = f"at most num_layers={self.num_layers}", self.num_read_blocks
            yield f"token_blocks and mean_blocks are {most}. Received: {received}"
        if self.num_class_tokens > 1:
            yield from self._needs("num_class_tokens above 1", class_token=True, distilled=False)
        if self.distilled:
            needed = {"classifier": "token", "token_blocks": 1, "representation_size": None, "final_norm": "tokens"}
            yield from self._needs("distilled", **needed, normalize_features=False, projection_head=False)
        yield from self._position_conflicts()
        if len(self.preprocessing.mean) not in (1, self.num_channels):
            yield (
                f"preprocessing has one mean for all or one for each of num_channels={self.num_channels}: state "
                'preprocessing={"mean": ..., "std": ...} of these channels. '
                f"Received: {self.preprocessing.mean}"
            )

    def _position_conflicts(self) -> Iterator[str]:
        if self.rotary_theta is not None and self.hidden_size // self.num_heads % 4:
            received = f"{self.hidden_size} / {self.num_heads}"
            yield f"rotary_theta needs heads whose size is a multiple of 4. Received: {received}"
        if self.position == "sincos2d" and (self.hidden_size % 4 or self.hidden_size < 8):
            yield f"position='sincos2d' needs hidden_size % 4 == 0 and at least 8. Received: {self.hidden_size}"
        if self.position == "learned2d" and self.hidden_size % 2:
            yield f"position='learned2d' gives each axis half of the hidden_size. Received: {self.hidden_size}"
        if not self.has_attention:
            received = "tokens_mlp_dim" if self.num_layers else "num_layers=0"
            if self.position == "relative":
                yield f"position='relative' needs attention. Received: {received}"
            if self.rotary_theta is not None:
                yield f"rotary_theta needs attention. Received: {received}"
            if self.relative_bias != "none":
                yield f"relative_bias needs attention. Received: {received}"
        if self.position_place != "stem" and self.num_prefix_tokens:  # whole sequences, all tokens included
            yield from self._needs(f"position_place={self.position_place!r}", position_prefix=True)

    @property
    def block(self) -> BlockConfig:
        """Config of every encoder block."""
        return BlockConfig.part_of(self)

    @property
    def has_attention(self) -> bool:
        """True if the blocks have attention."""
        return self.num_layers > 0 and self.tokens_mlp_dim is None

    @property
    def feature_size(self) -> int:
        """Width of the feature in front of pre_logits and head."""
        return len(self.feature_parts) * self.hidden_size

    @property
    def feature_parts(self) -> list[tuple[str, int]]:
        """Parts of that feature, in order: "token", "mean" or "map", and how many blocks from the end; 0 is the last.

        A head on every token has a part "unpooled".
        """
        tokens = [("token", number) for number in reversed(range(self.token_blocks))]
        means = [("mean", number) for number in reversed(range(self.mean_blocks))]
        match self.classifier:
            case "token":
                return tokens + means[:-1]
            case "gap":
                return means
            case "token_gap":
                return tokens + means
            case "map":
                return [("map", 0), *means[:-1]]
            case "unpooled" | "token_unpooled":
                return [("unpooled", 0)]
        assert_never(self.classifier)

    @property
    def num_read_blocks(self) -> int:
        """Number of last blocks whose tokens the feature is computed from."""
        return max(self.token_blocks, self.mean_blocks)

    @property
    def read_tokens(self) -> slice:
        """Slice of the tokens that the feature is computed from: class (and distillation) tokens, or all patches."""
        first, prefix = self.num_class_tokens + self.distilled, self.num_prefix_tokens
        return slice(0, first) if self.reads_class_token else slice(prefix, None)

    @property
    def num_final_tokens(self) -> int:
        """Number of tokens that the last block has to compute: those that "token" reads, else all."""
        return self.read_tokens.stop if self.classifier == "token" else self.num_tokens

    @property
    def position_prefix_tokens(self) -> int:
        """Number of rows of the position embedding that belong to prefix tokens."""
        return self.num_prefix_tokens if self.position_prefix else 0

    def replace(self, **changes: Any) -> Self:
        """Copy the config with some fields changed.

        A changed `classifier` keeps the class token. A changed `num_classes` drops the labels, `projection_head` and
        `probabilities`. Of `preprocessing` as a dict only the fields that it names change.

        Args:
            **changes: fields and their new values.

        Raises:
            ValueError: a field is unknown (the message names the nearest) or wrong.
        """
        check_fields(changes)
        if changes.get("num_classes", self.num_classes) != self.num_classes:
            changes = {"labels": None, "projection_head": False, "probabilities": "softmax", **changes}
        preparation = changes.get("preprocessing", {})
        if isinstance(preparation, Mapping):
            check_fields(preparation, Preprocessing)
            changes = {**changes, "preprocessing": dataclasses.replace(self.preprocessing, **preparation)}
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_name(cls, name: str, **changes: Any) -> Self:
        """Look up the official architecture with this name (vit_jax/configs/models.py, big_vision's models/vit.py).

        Args:
            name: such as "B/16", "ViT-B_16", "R50+ViT-B/16" or "So400m/14", in any case and with any separators.
            **changes: fields that differ from the official ones.

        Raises:
            ValueError: no architecture has this name (the message names the nearest), or a field is unknown or wrong.
        """
        check_fields(changes)
        return cls(**{**architecture_fields(name), **changes})


@documented
@dataclass(frozen=True, kw_only=True)
class TextConfig(BlockConfig):
    """Architecture of a text tower. The fields of the blocks are those of `ViTConfig`; the defaults are CLIP-B/16's.

    Raises:
        ValueError: fields are wrong or contradict each other; one message names all of them.

    Example:
        >>> keras_vit.text.TextConfig(max_length=64, causal=False, pooling="last").to_dict()["num_layers"]
        12
    """

    vocab_size: Count = 49408
    """Number of tokens that the tower knows."""
    max_length: Count = 77
    """Most tokens of a text, start and end included."""
    hidden_size: Count = 512
    """Width of a token."""
    num_layers: Count = 12
    """Number of encoder blocks."""
    num_heads: Count = 8
    mlp_dim: Count = 2048
    activation: Activation = "gelu_quick"
    norm_epsilon: NonNegative = 1e-5
    causal: bool = True
    """Whether a token attends only to itself and to those in front of it (CLIP)."""
    pooling: Literal["end", "last", "first"] = "end"
    """Token that is the embedding: "end" takes the end token, "last" the last position, whatever token it has (SigLIP),
    "first" the first.
    """
    end_token: WholeNumber | None = None
    """Id of the end token; None: the largest id in a text, as in CLIP's first configs."""
    projection_size: WholeNumber = 512
    """Width of the embedding; 0 means no projection."""
    projection_bias: bool = False
    """Whether the projection has a bias."""
    logit_scale: Finite | None = None
    """Natural logarithm of the factor of the cosine similarities of texts and images, as files have it; None if the
    file has none.
    """
    logit_bias: Finite | None = None
    """Number added to their product (SigLIP); None for a pair that is trained with softmax."""

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.hidden_size % self.num_heads:
            yield f"hidden_size must be a multiple of num_heads. Received: {self.hidden_size} and {self.num_heads}"
        if self.tokens_mlp_dim is not None:
            yield f"a text tower has attention and needs tokens_mlp_dim=None. Received: {self.tokens_mlp_dim}"
        if self.end_token is not None and self.end_token >= self.vocab_size:
            yield f"end_token must be below vocab_size={self.vocab_size}. Received: {self.end_token}"

    @property
    def width(self) -> int:
        """Width of the embeddings."""
        return self.projection_size or self.hidden_size


def check_fields(fields: Mapping[str, Any], kind: Any = ViTConfig) -> None:
    """Raise a ValueError, with the nearest names, if a key is no field of ViTConfig, or of another config."""
    known = [f.name for f in dataclasses.fields(kind)]
    if unknown := [name for name in fields if name not in known]:
        if words := in_our_words(unknown):
            raise ValueError(f"{kind.__name__} has no field {unknown}: {words}")
        near = {name: nearest(name, known, count=2) for name in unknown}
        raise ValueError(f"{kind.__name__} has no field {unknown}; the nearest are {near}. Its fields: {known}")


# ---- what some architectures cannot do


def check_resizable(source: ViTConfig, target: ViTConfig) -> None:
    """Raise a ValueError if the weights of a model cannot be resized to the image and patch size of another config."""
    if source.resnet is not None and target.patch_size != source.patch_size:
        raise ValueError(
            f"patch_size is fixed in a hybrid: its patches are {source.patch} cells of the ResNet's feature map, and "
            f"only patches of pixels are resized. Received: patch_size={target.patch}"
        )
    if source.tokens_mlp_dim is not None and target.num_tokens != source.num_tokens:
        raise ValueError(
            f"A token MLP has weights for {source.num_tokens} tokens: image_size and patch_size must give as many. "
            f"Received: image_size={target.size} and patch_size={target.patch}, which give {target.num_tokens}"
        )


def check_attention(config: ViTConfig) -> None:
    """Raise a ValueError if a model has no attention weights to return."""
    if not config.has_attention:
        blocks = "MLPs over the tokens (tokens_mlp_dim)" if config.num_layers else "no blocks (num_layers=0)"
        raise ValueError(
            "Attention maps need blocks with attention; `model.features` returns the tokens or feature maps of every "
            f"model. Received: a model that has {blocks}"
        )


MOST_TOKENS = 1_000_000  # 16,000 x 16,000 pixels in patches of 16


def check_patches(config: ViTConfig) -> None:
    """Raise an error if a model that is being built has too many patches; warn if they do not cover the image."""
    height, width = config.size
    if config.num_tokens > MOST_TOKENS:
        raise ValueError(
            f"A model has at most {MOST_TOKENS:,} tokens, for memory and attention. Received: {config.num_tokens:,} of "
            f"image_size={config.size} and patch_size={config.patch}"
        )
    used = tuple(cells * step for cells, step in zip(config.grid, config.stride, strict=True))
    # A ResNet pads the image: then the patches cover more than the image, and nothing is lost.
    if used[0] < height or used[1] < width:
        warn(
            f"keras_vit: images of {height}x{width} pixels are no multiple of the "
            f"{config.stride[0]}x{config.stride[1]} patch; "
            f"the model sees the upper left {used[0]}x{used[1]}, as in the official code."
        )
