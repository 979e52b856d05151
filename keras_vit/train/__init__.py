"""Train models by recipes, on any devices, with exact resume; evaluate them, and plan the memory of a step.

Public names are imported on first use: recipes need no TensorFlow.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
