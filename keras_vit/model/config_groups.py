"""Parts of a configuration, each checked on its own: preprocessing, ResNet, groups of ViTConfig's fields.

Each group is a frozen dataclass that checks its own values, and can be used alone: `EncoderBlock(BlockConfig(...))`.
`ViTConfig` inherits from all of them, so that every field keeps its flat spelling.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Self, cast, get_args

from keras_vit._util.checks import Checked, Count, Positive, Share, WholeNumber, pair

# Images are resized to size / crop_fraction: a smaller one would take any memory.
CropFraction = Annotated[float, "[0.0625, 1]"]
Bits = Annotated[int, "[8, 32]"]
Finite = Annotated[float, "(-inf, inf)"]


def uncounted(default: Any) -> Any:
    """Describe a field that changes none of the numbers of `model.cost`; of every other field that module must know."""
    return field(default=default, metadata={"is_counted": False})


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
        bits: of pictures whose values are not bytes (files of 16 bits, other arrays): 12 for values from 0 to 4,095.
            A larger value is an error. None: such files have 16 bits, and arrays values from 0 to 255.
        range: in place of bits, the values of black and white, such as (0, 1) for floats or (-160, 240) for a window
            of a CT. Values outside are clipped. A first value above the second inverts. Bytes are from 0 to 255 in any
            case.

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
    bits: Bits | None = None
    range: tuple[Finite, ...] | None = None

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
    norm_epsilon: float = uncounted(1e-6)
    conv_epsilon: float = uncounted(1e-5)
    conv_epsilon_place: Literal["std", "variance"] = uncounted("std")
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


# fmt: off
Activation = Literal[
    "gelu_tanh", "gelu_erf", "gelu_quick", "relu", "relu6", "leaky_relu", "silu", "hard_swish", "sigmoid", "tanh",
    "linear",
]
# fmt: on
Classifier = Literal["token", "gap", "token_gap", "map", "unpooled", "token_unpooled"]
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

    def _unmet(self, feature: str, **needed: Any) -> Iterator[str]:
        """Describe fields that do not have the values that a feature needs."""
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


@dataclass(frozen=True, kw_only=True)
class StemConfig(Group):
    """From pixels to tokens.

    Args:
        image_size: int or (height, width) in pixels.
        patch_size: int or (height, width): pixels, or cells of the ResNet's feature map in a hybrid.
        num_channels: channels of the image.
        patch_bias: whether the patch embedding has a bias.
        resnet: a ResNetConfig, or its fields as a dict, makes the model a hybrid.
        class_token: whether there is a class token; None means only if the classifier needs one.
        num_class_tokens: number of class tokens, if there is one; the head reads the mean of several (Pixio, arXiv
            2512.15715).
        distilled: whether DeiT's distillation token and head exist (arXiv 2012.12877); the logits are both heads' mean.
        num_registers: number of extra tokens after the class token that no head reads (arXiv 2309.16588).
        patch_norm: whether a LayerNorm follows the patch embedding, in front of positions and other tokens (AIMv2).
        pre_norm: whether a LayerNorm precedes the first block (CLIP).
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    num_channels: Count = 3
    patch_bias: bool = True
    resnet: ResNetConfig | None = None
    class_token: bool | None = None
    num_class_tokens: Count = 1
    distilled: bool = False
    num_registers: WholeNumber = 0
    patch_norm: bool = False
    pre_norm: bool = False

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


@dataclass(frozen=True, kw_only=True)
class PositionConfig(Group):
    """Where tokens are.

    Args:
        position: "learned" (1-D), "learned2d" (one embedding of the column and one of the row, each half as wide),
            "relative" (in attention, see `model.layers.position_variants`), "none" (all paper, appendix D.4), or
            "sincos2d" (fixed; MoCo v3 and big_vision).
        position_place: "stem" adds the embedding once, after the patch embedding; "blocks" adds a different one to the
            input of every block, "shared" the same one. "relative" needs "blocks" or "shared".
        position_prefix: True: class token and registers come first and the position embedding has rows for them
            (Google, Hugging Face); False: they are put in front afterwards (big_vision, timm's no_embed_class).
        position_method: one of `position.METHODS`, by which positions and patches are resized.
        rotary_theta: base of the frequencies of rotary positions (arXiv 2104.09864), which turn the queries and keys of
            patches in every block, beside `position`; None means no rotary positions.
        rotary_grid: side in patches of the grid on which rotary positions were trained: patch i of n is at
            i * rotary_grid / n (EVA-02); 0: at i, on any grid (RoPE-ViT). None means centres of patches from -1 to 1,
            in full turns (DINOv3).
        rotary_interleaved: whether the channels that are turned together are neighbours (EVA-02); False pairs channel i
            of a head with channel i + size / 2 (DINOv3).
        rotary_offset: number of the first patch of a row or column (1 in Perception Encoders).
        rotary_axes: "yx" turns the first half of a head's pairs by the row; "xy" by the column (RoPE-ViT).
        rotary_learned: whether the angles by which a patch's coordinates turn a pair are weights, other ones in every
            head and block, which begin with rotary_theta (RoPE-Mixed).
        relative_bias: numbers that are added to the attention's scores, one for each head and offset of two patches in
            two dimensions, beside `position`: "blocks" (different ones in every block, BEiT), "shared" or "none".
        relative_bias_mlp_dim: width of an MLP that computes these numbers from the offsets (timm's relpos models); None
            means a table of them.
    """

    position: Literal["learned", "learned2d", "sincos2d", "relative", "none"] = "learned"
    position_place: Literal["stem", "blocks", "shared"] = "stem"
    position_prefix: bool = True
    position_method: PositionMethod = uncounted("official")
    rotary_theta: Frequency | None = None
    rotary_grid: WholeNumber | None = uncounted(None)
    rotary_interleaved: bool = uncounted(False)
    rotary_offset: Float32 = uncounted(0.0)
    rotary_axes: Literal["yx", "xy"] = uncounted("yx")
    rotary_learned: bool = False
    relative_bias: Literal["none", "blocks", "shared"] = "none"
    relative_bias_mlp_dim: Count | None = None

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.position == "relative":
            yield from self._unmet("position='relative'", rotary_theta=None, relative_bias="none")
        if self.position == "relative" and self.position_place == "stem":
            yield (
                "position='relative' acts in the attention of every block: position_place is 'blocks' (one each) or "
                "'shared'. Received: 'stem'"
            )
        if self.rotary_learned:
            yield from self._unmet("rotary_learned=True", relative_bias="none")
            if self.rotary_theta is None:
                yield "rotary_learned=True needs rotary_theta, a base of the first frequencies. Received: None"
        if self.relative_bias == "none":
            yield from self._unmet("relative_bias='none'", relative_bias_mlp_dim=None)
        if self.position in ("sincos2d", "none"):
            yield from self._unmet(f"position={self.position!r}", position_place="stem")


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Group):
    """Encoder block (paper, equations 2 and 3): what mixes the tokens, the MLP, the norms.

    Args:
        num_heads: number of attention heads; divides hidden_size.
        mlp_dim: width of the MLP's hidden layer.
        tokens_mlp_dim: width of the hidden layer of an MLP over the tokens, which replaces the attention of every block
            (MLP-Mixer, arXiv 2105.01601); None means attention.
        qkv_bias: whether query, key and value have biases.
        key_bias: whether the key has a bias where query and value have one.
        dense_bias: whether attention's output projection and the layers of the MLP have biases.
        gated_mlp: whether the MLP's activation is that of a second Dense layer, the gate, by which the first one is
            multiplied (SwiGLU with "silu", arXiv 2002.05202).
        attention_norm: whether a LayerNorm of all heads together precedes attention's output projection (BEiT-3).
        mlp_norm: whether a LayerNorm precedes the MLP's last Dense layer (EVA-02).
        activation: in the MLP: "gelu_tanh" (Google), "gelu_erf" (timm, Hugging Face), "gelu_quick" (OpenAI), "relu",
            "relu6", "leaky_relu" (of slope 0.01), "silu", "hard_swish", "sigmoid", "tanh" or "linear".
        norm: "layer" is a LayerNorm everywhere; "rms" an RMSNorm, which subtracts no mean and adds no shift (arXiv
            1910.07467, AIMv2).
        norm_epsilon: epsilon of every norm.
        layer_scale: initial value of LayerScale (arXiv 2103.17239); None means no LayerScale.
        dropout_rate: after the stem and its position embedding, after attention and after both MLP layers, in [0, 1).
        attention_dropout_rate: on the attention weights, in [0, 1).
    """

    num_heads: Count = 12
    mlp_dim: Count = 3072
    tokens_mlp_dim: Count | None = None
    qkv_bias: bool = True
    key_bias: bool = True
    dense_bias: bool = True
    gated_mlp: bool = False
    attention_norm: bool = False
    mlp_norm: bool = False
    activation: Activation = "gelu_tanh"
    norm: Literal["layer", "rms"] = "layer"
    norm_epsilon: NonNegative = uncounted(1e-6)
    layer_scale: NonNegative | None = None
    dropout_rate: Share = 0.0
    attention_dropout_rate: Share = 0.0

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.norm == "rms":
            yield from self._unmet("norm='rms'", attention_norm=False, mlp_norm=False, tokens_mlp_dim=None)

    @property
    def norm_options(self) -> dict[str, Any]:
        """Arguments of every norm of tokens, a `model.layers.LayerNormalization`."""
        return {"epsilon": self.norm_epsilon, "is_rms": self.norm == "rms"}


@dataclass(frozen=True, kw_only=True)
class HeadConfig(Group):
    """From tokens to logits.

    Args:
        num_classes: number of classes; 0 means no head, the output is the feature.
        classifier: how tokens become the feature (the official configs' name for pooling): "token" (class token), "gap"
            (mean of the patch tokens), "token_gap" (both side by side, DINOv2's linear head), "map" (attention
            pooling), "unpooled" (the head is applied to every token) or "token_unpooled" (the same, with a class
            token).
        token_blocks: number of last blocks whose class tokens, each after the final norm, are side by side in the
            feature, the last block's last (4 in DINOv2's head "linear4").
        mean_blocks: the same of the means of the patch tokens, which follow. With "token" and "map" the last block's
            mean is left out, so 1 means no mean; the last block of "token" then computes the class token alone.
        pool_heads: number of heads of attention pooling; None means num_heads.
        pool_mlp_dim: width of the MLP in attention pooling; None means mlp_dim; 0 neither MLP nor norm, and a probe
            that is the query itself (AIMv2).
        pool_prefix: whether attention pooling reads the class token and registers, too (Perception Encoder).
        representation_size: width of the pre_logits layer (Dense and tanh); None means no such layer.
        representation_activation: activation of the pre_logits layer.
        final_norm: "tokens" normalizes, then pools; "pooled" pools, then normalizes (timm's fc_norm); "none" (RADIO).
        normalize_features: whether the feature is divided by its Euclidean norm before the head, or as the output of a
            model without a head.
        projection_head: whether the head gives an embedding (CLIP), not classes. A changed num_classes makes it False.
        head_bias_init: initial bias of the head (big_vision: -10 for the sigmoid loss on ImageNet-21k).
        labels: name of a list in zoo/labels, or the class names themselves; None means plain numbers.
        probabilities: what makes probabilities of the logits: "softmax", or "sigmoid" of each class for itself
            (SigLIP), which need not add up to 1. A changed num_classes makes it "softmax".
    """

    num_classes: WholeNumber = 1000
    classifier: Classifier = "token"
    token_blocks: Count = 1
    mean_blocks: Count = 1
    pool_heads: Count | None = None
    pool_mlp_dim: WholeNumber | None = None
    pool_prefix: bool = False
    representation_size: Count | None = None
    representation_activation: Activation = "tanh"
    final_norm: Literal["tokens", "pooled", "none"] = "tokens"
    normalize_features: bool = False
    projection_head: bool = False
    head_bias_init: Float32 = uncounted(0.0)
    labels: str | tuple[str, ...] | None = uncounted(None)
    probabilities: Literal["softmax", "sigmoid"] = uncounted("softmax")

    def _convert(self) -> None:
        super()._convert()
        if self.num_classes == 0 and self.projection_head is True:
            self._set("projection_head", False)  # a file of CLIP without the projection

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.classifier == "token_gap":
            yield from self._unmet("classifier='token_gap'", final_norm="tokens")
        for name, kinds in (
            ("token_blocks", ("token", "token_gap")),
            ("mean_blocks", ("token", "gap", "token_gap", "map")),
        ):
            if getattr(self, name) > 1:
                yield from self._unmet(f"{name} above 1", final_norm="tokens")
                if self.classifier not in kinds:
                    yield f"{name} above 1 needs a classifier of {kinds}. Received: {self.classifier!r}"
        if self.is_unpooled:
            yield from self._unmet(f"classifier={self.classifier!r}", normalize_features=False, projection_head=False)
        yield from label_conflicts(self.labels)
        if self.projection_head:
            yield from self._unmet("projection_head", normalize_features=False, representation_size=None, labels=None)

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
        return self.classifier in ("token", "token_gap", "token_unpooled")


def document_groups(cls: type, *groups: type) -> None:
    """Add the arguments of groups to the docstring of a config that inherits from them, in front of its own."""
    # Python 3.13 removes the indentation of docstrings, earlier versions keep it.
    own, *theirs = (inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")[::2] for kind in (cls, *groups))
    arguments = "\n".join(part.strip("\n") for _, part in (*theirs, own))
    cls.__doc__ = f"{own[0]}\nArgs:\n{arguments}\n"
