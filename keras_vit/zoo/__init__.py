"""The zoo: the models there are, what is known of them, and loading them by name."""

from keras_vit.errors import UnknownModel
from keras_vit.zoo.catalogue import Card, card, names, table
from keras_vit.zoo.pretrained import load

__all__ = ["Card", "UnknownModel", "card", "load", "names", "table"]
