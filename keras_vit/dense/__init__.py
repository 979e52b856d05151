"""Models that return a map for every image: segmentation and depth on the tokens of a Vision Transformer.

The public names are imported on first use.
"""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

if TYPE_CHECKING:
    from keras_vit.dense.catalogue import MapCard, cards
    from keras_vit.dense.config import MapConfig
    from keras_vit.dense.loading import load
    from keras_vit.dense.model import DenseModel, depth, segmenter
    from keras_vit.model.maps import PatchMap, ResizeBilinear

_NAMES = {
    "keras_vit.model.maps": ("PatchMap", "ResizeBilinear"),
    "catalogue": ("MapCard", "cards"),
    "config": ("MapConfig",),
    "loading": ("load",),
    "model": ("DenseModel", "depth", "segmenter"),
}

__all__ = ["DenseModel", "MapCard", "MapConfig", "PatchMap", "ResizeBilinear", "cards", "depth", "load", "segmenter"]

__getattr__, __dir__ = lazy.lazy_names(__name__, _NAMES)
