"""Export and verify models: SavedModels for servers, LiteRT (.tflite) files for phones, browsers and small boards.

Every export is run and compared with its model. Names are imported on first use.
"""

import lazy_loader

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    try:
        return _import_name(name)
    except AttributeError:
        from keras_vit._util.text import OTHER_EXPORTS, in_our_words

        if words := in_our_words([name], OTHER_EXPORTS):
            raise AttributeError(f"keras_vit.export has no {name!r}: {words}") from None
        raise
