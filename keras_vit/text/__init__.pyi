from .encoder import TextConfig as TextConfig
from .encoder import TextEncoder as TextEncoder
from .encoder import Tokenizer as Tokenizer
from .litert import tflite as tflite
from .loading import load as load
