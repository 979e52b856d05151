"""Whether a file can hold the model that it describes, before memory is taken for one."""

from __future__ import annotations

import math

from keras_vit.converters.containers import Container
from keras_vit.converters.table import MOST_LAYERS
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ResNetConfig, ViTConfig

_SPARE = 1 << 22  # numbers that a model may have beyond twice those of its file: whoever lacks a tensor is told which


def refuse_larger(container: Container, config: ViTConfig, *, size_is_told: bool) -> None:
    """Compares a config with the size of its file, by headers only: a few bytes may describe any number of weights.

    Args:
        container: the open file.
        config: what it describes.
        size_is_told: whether the caller has named the image size, whatever memory that takes.

    Raises:
        CheckpointError: where the model would be much larger than the file.
    """
    held = sum(math.prod(header.shape) for header in container.headers.values() if header.bytes)  # others may lie
    least, most = least_weights(config), 2 * held + _SPARE
    if least > most or config.num_layers > MOST_LAYERS:
        raise CheckpointError(
            f"describes a model of at least {least} weights in {config.num_layers} blocks, but holds {held} numbers"
        )
    fixed = math.prod(config.grid) * config.hidden_size
    if config.position == "sincos2d" and not size_is_told and fixed > most:
        raise CheckpointError(f"describes {fixed} fixed position embeddings, but holds {held} numbers in all")


def least_weights(config: ViTConfig) -> int:
    """The number of weights in a model's larger layers, without building it: a lower bound for all."""
    width, mlp = config.hidden_size, config.mlp_dim
    block = 4 * width**2 + 2 * width * mlp
    feature = config.representation_size or width
    channels = config.num_channels
    stem = 0
    if config.resnet is not None:
        stem, channels = _stem(config.resnet, channels)
    return sum(
        (
            stem,
            math.prod(config.patch) * channels * width,
            config.num_prefix_tokens * width,
            _positions(config),
            config.num_layers * block,
            block if config.has_map_head else 0,
            width * feature if config.representation_size else 0,
            feature * config.num_classes,
        )
    )


def _positions(config: ViTConfig) -> int:
    """The weights of the position embeddings."""
    height, width = config.grid
    rows = {
        "learned": config.position_prefix_tokens + height * width,
        "learned2d": config.position_prefix_tokens + (height + width) // 2,  # of half the width each
        "relative": 2 * config.num_tokens - 1,
    }.get(config.position, 0)
    return rows * config.hidden_size * (config.num_layers if config.position_place == "blocks" else 1)


def _stem(resnet: ResNetConfig, image_channels: int) -> tuple[int, int]:
    """The weights of a hybrid's convolutions, and the channels it hands on."""
    channels = resnet.width
    weights = 7 * 7 * image_channels * channels
    for stage, units in enumerate(resnet.num_layers):
        width = resnet.width * 2**stage
        wide = 4 * width
        weights += units * (9 * width**2 + width * wide) + (units - 1) * wide * width + channels * (width + wide)
        channels = wide
    return weights, channels
