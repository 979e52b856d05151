"""Load and save checkpoints of every known format. Names are imported on first use, because loading imports Keras."""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

if TYPE_CHECKING:
    from keras_vit.converters.loading import convert, load
    from keras_vit.converters.saving import save
    from keras_vit.converters.source import detect, read_config
    from keras_vit.converters.table import formats
    from keras_vit.errors import CheckpointError

_NAMES = {
    "keras_vit.errors": ("CheckpointError",),
    "loading": ("convert", "load"),
    "saving": ("save",),
    "source": ("detect", "read_config"),
    "table": ("formats",),
}

__all__ = ["CheckpointError", "convert", "detect", "formats", "load", "read_config", "save"]

__getattr__, __dir__ = lazy.lazy_names(__name__, _NAMES)
