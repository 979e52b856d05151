from .config import Preprocessing as Preprocessing
from .config import ResNetConfig as ResNetConfig
from .config import ViTConfig as ViTConfig
from .vision_transformer import VisionTransformer as VisionTransformer
