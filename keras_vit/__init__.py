"""Vision Transformers for TensorFlow and Keras 3: load the official models exactly, train, export.

Public names are imported on first use, so `import keras_vit` is fast and starts no TensorFlow. Keras knows the
package's classes from then on: `keras.models.load_model` opens models that were saved with them.

Example:
    >>> model = keras_vit.zoo.load("digits")
    >>> from keras_vit import digits
    >>> model.classify(digits.load().test_images[0], top=1)[0][0].label
    'seven'
"""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

__version__ = "0.1.0"

if TYPE_CHECKING:
    from keras_vit import batch, converters, errors, export, position, train, visualize, zoo
    from keras_vit.model.config import Preprocessing, ResNetConfig, ViTConfig
    from keras_vit.model.vision_transformer import VisionTransformer

_NAMES = {
    "model": ("Preprocessing", "ResNetConfig", "ViTConfig", "VisionTransformer"),
    "": ("batch", "converters", "errors", "export", "position", "train", "visualize", "zoo"),
}

__all__ = [
    "Preprocessing",
    "ResNetConfig",
    "ViTConfig",
    "VisionTransformer",
    "__version__",
    "batch",
    "converters",
    "errors",
    "export",
    "position",
    "train",
    "visualize",
    "zoo",
]

__getattr__, __dir__ = lazy.lazy_names(__name__, _NAMES)

_REGISTERED = (  # classes that a saved model can name
    "AttentionPooling",
    "Dense",
    "Dropout",
    "EncoderBlock",
    "GroupNormalization",
    "L2Normalization",
    "LayerNormalization",
    "LayerScale",
    "MLP",
    "MergeHeads",
    "MultiHeadAttention",
    "PatchEmbedding",
    "PositionEmbedding",
    "PrefixTokens",
    "RelativePosition",
    "ResNetRoot",
    "ResNetUnit",
    "SplitHeads",
    "StandardizedConv2D",
    "StochasticDepth",
    "TokenPooling",
    "VisionTransformer",
)
lazy.register_classes("keras_vit", "keras_vit.model.vision_transformer", _REGISTERED)
