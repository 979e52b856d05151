"""Describe a model's architecture in words."""

from __future__ import annotations

from keras_vit._util.text import scaled
from keras_vit.model import cost
from keras_vit.model.config import ViTConfig

_POSITIONS = {
    "learned": "a learned position embedding",
    "learned2d": "learned position embeddings of rows and columns",
    "sincos2d": "fixed sine and cosine positions",
    "relative": "relative positions in the attention",
    "none": "no positions",
}
_CLASSIFIERS = {
    "token": "the class token",
    "gap": "the mean of the patch tokens",
    "map": "attention pooling",
    "unpooled": "every patch token by itself",
    "token_unpooled": "every token by itself",
}
_FLOP_UNITS = (" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP")


def describe(config: ViTConfig, parameters: int) -> str:
    """Return a sentence on a model.

    Args:
        config: of the model.
        parameters: number of its weights.
    """
    height, width = config.size
    rows, columns = config.grid
    kind = "Vision Transformer" if config.resnet is None else "ResNet and Vision Transformer"
    tokens_read = "the class and the distillation token" if config.distilled else _CLASSIFIERS[config.classifier]
    head = f"{config.num_classes:,} classes from {tokens_read}" if config.num_classes else "no head"
    return (
        f"{kind} of {parameters:,} parameters: {plural(config.num_layers, 'block')} of "
        f"{plural(config.num_heads, 'head')}, width {config.hidden_size:,}, MLP {config.mlp_dim:,}; images of "
        f"{height} × {width} pixels as a grid of {rows} × {columns} {_token_kinds(config)}; "
        f"{_POSITIONS[config.position]}; {head}; {scaled(cost.forward_flops(config), 1000, _FLOP_UNITS)} for an image."
    )


def _token_kinds(config: ViTConfig) -> str:
    kinds = ["patches"]
    kinds += ["a class token"] if config.class_token else []
    kinds += ["a distillation token"] if config.distilled else []
    kinds += [plural(config.num_registers, "register")] if config.num_registers else []
    return " and ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))


def attention_note(config: ViTConfig) -> str:
    """Return whose attention `class_attention` shows, as the end of a phrase; empty for a map head's probe."""
    if config.has_map_head:
        return ""
    if config.reads_class_token:
        return ", the mean of class and distillation token" if config.distilled else ", of the class token"
    return ", the mean over all patches (this model reads no class token)"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 head" or "12 heads"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
