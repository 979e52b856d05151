"""List the known models, show their cards, load them by name, and make zero-shot classifiers of them.

Example:
    >>> keras_vit.zoo.names("*digits")
    ['ViT-digits']
    >>> model = keras_vit.zoo.load("digits")
    >>> model.count_params()
    142026
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
