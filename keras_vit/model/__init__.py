"""Configuration, layers, network and preprocessing of Vision Transformers.

Names are imported on first use: the configuration needs no Keras.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
