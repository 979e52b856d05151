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
    from keras_vit.zoo._zero_shot import zero_shot, zero_shot_head
    from keras_vit.zoo.catalogue import Card, card, names, read_cards, table
    from keras_vit.zoo.pretrained import load
    from keras_vit.zoo.texts import text_encoder

_NAMES = {
    "catalogue": ("Card", "card", "names", "read_cards", "table"),
    "keras_vit.errors": ("UnknownModelError",),
    "pretrained": ("load",),
    "texts": ("text_encoder",),
    "_zero_shot": ("zero_shot", "zero_shot_head"),
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
