"""What leaves: SavedModels for servers, TFLite files for phones, and the proof that they are what was trained."""

from keras_vit.errors import VerificationError
from keras_vit.export._saved_model import saved_model
from keras_vit.export._tflite import tflite
from keras_vit.export.check.report import Report
from keras_vit.export.check.running import runner
from keras_vit.export.check.verify import verify

__all__ = ["Report", "VerificationError", "runner", "saved_model", "tflite", "verify"]
