"""Export and verify models: SavedModels for servers, LiteRT (.tflite) files for phones, browsers and small boards.

Every export is run and compared with its model. Names are imported on first use.
"""

from typing import TYPE_CHECKING

from keras_vit._util import lazy

if TYPE_CHECKING:
    from keras_vit.errors import VerificationError
    from keras_vit.export._saved_model import saved_model
    from keras_vit.export._tflite import tflite
    from keras_vit.export.check.report import Report
    from keras_vit.export.check.running import runner
    from keras_vit.export.check.verify import verify

_NAMES = {
    "_saved_model": ("saved_model",),
    "_tflite": ("tflite",),
    "check.report": ("Report",),
    "check.running": ("runner",),
    "check.verify": ("verify",),
    "keras_vit.errors": ("VerificationError",),
}

__all__ = ["Report", "VerificationError", "runner", "saved_model", "tflite", "verify"]

__getattr__, __dir__ = lazy.lazy_names(__name__, _NAMES)
