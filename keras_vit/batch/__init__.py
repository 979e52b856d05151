"""Embed or classify any number of images into Parquet files, and search in them.

Public names are imported on first use. They need `pip install "keras-vit-zoo[batch]"`.
"""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

if TYPE_CHECKING:
    from keras_vit.batch._embed import embed
    from keras_vit.batch._search import Match, search
    from keras_vit.batch.folder import EmbedResult

__all__ = ["EmbedResult", "Match", "embed", "search"]

__getattr__, __dir__ = lazy.lazy_names(__name__, {"_embed": ("EmbedResult", "embed"), "_search": ("Match", "search")})
