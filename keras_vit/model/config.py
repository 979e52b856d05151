"""What a Vision Transformer is made of: one frozen config. Its fields have the official configs' names."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

from keras_vit._util.checks import is_count, one_of, pair
from keras_vit.model.sizes import architecture, canonical_name

__all__ = ["Preprocessing", "ResNetConfig", "ViTConfig", "canonical_name", "check_fields", "pair"]

RESIZES = ("squash", "crop")
INTERPOLATIONS = ("bilinear", "bicubic", "area", "nearest", "lanczos3")


CLASSIFIERS = ("token", "gap", "map", "unpooled", "token_unpooled")
ACTIVATIONS = ("gelu_tanh", "gelu_erf", "gelu_quick", "relu", "silu", "tanh", "linear")
POSITION_METHODS = ("official", "bilinear", "bicubic", "bicubic-antialias")  # position.METHODS, without its NumPy
POSITIONS = ("learned", "learned2d", "sincos2d", "relative", "none")
POSITION_PLACES = ("stem", "blocks", "shared")
NORM_PLACES = ("tokens", "pooled")


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


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """One Vision Transformer. Frozen; `dataclasses.replace` or `config.replace` makes another.

    Args:
        image_size: int or (height, width), pixels.
        patch_size: int or (height, width): pixels, or cells of the ResNet's map in a hybrid.
        hidden_size: width of a token.
        mlp_dim: width inside the MLP.
        num_heads: attention heads; divides hidden_size.
        num_layers: encoder blocks.
        num_classes: outputs of the head; 0 is no head, the output is the feature.
        classifier: "token", "gap" (mean of the patch tokens), "map" (attention pooling), "unpooled" (the head at
            every token), "token_unpooled" (the same, with a class token).
        representation_size: width of the pre_logits layer (Dense and tanh), None for none.
        resnet: a ResNetConfig (or its fields as a dict) makes a hybrid.
        num_channels: of the image.
        class_token: whether there is one; None means as the classifier needs it.
        distilled: DeiT's second token, with a head of its own; the logits are the mean of both heads.
        num_registers: extra tokens after the class token that no head reads.
        position: "learned" (the paper's 1-D), "learned2d" (of column and row, half of the width each), "relative" (in
            the attention, see `layers.relative`), "none" (paper, appendix D.4), or "sincos2d" (fixed, MoCo v3 as in
            big_vision).
        position_place: "stem": added once, behind the patch embedding; "blocks": added to the input of every block,
            each its own; "shared": the same at every block. "relative" acts in every block and needs one of the latter.
        position_prefix: True: class token and registers stand in front before the position embedding is added, which
            has rows for them (Google, HF); False: it has none (big_vision, timm's no_embed_class).
        position_method: how `position.resize` takes the embeddings to another grid.
        patch_bias: bias of the patch embedding.
        pre_norm: LayerNorm in front of the first block (CLIP).
        qkv_bias: biases of query, key and value.
        activation: of the MLP: "gelu_tanh" (Google), "gelu_erf" (timm, HF), "gelu_quick" (OpenAI), "relu", "silu".
        norm_epsilon: of every LayerNorm.
        layer_scale: initial value of LayerScale, None for none.
        final_norm: "tokens": LayerNorm, then pool; "pooled": pool, then LayerNorm (timm's fc_norm).
        representation_activation: of pre_logits.
        dropout_rate: after the stem and its position embedding, attention and both MLP layers.
        attention_dropout_rate: on the attention weights.
        stochastic_depth: chance of dropping the last block's branches, linear from 0 at the first (AugReg).
        head_bias_init: initial bias of the head (big_vision: -10 with the sigmoid loss on ImageNet-21k).
        preprocessing: how images are prepared.
        labels: name of a list in zoo/labels, or the class names themselves, or None.

    Raises:
        ValueError: naming every field that is wrong.
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    hidden_size: int = 768
    mlp_dim: int = 3072
    num_heads: int = 12
    num_layers: int = 12
    num_classes: int = 1000
    classifier: str = "token"
    representation_size: int | None = None
    resnet: ResNetConfig | None = None

    num_channels: int = 3
    class_token: bool | None = None
    distilled: bool = False
    num_registers: int = 0
    position: str = "learned"
    position_place: str = "stem"
    position_prefix: bool = True
    position_method: str = "official"
    patch_bias: bool = True
    pre_norm: bool = False
    qkv_bias: bool = True
    activation: str = "gelu_tanh"
    norm_epsilon: float = 1e-6
    layer_scale: float | None = None
    final_norm: str = "tokens"
    representation_activation: str = "tanh"

    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    stochastic_depth: float = 0.0
    head_bias_init: float = 0.0

    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    labels: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        fix = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        for name, value in vars(self).items():
            if hasattr(value, "dtype") and hasattr(value, "item"):  # NumPy's numbers are no JSON
                fix(name, value.item())
        fix("image_size", pair(self.image_size, "image_size"))
        fix("patch_size", pair(self.patch_size, "patch_size"))
        if isinstance(self.resnet, Mapping):
            fix("resnet", ResNetConfig(**self.resnet))
        if isinstance(self.preprocessing, Mapping):
            fix("preprocessing", Preprocessing(**self.preprocessing))
        if self.class_token is None:
            fix("class_token", str(self.classifier).startswith("token"))
        if self.labels is not None and not isinstance(self.labels, str):
            fix("labels", tuple(self.labels))
        misfits = list(self._misfits()) or list(self._contradictions())
        if misfits:
            raise ValueError("ViTConfig: " + "; ".join(misfits))
        for name in _RANGES:
            value = getattr(self, name)
            fix(name, None if value is None else float(value))

    def _misfits(self) -> Iterable[str]:
        """What is wrong with single fields."""
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if not (is_count(value, least=least) or (value is None and name in _OPTIONAL)):
                yield f"{name} is a whole number from {least}. Received: {value!r}"
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value < high
            if not (fits or (value is None and name in _OPTIONAL)):
                yield f"{name} lies in [{low}, {high}). Received: {value!r}"
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                yield f"{name} is True or False. Received: {getattr(self, name)!r}"
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                yield f"{name} is one of {list(known)}. Received: {getattr(self, name)!r}"
        if not isinstance(self.resnet, ResNetConfig | None):
            yield f"resnet is a ResNetConfig, its fields as a dict, or None. Received: {self.resnet!r}"
        if not isinstance(self.preprocessing, Preprocessing):
            yield f"preprocessing is a Preprocessing or its fields as a dict. Received: {self.preprocessing!r}"

    def _contradictions(self) -> Iterable[str]:
        """What is wrong between fields that are right by themselves."""
        if self.hidden_size % self.num_heads:
            yield f"hidden_size is a multiple of num_heads. Received: {self.hidden_size} and {self.num_heads}"
        if self.classifier.startswith("token") and not self.class_token:
            yield f"classifier={self.classifier!r} needs the class token. Received: class_token=False"
        if self.distilled and (self.classifier, self.representation_size, self.final_norm) != ("token", None, "tokens"):
            yield (
                "distilled needs classifier='token', representation_size=None and final_norm='tokens'. Received: "
                f"{self.classifier!r}, {self.representation_size!r} and {self.final_norm!r}"
            )
        yield from self._position_contradictions()
        if len(self.preprocessing.mean) not in (1, self.num_channels):
            yield (
                f"preprocessing has one mean for all or one for each of num_channels={self.num_channels}. "
                f"Received: {self.preprocessing.mean}"
            )
        if min(self.grid) < 1:
            smallest = f"{self.stride[0]}x{self.stride[1]}"
            yield f"the image is smaller than one patch ({smallest} pixels). Received: image_size={self.image_size}"

    def _position_contradictions(self) -> Iterable[str]:
        if self.position == "sincos2d" and (self.hidden_size % 4 or self.hidden_size < 8):
            yield f"position='sincos2d' needs hidden_size % 4 == 0 and at least 8. Received: {self.hidden_size}"
        if self.position == "learned2d" and self.hidden_size % 2:
            yield f"position='learned2d' gives each axis half of the hidden_size. Received: {self.hidden_size}"
        if self.position == "relative" and self.position_place == "stem":
            yield (
                "position='relative' is part of every block's attention: position_place is 'blocks' (each its own) or "
                "'shared'. Received: 'stem'"
            )
        if self.position_place == "stem":
            return
        if self.position in ("sincos2d", "none"):
            yield f"position={self.position!r} needs position_place='stem'. Received: {self.position_place!r}"
        if self.num_prefix_tokens and not self.position_prefix:
            yield (
                f"position_place={self.position_place!r} is of whole sequences, class token and registers included, "
                "and needs position_prefix=True. Received: False"
            )

    @property
    def size(self) -> tuple[int, int]:
        """Image size in pixels, (height, width)."""
        return cast(tuple[int, int], self.image_size)  # a pair since __post_init__

    @property
    def patch(self) -> tuple[int, int]:
        """Patch size, (height, width): pixels, or cells of the ResNet's map in a hybrid."""
        return cast(tuple[int, int], self.patch_size)

    @property
    def is_unpooled(self) -> bool:
        """Whether the head is applied to every token."""
        return self.classifier in ("unpooled", "token_unpooled")

    @property
    def has_map_head(self) -> bool:
        """Whether attention pooling (big_vision's MAP head) makes the feature."""
        return self.classifier == "map"

    @property
    def reads_class_token(self) -> bool:
        """Whether the feature is that of the class token."""
        return self.classifier in ("token", "token_unpooled")

    @property
    def read_tokens(self) -> slice:
        """Tokens that the feature is made from: the class token (and the distillation token), or all patches."""
        return slice(0, 1 + self.distilled) if self.reads_class_token else slice(self.num_prefix_tokens, None)

    @property
    def num_final_tokens(self) -> int:
        """Tokens that the last block has to compute: 1 (2 of a distilled model) for "token", else all."""
        return 1 + self.distilled if self.classifier == "token" else self.num_tokens

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
        """Patch tokens, (height, width). A rest that fills no patch is dropped, as in the official code."""
        return self.grid_of(self.size)

    def grid_of(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """The grid that an image gives.

        Args:
            image_size: (height, width) of the image, pixels.

        Returns:
            (rows, columns) of patches.
        """
        # Every stride-2 step of the stem pads as TensorFlow's SAME: it rounds up, which is one division rounded up.
        height, width = (
            -(-side // self._stem_stride) // cell for side, cell in zip(image_size, self.patch, strict=True)
        )
        return height, width

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: class token, distillation token, registers."""
        return int(bool(self.class_token)) + int(self.distilled) + self.num_registers

    @property
    def position_prefix_tokens(self) -> int:
        """Rows of the position embedding that belong to tokens in front of the patches."""
        return self.num_prefix_tokens if self.position_prefix else 0

    @property
    def num_tokens(self) -> int:
        """Length of the sequence the blocks see."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    def replace(self, **changes: Any) -> Self:
        """The same config with some fields changed.

        A class token stays where only the classifier changes: the weights have one. Labels go with their classes.

        Args:
            **changes: fields and their new values.

        Raises:
            ValueError: where a field is unknown (offers the nearest) or wrong.
        """
        check_fields(changes)
        if changes.get("num_classes", self.num_classes) != self.num_classes:
            changes = {"labels": None, **changes}
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `ViTConfig(**d)` gives the config back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_name(cls, name: str, **changes: Any) -> ViTConfig:
        """The official architecture of a name such as "B/16", "ViT-B_16", "R50+ViT-B/16" or big_vision's "So400m/14".

        Args:
            name: in any of these spellings.
            **changes: fields that shall differ from the official ones.

        Raises:
            ValueError: where the name is no architecture (offers the nearest), or a field is unknown or wrong.
        """
        check_fields(changes)
        return cls(**{**architecture(name), **changes})


_COUNTS = {
    # field: least
    **dict.fromkeys(("hidden_size", "mlp_dim", "num_heads", "num_layers", "num_channels", "representation_size"), 1),
    **dict.fromkeys(("num_classes", "num_registers"), 0),
}
_LARGEST = 1e38  # of float32
_RANGES: dict[str, tuple[float, float]] = {
    # field: least, end
    **dict.fromkeys(("dropout_rate", "attention_dropout_rate", "stochastic_depth"), (0, 1)),
    **dict.fromkeys(("norm_epsilon", "layer_scale"), (0, _LARGEST)),
    "head_bias_init": (-_LARGEST, _LARGEST),
}
_FLAGS = ("class_token", "distilled", "position_prefix", "patch_bias", "pre_norm", "qkv_bias")
_OPTIONAL = ("representation_size", "layer_scale")
_CHOICES = {
    "classifier": CLASSIFIERS,
    "position_method": POSITION_METHODS,
    "activation": ACTIVATIONS,
    "representation_activation": ACTIVATIONS,
    "position": POSITIONS,
    "position_place": POSITION_PLACES,
    "final_norm": NORM_PLACES,
}


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise a ValueError where a name is no field of ViTConfig, with the nearest names."""
    known = [f.name for f in dataclasses.fields(ViTConfig)]
    unknown = [name for name in fields if name not in known]
    if unknown:
        near = {name: difflib.get_close_matches(name, known, n=2) for name in unknown}
        raise ValueError(f"ViTConfig has no field {unknown}; the nearest are {near}. Its fields: {known}")
