"""Configuration of a Vision Transformer: one frozen dataclass. Its fields have the names of the official configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

from keras_vit._util.checks import is_count, pair
from keras_vit._util.text import nearest
from keras_vit.model.config_parts import Preprocessing, ResNetConfig
from keras_vit.model.sizes import architecture

__all__ = ["Preprocessing", "ResNetConfig", "ViTConfig", "check_fields"]

CLASSIFIERS = ("token", "gap", "token_gap", "map", "unpooled", "token_unpooled")
ACTIVATIONS = ("gelu_tanh", "gelu_erf", "gelu_quick", "relu", "silu", "tanh", "linear")
# As position.METHODS, which needs NumPy.
POSITION_METHODS = ("official", "bilinear", "bilinear-antialias", "bicubic", "bicubic-antialias")
POSITIONS = ("learned", "learned2d", "sincos2d", "relative", "none")
POSITION_PLACES = ("stem", "blocks", "shared")
NORM_PLACES = ("tokens", "pooled")


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Architecture of one Vision Transformer (arXiv 2010.11929). Frozen; `replace` returns a changed copy.

    The defaults are ViT-B/16 for 224 pixels and 1,000 classes.

    Args:
        image_size: int or (height, width) in pixels.
        patch_size: int or (height, width): pixels, or cells of the ResNet's feature map in a hybrid.
        hidden_size: width of a token.
        mlp_dim: width of the MLP's hidden layer.
        num_heads: number of attention heads; divides hidden_size.
        num_layers: number of encoder blocks. 0 is a ResNet without a Transformer (BiT): it needs `resnet`,
            patch_size=1, position="none", and the ResNet's channels as hidden_size.
        num_classes: number of classes; 0 means no head, the output is the feature.
        classifier: "token" (class token), "gap" (mean of the patch tokens), "token_gap" (both side by side, DINOv2's
            linear head), "map" (attention pooling), "unpooled" (the head is applied to every token) or
            "token_unpooled" (the same, with a class token).
        representation_size: width of the pre_logits layer (Dense and tanh); None means no such layer.
        resnet: a ResNetConfig, or its fields as a dict, makes the model a hybrid.
        tokens_mlp_dim: width of the hidden layer of an MLP over the tokens, which replaces the attention of every block
            (MLP-Mixer, arXiv 2105.01601); None means attention.
        num_channels: channels of the image.
        class_token: whether there is a class token; None means only if the classifier needs one.
        distilled: whether DeiT's distillation token and head exist (arXiv 2012.12877); the logits are both heads' mean.
        num_registers: number of extra tokens after the class token that no head reads (arXiv 2309.16588).
        position: "learned" (1-D), "learned2d" (one embedding of the column and one of the row, each half as wide),
            "relative" (in attention, see `model.layers.relative`), "none" (all paper, appendix D.4), or "sincos2d"
            (fixed; MoCo v3 and big_vision).
        position_place: "stem" adds the embedding once, after the patch embedding; "blocks" adds a different one to the
            input of every block, "shared" the same one. "relative" needs "blocks" or "shared".
        position_prefix: True: class token and registers come first and the position embedding has rows for them
            (Google, Hugging Face); False: they are put in front afterwards (big_vision, timm's no_embed_class).
        position_method: one of `position.METHODS`, by which positions and patches are resized.
        rotary_theta: base of the frequencies of rotary positions (arXiv 2104.09864), which turn the queries and keys of
            patches in every block, beside `position`; None means no rotary positions.
        rotary_grid: side in patches of the grid on which rotary positions were trained: patch i of n is at
            i * rotary_grid / n (EVA-02). None means centres of patches from -1 to 1, in full turns (DINOv3).
        rotary_interleaved: whether the channels that are turned together are neighbours (EVA-02); False pairs channel i
            of a head with channel i + size / 2 (DINOv3).
        patch_bias: whether the patch embedding has a bias.
        pre_norm: whether a LayerNorm precedes the first block (CLIP).
        qkv_bias: whether query, key and value have biases.
        key_bias: whether the key has a bias where query and value have one.
        gated_mlp: whether the MLP's activation is that of a second Dense layer, the gate, by which the first one is
            multiplied (SwiGLU with "silu", arXiv 2002.05202).
        mlp_norm: whether a LayerNorm precedes the MLP's last Dense layer (EVA-02).
        activation: in the MLP: "gelu_tanh" (Google), "gelu_erf" (timm, Hugging Face), "gelu_quick" (OpenAI), "relu",
            "silu", "tanh" or "linear".
        norm_epsilon: epsilon of every LayerNorm.
        layer_scale: initial value of LayerScale (arXiv 2103.17239); None means no LayerScale.
        final_norm: "tokens" normalizes, then pools; "pooled" pools, then normalizes (timm's fc_norm).
        representation_activation: activation of the pre_logits layer.
        dropout_rate: after the stem and its position embedding, after attention and after both MLP layers, in [0, 1).
        attention_dropout_rate: on the attention weights, in [0, 1).
        stochastic_depth: probability of dropping a branch of the last block, in [0, 1); it grows linearly from 0 at the
            first block (AugReg, arXiv 2106.10270).
        normalize_features: whether the feature is divided by its Euclidean norm before the head, or as the output of a
            model without a head.
        projection_head: whether the head gives an embedding (CLIP), not classes. A changed num_classes makes it False.
        head_bias_init: initial bias of the head (big_vision: -10 for the sigmoid loss on ImageNet-21k).
        preprocessing: a Preprocessing, or its fields as a dict.
        labels: name of a list in zoo/labels, or the class names themselves; None means plain numbers.

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
    tokens_mlp_dim: int | None = None

    num_channels: int = 3
    class_token: bool | None = None
    distilled: bool = False
    num_registers: int = 0
    position: str = "learned"
    position_place: str = "stem"
    position_prefix: bool = True
    position_method: str = "official"
    rotary_theta: float | None = None
    rotary_grid: int | None = None
    rotary_interleaved: bool = False
    patch_bias: bool = True
    pre_norm: bool = False
    qkv_bias: bool = True
    key_bias: bool = True
    gated_mlp: bool = False
    mlp_norm: bool = False
    activation: str = "gelu_tanh"
    norm_epsilon: float = 1e-6
    layer_scale: float | None = None
    final_norm: str = "tokens"
    representation_activation: str = "tanh"
    normalize_features: bool = False
    projection_head: bool = False

    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    stochastic_depth: float = 0.0
    head_bias_init: float = 0.0

    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    labels: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if hasattr(value, "dtype") and hasattr(value, "item"):  # JSON has no NumPy numbers
                self._set(name, value.item())
        self._set("image_size", pair(self.image_size, "image_size"))
        self._set("patch_size", pair(self.patch_size, "patch_size"))
        if isinstance(self.resnet, Mapping):
            self._set("resnet", ResNetConfig(**self.resnet))
        if isinstance(self.preprocessing, Mapping):
            self._set("preprocessing", Preprocessing(**self.preprocessing))
        if self.class_token is None:
            self._set("class_token", str(self.classifier).startswith("token"))
        if self.labels is not None and not isinstance(self.labels, str):
            self._set("labels", tuple(self.labels))
        if self.num_classes == 0 and self.projection_head is True:
            self._set("projection_head", False)  # a file of CLIP without the projection
        if errors := list(self._field_errors()) or list(self._conflicts()):
            raise ValueError("ViTConfig: " + "; ".join(errors))
        for name in _RANGES:
            value = getattr(self, name)
            self._set(name, None if value is None else float(value))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    def _field_errors(self) -> Iterator[str]:
        """Yield a sentence for each field with a value that is never accepted."""
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if not (is_count(value, least=least) or (value is None and name in _OPTIONAL)):
                yield f"{name} must be an integer >= {least}. Received: {value!r}"
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value < high
            if not (fits or (value is None and name in _OPTIONAL)):
                yield f"{name} must be in [{low}, {high}). Received: {value!r}"
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                yield f"{name} is True or False. Received: {getattr(self, name)!r}"
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                yield f"{name} must be one of {list(known)}. Received: {getattr(self, name)!r}"
        if not isinstance(self.resnet, ResNetConfig | None):
            yield f"resnet is a ResNetConfig, its fields as a dict, or None. Received: {self.resnet!r}"
        if not isinstance(self.preprocessing, Preprocessing):
            yield f"preprocessing is a Preprocessing or its fields as a dict. Received: {self.preprocessing!r}"

    def _conflicts(self) -> Iterator[str]:
        """Yield a sentence for each combination of values that is not accepted."""
        for option, (is_used, needed) in self._needs().items():
            wrong = {name: getattr(self, name) for name, value in needed.items() if getattr(self, name) != value}
            if is_used and wrong:
                yield f"{option} needs {needed}. Received: {wrong}"
        if self.hidden_size % self.num_heads and (self.has_attention or self.has_map_head):
            yield f"hidden_size is a multiple of num_heads. Received: {self.hidden_size} and {self.num_heads}"
        if self.classifier.startswith("token") and not self.class_token:
            yield f"classifier={self.classifier!r} needs the class token. Received: class_token=False"
        yield from self._position_conflicts()
        if len(self.preprocessing.mean) not in (1, self.num_channels):
            yield (
                f"preprocessing has one mean for all or one for each of num_channels={self.num_channels}. "
                f"Received: {self.preprocessing.mean}"
            )
        if min(self.grid) < 1:
            smallest = f"{self.stride[0]}x{self.stride[1]}"
            yield f"the image is smaller than one patch ({smallest} pixels). Received: image_size={self.image_size}"

    def _needs(self) -> dict[str, tuple[bool, dict[str, Any]]]:
        """Return for each option whether it is used, and the values that other fields and properties must have."""
        resnet: dict[str, Any] = {"hidden_size": self.resnet.channels if self.resnet else None, "patch_size": (1, 1)}
        resnet |= {"position": "none", "pre_norm": False, "num_prefix_tokens": 0, "tokens_mlp_dim": None}
        tokens, one = {"final_norm": "tokens"}, {"distilled": False, "is_unpooled": False}
        return {
            "num_layers=0, a ResNet without a Transformer,": (not self.num_layers, {**resnet, **tokens}),
            "classifier='token_gap'": (self.classifier == "token_gap", tokens),
            "distilled": (self.distilled, {"classifier": "token", "representation_size": None, **tokens}),
            "normalize_features": (self.normalize_features, {**one, "projection_head": False}),
            "projection_head": (self.projection_head, {**one, "representation_size": None, "labels": None}),
        }

    def _position_conflicts(self) -> Iterator[str]:
        if self.rotary_theta is not None and (self.hidden_size // self.num_heads % 4 or self.position == "relative"):
            yield (
                "rotary_theta needs heads whose size is a multiple of 4, and no position='relative'. "
                f"Received: {self.hidden_size} / {self.num_heads} and {self.position!r}"
            )
        if self.position == "sincos2d" and (self.hidden_size % 4 or self.hidden_size < 8):
            yield f"position='sincos2d' needs hidden_size % 4 == 0 and at least 8. Received: {self.hidden_size}"
        in_attention = {
            "position='relative'": self.position == "relative",
            "rotary_theta": self.rotary_theta is not None,
        }
        for name, is_used in in_attention.items():
            if is_used and not self.has_attention:
                yield f"{name} needs attention. Received: {'tokens_mlp_dim' if self.num_layers else 'num_layers=0'}"
        if self.position == "learned2d" and self.hidden_size % 2:
            yield f"position='learned2d' gives each axis half of the hidden_size. Received: {self.hidden_size}"
        if self.position == "relative" and self.position_place == "stem":
            yield (
                "position='relative' acts in the attention of every block: position_place is 'blocks' (one each) or "
                "'shared'. Received: 'stem'"
            )
        if self.position_place == "stem":
            return
        if self.position in ("sincos2d", "none"):
            yield f"position={self.position!r} needs position_place='stem'. Received: {self.position_place!r}"
        if self.num_prefix_tokens and not self.position_prefix:
            yield (
                f"position_place={self.position_place!r} embeds whole sequences, class token and registers included, "
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
        """True if the head is applied to every token."""
        return self.classifier in ("unpooled", "token_unpooled")

    @property
    def has_attention(self) -> bool:
        """True if the blocks have attention."""
        return self.num_layers > 0 and self.tokens_mlp_dim is None

    @property
    def has_map_head(self) -> bool:
        """True if the feature comes from attention pooling (big_vision's MAP head)."""
        return self.classifier == "map"

    @property
    def reads_class_token(self) -> bool:
        """True if the feature comes from the class token."""
        return self.classifier in ("token", "token_gap", "token_unpooled")

    @property
    def feature_size(self) -> int:
        """Width of the feature in front of pre_logits and head."""
        return (2 if self.classifier == "token_gap" else 1) * self.hidden_size

    @property
    def read_tokens(self) -> slice:
        """Slice of the tokens that the feature is computed from: class (and distillation) token, or all patches."""
        return slice(0, 1 + self.distilled) if self.reads_class_token else slice(self.num_prefix_tokens, None)

    @property
    def num_final_tokens(self) -> int:
        """Number of tokens that the last block has to compute: 1 for "token" (2 if distilled), else all."""
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
        """Number of patches, (rows, columns). Pixels that fill no patch are dropped, as in the official code."""
        return self.grid_of(self.size)

    def grid_of(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Return the number of patches, (rows, columns), for another image size.

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
        return int(bool(self.class_token)) + int(self.distilled) + self.num_registers

    @property
    def position_prefix_tokens(self) -> int:
        """Number of rows of the position embedding that belong to prefix tokens."""
        return self.num_prefix_tokens if self.position_prefix else 0

    @property
    def num_tokens(self) -> int:
        """Length of the sequence that the blocks process."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed.

        A changed `classifier` keeps the class token. A changed `num_classes` drops the labels and `projection_head`.

        Args:
            **changes: fields and their new values.

        Raises:
            ValueError: a field is unknown (the message names the nearest) or wrong.
        """
        check_fields(changes)
        if changes.get("num_classes", self.num_classes) != self.num_classes:
            changes = {"labels": None, "projection_head": False, **changes}
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON; `ViTConfig(**fields)` restores the config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_name(cls, name: str, **changes: Any) -> ViTConfig:
        """Return the official architecture with this name (vit_jax/configs/models.py, big_vision's models/vit.py).

        Args:
            name: such as "B/16", "ViT-B_16", "R50+ViT-B/16" or "So400m/14", in any case and with any separators.
            **changes: fields that differ from the official ones.

        Raises:
            ValueError: no architecture has this name (the message names the nearest), or a field is unknown or wrong.
        """
        check_fields(changes)
        return cls(**{**architecture(name), **changes})


_COUNTS = {  # field -> lowest value
    **dict.fromkeys(("hidden_size", "mlp_dim", "num_heads", "num_channels", "representation_size"), 1),
    **dict.fromkeys(("tokens_mlp_dim", "rotary_grid"), 1),
    **dict.fromkeys(("num_layers", "num_classes", "num_registers"), 0),
}
_LARGEST = 1e38  # of float32
_RANGES: dict[str, tuple[float, float]] = {  # field -> lowest value, excluded end
    **dict.fromkeys(("dropout_rate", "attention_dropout_rate", "stochastic_depth"), (0, 1)),
    **dict.fromkeys(("norm_epsilon", "layer_scale"), (0, _LARGEST)),
    "rotary_theta": (1, _LARGEST),
    "head_bias_init": (-_LARGEST, _LARGEST),
}
# Annotations are texts here.
_FLAGS = [one.name for one in dataclasses.fields(ViTConfig) if one.type in ("bool", "bool | None")]
_OPTIONAL = [one.name for one in dataclasses.fields(ViTConfig) if str(one.type).endswith("None")]
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
    """Raise a ValueError, with the nearest names, if a key is no field of ViTConfig."""
    known = [f.name for f in dataclasses.fields(ViTConfig)]
    if unknown := [name for name in fields if name not in known]:
        near = {name: nearest(name, known, count=2) for name in unknown}
        raise ValueError(f"ViTConfig has no field {unknown}; the nearest are {near}. Its fields: {known}")
