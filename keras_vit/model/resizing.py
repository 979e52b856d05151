"""Check whether the weights of a model can be adapted to another image or patch size."""

from keras_vit.model.config import ViTConfig


def check_resizable(source: ViTConfig, target: ViTConfig) -> None:
    """Raise a ValueError if the weights of a model cannot be resized to the image and patch size of another config."""
    if source.resnet is not None and target.patch_size != source.patch_size:
        raise ValueError(
            f"patch_size is fixed in a hybrid: its patches are {source.patch} cells of the ResNet's feature map, and "
            f"only patches of pixels are resized. Received: patch_size={target.patch}"
        )
