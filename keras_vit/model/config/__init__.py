"""Configuration of a Vision Transformer; nothing here needs Keras or TensorFlow."""

from keras_vit.model.config.architecture import ViTConfig, check_fields
from keras_vit.model.config.groups import (
    ACTIVATIONS,
    CLASSIFIERS,
    POSITION_METHODS,
    BlockConfig,
    HeadConfig,
    PositionConfig,
    StemConfig,
)
from keras_vit.model.config.parts import Preprocessing, ResNetConfig

__all__ = [
    "ACTIVATIONS",
    "CLASSIFIERS",
    "POSITION_METHODS",
    "BlockConfig",
    "HeadConfig",
    "PositionConfig",
    "Preprocessing",
    "ResNetConfig",
    "StemConfig",
    "ViTConfig",
    "check_fields",
]
