"""Raise errors for what some architectures cannot do."""

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
