"""The zoo: the models there are, what is known of them, and loading them by name."""

from keras_vit.catalogue import Card, UnknownModel, card, names, table
from keras_vit.pretrained import load

__all__ = ["Card", "UnknownModel", "card", "load", "names", "table"]
