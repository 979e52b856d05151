from ._saved_model import saved_model as saved_model
from ._tflite import tflite as tflite
from .check.report import Report as Report
from .check.running import runner as runner
from .check.verify import VerificationError as VerificationError
from .check.verify import verify as verify
