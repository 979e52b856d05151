"""Export and verify models: SavedModels for servers, LiteRT (.tflite) files for phones, browsers and small boards.

Every export is run and compared with its model. Names are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
