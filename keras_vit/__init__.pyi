from . import batch as batch
from . import converters as converters
from . import dense as dense
from . import digits as digits
from . import errors as errors
from . import export as export
from . import position as position
from . import text as text
from . import train as train
from . import visualize as visualize
from . import zoo as zoo
from .model import Preprocessing as Preprocessing
from .model import ResNetConfig as ResNetConfig
from .model import VisionTransformer as VisionTransformer
from .model import ViTConfig as ViTConfig

__version__: str
