"""Errors and warnings for what some architectures cannot do."""

import warnings

from keras_vit.model.config import ViTConfig


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


def warn_partial_patches(config: ViTConfig) -> None:
    """Warn if the patches of a model that is being built do not cover the image."""
    height, width = config.size
    used = tuple(cells * step for cells, step in zip(config.grid, config.stride, strict=True))
    # A ResNet pads the image: then the patches cover more than the image, and nothing is lost.
    if used[0] < height or used[1] < width:
        warnings.warn(
            f"keras_vit: images of {height}x{width} pixels are no multiple of the "
            f"{config.stride[0]}x{config.stride[1]} patch; "
            f"the model sees the upper left {used[0]}x{used[1]}, as in the official code.",
            stacklevel=3,
        )
