"""Write LiteRT (.tflite) files directly from a model's weights, without TensorFlow.

`head.build_file` builds the graph of a model. Every class of layers has one writer, found by the class; see `writer`.
A module imports only from those before it in this order: builder, operators, folding, writer, images, layers, encoder,
stem, dense_maps, head. `metadata` stands alone; the options of a file are in `export.modes`.
"""
