"""Load and save checkpoints of every known format. Names are imported on first use, because loading imports Keras."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
