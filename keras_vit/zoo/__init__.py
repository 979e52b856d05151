"""List the known models, show their cards, load them by name, and make zero-shot classifiers of them.

Example:
    >>> keras_vit.zoo.names("*digits")
    ['ViT-digits']
    >>> model = keras_vit.zoo.load("digits")
    >>> model.count_params()
    142026
"""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

if TYPE_CHECKING:
    from keras_vit.errors import UnknownModelError
    from keras_vit.zoo._pairs import text_encoder, zero_shot, zero_shot_head
    from keras_vit.zoo.catalogue import Card, card, names, read_cards, table
    from keras_vit.zoo.pretrained import load

_NAMES = {
    "catalogue": ("Card", "card", "names", "read_cards", "table"),
    "keras_vit.errors": ("UnknownModelError",),
    "pretrained": ("load",),
    "_pairs": ("text_encoder", "zero_shot", "zero_shot_head"),
}

__all__ = [
    "Card",
    "UnknownModelError",
    "card",
    "load",
    "names",
    "read_cards",
    "table",
    "text_encoder",
    "zero_shot",
    "zero_shot_head",
]

__getattr__, __dir__ = lazy.lazy_names(__name__, _NAMES)
