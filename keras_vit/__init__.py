"""Vision Transformers for TensorFlow and Keras 3: load the official models exactly, train, export.

Public names are imported on first use, so `import keras_vit` is fast and starts no TensorFlow.

Example:
    >>> model = keras_vit.zoo.load("digits")
    >>> model.classify(keras_vit.digits.load().test_images[0], top=1)[0][0].label
    'seven'
"""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

if TYPE_CHECKING:
    from keras_vit import batch, converters, digits, errors, export, position, train, visualize, zoo
    from keras_vit.model import Preprocessing, ResNetConfig, VisionTransformer, ViTConfig

__version__ = "0.1.0"
__all__ = [
    "Preprocessing",
    "ResNetConfig",
    "ViTConfig",
    "VisionTransformer",
    "__version__",
    "batch",
    "converters",
    "digits",
    "errors",
    "export",
    "position",
    "train",
    "visualize",
    "zoo",
]

_MODULES = ("batch", "converters", "digits", "errors", "export", "position", "train", "visualize", "zoo")
_NAMES = {"model": ("Preprocessing", "ResNetConfig", "ViTConfig", "VisionTransformer")}
__getattr__, __dir__ = lazy.lazy_names(__name__, _NAMES, modules=_MODULES)
