"""Configuration of a Vision Transformer, and of a text tower: a frozen dataclass each, with the official names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from keras_vit._util import files
from keras_vit._util.checks import Count, Share, WholeNumber
from keras_vit._util.text import in_our_words, nearest, warn
from keras_vit.model.config_groups import (
    ACTIVATIONS,
    POSITION_METHODS,
    Activation,
    BlockConfig,
    Finite,
    HeadConfig,
    NonNegative,
    PositionConfig,
    Preprocessing,
    ResNetConfig,
    StemConfig,
    document_groups,
)

__all__ = [
    "ACTIVATIONS",
    "POSITION_METHODS",
    "BlockConfig",
    "HeadConfig",
    "PositionConfig",
    "Preprocessing",
    "ResNetConfig",
    "StemConfig",
    "TextConfig",
    "ViTConfig",
    "check_fields",
]


# The fields of the last base come first.
@dataclass(frozen=True, kw_only=True)
class ViTConfig(HeadConfig, BlockConfig, PositionConfig, StemConfig):
    """Architecture of one Vision Transformer (arXiv 2010.11929). Frozen; `replace` returns a changed copy.

    The defaults are ViT-B/16 for 224 pixels and 1,000 classes. All fields are spelled flat. Most belong to a group,
    which documents them: `StemConfig` (from pixels to tokens), `PositionConfig`, `BlockConfig` or `HeadConfig`.

    Args:
        hidden_size: width of a token.
        num_layers: number of encoder blocks. 0 is a ResNet without a Transformer (BiT): it needs `resnet`,
            patch_size=1, position="none", and the ResNet's channels as hidden_size.
        stochastic_depth: probability of dropping a branch of the last block, in [0, 1); it grows linearly from 0 at the
            first block (AugReg, arXiv 2106.10270).
        preprocessing: a Preprocessing, or its fields as a dict.

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
    num_layers: WholeNumber = 12
    stochastic_depth: Share = 0.0
    preprocessing: Preprocessing = field(default_factory=Preprocessing)

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
            yield from self._unmet("num_layers=0, a ResNet without a Transformer,", **needed)
        if self.hidden_size % self.num_heads and (self.has_attention or self.has_map_head):
            yield f"hidden_size is a multiple of num_heads. Received: {self.hidden_size} and {self.num_heads}"
        if self.has_map_head and self.hidden_size % (self.pool_heads or 1):
            yield f"hidden_size is a multiple of pool_heads. Received: {self.hidden_size} and {self.pool_heads}"
        if self.norm == "rms" and self.has_map_head:
            yield from self._unmet("norm='rms' with classifier='map'", pool_mlp_dim=0)
        if self.classifier.startswith("token") and not self.class_token:
            yield f"classifier={self.classifier!r} needs the class token. Received: class_token=False"
        if self.num_read_blocks > max(1, self.num_layers):
            most, received = f"at most num_layers={self.num_layers}", self.num_read_blocks
            yield f"token_blocks and mean_blocks are {most}. Received: {received}"
        if self.num_class_tokens > 1:
            yield from self._unmet("num_class_tokens above 1", class_token=True, distilled=False)
        if self.distilled:
            needed = {"classifier": "token", "token_blocks": 1, "representation_size": None, "final_norm": "tokens"}
            yield from self._unmet("distilled", **needed, normalize_features=False, projection_head=False)
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
            yield from self._unmet(f"position_place={self.position_place!r}", position_prefix=True)

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
        return [("unpooled", 0)]

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
    def from_name(cls, name: str, **changes: Any) -> ViTConfig:
        """Look up the official architecture with this name (vit_jax/configs/models.py, big_vision's models/vit.py).

        Args:
            name: such as "B/16", "ViT-B_16", "R50+ViT-B/16" or "So400m/14", in any case and with any separators.
            **changes: fields that differ from the official ones.

        Raises:
            ValueError: no architecture has this name (the message names the nearest), or a field is unknown or wrong.
        """
        check_fields(changes)
        return cls(**{**architecture_fields(name), **changes})


document_groups(ViTConfig, StemConfig, PositionConfig, BlockConfig, HeadConfig)


@dataclass(frozen=True, kw_only=True)
class TextConfig(BlockConfig):
    """Architecture of a text tower. The fields of the blocks are those of `ViTConfig`; the defaults are CLIP-B/16's.

    Args:
        vocab_size: number of tokens that the tower knows.
        max_length: most tokens of a text, start and end included.
        hidden_size: width of a token.
        num_layers: number of encoder blocks.
        causal: whether a token attends only to itself and to those in front of it (CLIP).
        pooling: "end" takes the end token, "last" the last position, whatever token it has (SigLIP), "first" the first.
        end_token: id of the end token; None: the largest id in a text, as in CLIP's first configs.
        projection_size: width of the embedding; 0 means no projection.
        projection_bias: whether the projection has a bias.
        logit_scale: natural logarithm of the factor of the cosine similarities of texts and images, as files have it;
            None if the file has none.
        logit_bias: number added to their product (SigLIP); None for a pair that is trained with softmax.

    Raises:
        ValueError: fields are wrong or contradict each other; one message names all of them.

    Example:
        >>> keras_vit.text.TextConfig(max_length=64, causal=False, pooling="last").to_dict()["num_layers"]
        12
    """

    vocab_size: Count = 49408
    max_length: Count = 77
    hidden_size: Count = 512
    num_layers: Count = 12
    num_heads: Count = 8
    mlp_dim: Count = 2048
    activation: Activation = "gelu_quick"
    norm_epsilon: NonNegative = 1e-5
    causal: bool = True
    pooling: Literal["end", "last", "first"] = "end"
    end_token: WholeNumber | None = None
    projection_size: WholeNumber = 512
    projection_bias: bool = False
    logit_scale: Finite | None = None
    logit_bias: Finite | None = None

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


document_groups(TextConfig, BlockConfig)


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


# ---- official architectures by name: ViT, hybrids, MLP-Mixer and BiT

# The rows of zoo/sizes/papers.toml, which says what their numbers are.
_PAPERS = files.read_toml(files.data_folder("zoo") / "sizes" / "papers.toml")
SIZES: dict[str, list[int]] = _PAPERS["vit"]
HYBRIDS = {name: (tuple(units), patch) for name, (units, patch) in _PAPERS["hybrid"].items()}

_VIT_FIELDS = ("hidden_size", "mlp_dim", "num_heads", "num_layers")
_MIXER_FIELDS = ("hidden_size", "mlp_dim", "tokens_mlp_dim", "num_layers")
OTHERS: dict[str, dict[str, Any]] = {  # name -> fields of ViTConfig
    f"Mixer-{size}/{patch}": dict(zip(_MIXER_FIELDS, row, strict=True), patch_size=patch) | _PAPERS["mixer_fields"]
    for size, row in _PAPERS["mixer"].items()
    for patch in (8, 14, 16, 32)
}
OTHERS |= {
    f"BiT-R{depth}x{width}": {
        **_PAPERS["bit_fields"],
        "hidden_size": 2048 * width,
        "resnet": {**_PAPERS["bit_resnet_fields"], "num_layers": tuple(units), "width_factor": float(width)},
    }
    for depth, units in _PAPERS["bit"].items()
    for width in (1, 2, 3, 4)
}


def canonical_name(name: str) -> str:
    """Find the canonical spelling of an architecture's name: "ViT-B/16" for "b_16", "B16" or "vit-b/16".

    Any case and separators are accepted. Case matters only for sizes that differ in nothing else (g and G).
    """
    for other in OTHERS:
        if re.sub(r"[-_/ ]", "", other).casefold() == re.sub(r"[-_/ ]", "", name).casefold():
            return other
    match = re.fullmatch(
        r"(?:(R\d*)[+_\- ]*)??(?:ViT[-_ ]*)?([A-Z]+(?:400m)?(?:[-_ ]?opt)?)[/_\- ]?(\d+)", name.strip(), re.I
    )
    if match:
        stem, size, patch = match.groups()
        known_size = _known_size(re.sub(r"[-_ ]?opt$", "-opt", size, flags=re.I))
        if known_size and int(patch) > 0:
            canonical = f"{stem.upper()}+" if stem else ""
            canonical += f"ViT-{known_size}/{int(patch)}"
            if not stem or canonical in HYBRIDS:
                return canonical
    examples = [f"ViT-{size}/{patch}" for size in SIZES for patch in (8, 14, 16, 32)] + list(HYBRIDS)
    near = nearest(name, [*examples, *OTHERS], count=4, cutoff=0)
    raise ValueError(f"No architecture has this name; the nearest are {near}. Received: {name!r:.200}")


def _known_size(size: str) -> str | None:
    same = [known for known in SIZES if known.lower() == size.lower()]
    return size if size in SIZES else same[0] if len(same) == 1 else None


def architecture_fields(name: str) -> dict[str, Any]:
    """Look up the fields of ViTConfig for an architecture's name; "resnet" of a hybrid is a dict."""
    canonical = canonical_name(name)
    if canonical in OTHERS:
        return dict(OTHERS[canonical])
    stem, _, vit = canonical.rpartition("+")
    size, patch = vit.removeprefix("ViT-").split("/")
    fields: dict[str, Any] = dict(zip(_VIT_FIELDS, SIZES[size], strict=True), patch_size=int(patch))
    fields["dropout_rate"] = _PAPERS["dropout"].get(canonical, 0.0)
    if stem:
        units, fields["patch_size"] = HYBRIDS[canonical]
        fields["resnet"] = {"num_layers": units}
    return fields


def name_of(config: Any) -> str:
    """Name a ViTConfig's architecture, such as "ViT-B/16", or its size if the papers do not name it."""
    wanted = config.to_dict()
    units = config.resnet and (config.resnet.version, config.resnet.num_layers)
    names = [f"ViT-{size}/{config.patch_size[0]}" for size in SIZES]
    for name in (*names, *HYBRIDS) if config.has_attention else OTHERS:
        fields = {**architecture_fields(name), "dropout_rate": config.dropout_rate}
        resnet, patch = fields.pop("resnet", None), fields.pop("patch_size")
        same_resnet = units == (resnet and (resnet.get("version", 1), resnet["num_layers"]))
        if tuple(config.patch_size) == (patch, patch) and same_resnet and fields.items() <= wanted.items():
            return name
    kind = "Vision Transformer" if config.has_attention else "MLP-Mixer" if config.tokens_mlp_dim else "ResNet"
    return f"{kind}, {config.num_layers or sum(config.resnet.num_layers)} blocks of width {config.hidden_size}"
