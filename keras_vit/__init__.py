"""Vision Transformers for TensorFlow and Keras 3: load the official models exactly, train, export.

Public names are imported on first use, so `import keras_vit` is fast and starts no TensorFlow. If Keras or TensorFlow
was imported before, the classes of models are imported too, and `keras.models.load_model` finds them.

Example:
    >>> model = keras_vit.zoo.load("digits")
    >>> model.classify(keras_vit.digits.load().test_images[0], top=1)[0][0].label
    'seven'
"""

import importlib
import sys

import lazy_loader

__version__ = "0.1.0"

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    try:
        return _import_name(name)
    except AttributeError:
        from keras_vit._util.text import in_our_words

        if words := in_our_words([name]):
            raise AttributeError(f"keras_vit has no {name!r}: {words}") from None
        raise


if sys.modules.get("keras") or sys.modules.get("tensorflow"):  # None stands for a module that cannot be imported
    for _module in ("dense.model", "model.vision_transformer", "text.encoder"):  # all registered classes
        importlib.import_module(f"keras_vit.{_module}")
