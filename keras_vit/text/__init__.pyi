from .encoder import TextConfig as TextConfig
from .encoder import TextEncoder as TextEncoder
from .litert import tflite as tflite
from .loading import load as load
from .saving import save as save
from .tokenizer import Tokenizer as Tokenizer
