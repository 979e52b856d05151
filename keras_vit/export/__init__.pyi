from ._saved_model import saved_model as saved_model
from ._tflite import tflite as tflite
from .exported import runner as runner
from .report import Report as Report
from .runtime import load as load
from .verification import VerificationError as VerificationError
from .verification import verify as verify
