"""Write LiteRT (.tflite) files directly from a model's weights, without TensorFlow.

`emit.build_file` builds the graph of a model. Every class of layers has one writer, found by the class; see `writer`.
A module imports only from those before it in this order: builder, storage, operators, folding, options, writer, images,
layers, attention, encoder, stem, head, maps, emit. `metadata` stands alone.
"""
