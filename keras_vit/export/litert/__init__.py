"""Write LiteRT (.tflite) files directly from a model's weights, without TensorFlow.

`head.build_file` builds the graph of a model. Every class of layers has one writer, found by the class; see `writer`.
A module imports only from those before it in this order: builder, operators, folding, writer, images, layers, encoder,
stem, dense_maps, head. `metadata` stands alone; the options of a file are in `export.modes`.
"""

import sys
import types


class _Package(types.ModuleType):
    """This package. Called as if it were a function, it names the one that writes a file."""

    def __call__(self, *args: object, **options: object) -> None:
        raise TypeError("export.litert is a package: keras_vit.export.tflite(model, path) writes a LiteRT file")


sys.modules[__name__].__class__ = _Package
