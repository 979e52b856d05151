"""Text towers of CLIP and SigLIP, with their tokenizers.

Example:
    >>> config = keras_vit.text.TextConfig(vocab_size=100, hidden_size=32, num_layers=1, num_heads=2, mlp_dim=64)
    >>> encoder = keras_vit.text.TextEncoder(config)
    >>> tuple(encoder(np.zeros((2, 77), "int32")).shape)
    (2, 512)
"""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

if TYPE_CHECKING:
    from keras_vit.model.config.text import TextConfig
    from keras_vit.text.encoder import TextEncoder
    from keras_vit.text.litert import tflite
    from keras_vit.text.loading import load
    from keras_vit.text.tokenizer import Tokenizer

_NAMES = {
    "keras_vit.model.config.text": ("TextConfig",),
    "encoder": ("TextEncoder",),
    "litert": ("tflite",),
    "loading": ("load",),
    "tokenizer": ("Tokenizer",),
}

__all__ = ["TextConfig", "TextEncoder", "Tokenizer", "load", "tflite"]

__getattr__, __dir__ = lazy.lazy_names(__name__, _NAMES)
