"""What leaves: SavedModels for servers, TFLite files for phones, and the proof that they are what was trained."""

from keras_vit.export.report import Report
from keras_vit.export.running import runner
from keras_vit.export.saved_model import saved_model
from keras_vit.export.tflite import tflite
from keras_vit.export.verify import VerificationError, verify

__all__ = ["Report", "VerificationError", "runner", "saved_model", "tflite", "verify"]
