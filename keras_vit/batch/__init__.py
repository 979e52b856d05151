"""Embed or classify any number of images into Parquet files, and search in them.

Public names are imported on first use. They need `pip install "keras-vit-zoo[batch]"`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
