"""Vision Transformers for TensorFlow and Keras 3: the official models, exactly, in and out.

Everything public is imported on first use, so that `import keras_vit` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from keras_vit import converters, export, position, train, visualize, zoo
    from keras_vit.config import Preprocessing, ResNetConfig, ViTConfig
    from keras_vit.model import VisionTransformer

_HOMES = {
    "ViTConfig": "keras_vit.config",
    "ResNetConfig": "keras_vit.config",
    "Preprocessing": "keras_vit.config",
    "VisionTransformer": "keras_vit.model",
}
_MODULES = ("converters", "export", "position", "train", "visualize", "zoo")

__all__ = [
    "Preprocessing",
    "ResNetConfig",
    "ViTConfig",
    "VisionTransformer",
    "__version__",
    "converters",
    "export",
    "position",
    "train",
    "visualize",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"keras_vit.{name}")
    raise AttributeError(f"module 'keras_vit' has no attribute {name!r}; its names: {__all__}")


def __dir__() -> list[str]:
    return sorted(__all__)
