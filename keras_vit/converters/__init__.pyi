from .loading import load as load
from .saving import convert as convert
from .saving import save as save
from .source import CheckpointError as CheckpointError
from .source import detect as detect
from .source import read_config as read_config
from .table import formats as formats
