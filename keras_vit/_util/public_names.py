"""The version and the public names of keras_vit, which are imported on first use."""

from keras_vit._util import lazy

VERSION = "0.1.0"
PUBLIC = [
    "Preprocessing",
    "ResNetConfig",
    "ViTConfig",
    "VisionTransformer",
    "__version__",
    "batch",
    "converters",
    "dense",
    "digits",
    "errors",
    "export",
    "position",
    "text",
    "train",
    "visualize",
    "zoo",
]

_MODULES = tuple(name for name in PUBLIC if name.islower() and not name.startswith("_"))
_NAMES = {"model": ("Preprocessing", "ResNetConfig", "ViTConfig", "VisionTransformer")}
get_name, list_names = lazy.lazy_names("keras_vit", _NAMES, modules=_MODULES)
