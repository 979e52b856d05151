"""Load and save checkpoints of every known format. Names are imported on first use, because loading imports Keras."""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

if TYPE_CHECKING:
    from keras_vit.converters._load import build, convert, load
    from keras_vit.converters._save import save
    from keras_vit.converters.source import detect, read_config, read_shapes
    from keras_vit.converters.table import formats
    from keras_vit.errors import CheckpointError

_NAMES = {
    "_load": ("build", "convert", "load"),
    "_save": ("save",),
    "keras_vit.errors": ("CheckpointError",),
    "source": ("detect", "read_config", "read_shapes"),
    "table": ("formats",),
}

__all__ = ["CheckpointError", "build", "convert", "detect", "formats", "load", "read_config", "read_shapes", "save"]

__getattr__, __dir__ = lazy.lazy_names(__name__, _NAMES)
