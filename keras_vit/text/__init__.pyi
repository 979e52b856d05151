from .encoder import TextConfig as TextConfig
from .encoder import TextEncoder as TextEncoder
from .litert import tflite as tflite
from .loading import load as load
from .tokenizer import Tokenizer as Tokenizer
