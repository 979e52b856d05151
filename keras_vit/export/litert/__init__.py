"""Write LiteRT (.tflite) files directly from a model's weights, without TensorFlow.

`emit.build_file` builds the graph of a model. A module imports only from those before it in this order: builder,
storage, operators, folding, images, stem, layers, encoder, head, emit. `metadata` stands alone.
"""
