"""Configuration, layers, network and preprocessing of Vision Transformers.

Names are imported on first use: the configuration needs no Keras.
"""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

if TYPE_CHECKING:
    from keras_vit.model.config import Preprocessing, ResNetConfig, ViTConfig
    from keras_vit.model.vision_transformer import VisionTransformer

_NAMES = {"config": ("Preprocessing", "ResNetConfig", "ViTConfig"), "vision_transformer": ("VisionTransformer",)}

__all__ = ["Preprocessing", "ResNetConfig", "ViTConfig", "VisionTransformer"]

__getattr__, __dir__ = lazy.lazy_names(__name__, _NAMES)
