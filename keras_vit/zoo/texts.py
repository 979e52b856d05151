"""Load the text towers of the zoo's models, with their tokenizers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from keras_vit._util.checks import given
from keras_vit.zoo.cards import families
from keras_vit.zoo.pretrained import fetch_beside, fetch_source, resolve

if TYPE_CHECKING:
    from keras_vit.text.encoder import TextEncoder

_CONFIG = "open_clip_config.json"
_TOKENIZER_FILES = ("spiece.model", "tokenizer.json", "tokenizer_config.json")


def text_encoder(
    name_or_path: str | os.PathLike[str], *, weights: str | os.PathLike[str] | None = None, dtype: Any = None
) -> TextEncoder:
    """Load the text tower that belongs to an image encoder, with its tokenizer.

    Args:
        name_or_path: name of a model with a text tower ("CLIP-B/16", "SigLIP-B/16", "SigLIP2-B/16"), or the path or URL
            of a file or folder, as for `text.load`.
        weights: a tag of the model's card; None means the recommended weights. A path has none.
        dtype: Keras dtype policy, such as "mixed_bfloat16"; None means the global one.

    Raises:
        UnknownModelError: no card has this name; the message lists the nearest.
        ValueError: the model has no text tower; the message lists those that have one.
        FileNotFoundError: the path does not exist.
        DownloadError: a file could not be downloaded completely and verified.
        CheckpointError: a file is damaged, or has no text tower.
        ImportError: the packages of the extra "text" are missing.

    Example:
        >>> keras_vit.zoo.text_encoder("digits").embed(["seven", "a photo of a three."]).shape
        (2, 64)
    """
    from keras_vit import text
    from keras_vit._util.download import fetch
    from keras_vit.converters.source import is_keras_file

    choice = resolve(name_or_path, weights)
    row = choice.published
    if choice.is_file:
        fetch_beside(choice.source or "", (_CONFIG, *_TOKENIZER_FILES))
        return text.load(fetch_source(choice), dtype=dtype)
    location = row.text_location if row else None
    if row is None or location is None:
        known = dict.fromkeys(row.architecture for family in families() for row in family.weights if row.text_location)
        raise ValueError(f"{choice.name} has no text tower. Models that have one: {list(known)}")
    if row.text is None:
        path = fetch_source(choice)
    else:
        path = fetch(location)
        fetch_beside(location, [_CONFIG], needed=_CONFIG)
    if is_keras_file(path):  # has the tokenizer inside
        return text.load(path, dtype=dtype)
    activation = given(activation=row.config.get("activation"))
    return text.load(path, tokenizer=fetch(row.tokenizer or ""), config=activation, dtype=dtype)
