"""Compute NumPy arrays that show what a model has learned and attends to, and write an HTML report of them.

The public names are imported on first use. Only the report needs matplotlib.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
