"""List the known models, show their cards, load them by name, and make zero-shot classifiers of them.

Example:
    >>> keras_vit.zoo.names("*digits")
    ['ViT-digits']
    >>> model = keras_vit.zoo.load("digits")
    >>> model.count_params()
    142026
"""

from keras_vit.errors import UnknownModel
from keras_vit.zoo.catalogue import Card, card, names, table
from keras_vit.zoo.pretrained import load
from keras_vit.zoo.zero_shot import zero_shot_head

__all__ = ["Card", "UnknownModel", "card", "load", "names", "table", "zero_shot_head"]
