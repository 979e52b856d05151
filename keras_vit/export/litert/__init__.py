"""Write LiteRT (.tflite) files directly from a model's weights, without TensorFlow.

`emit.emit` builds the graph of a model. Every module imports only from those before it in this order: builder, storage,
operators, folding, images, stem, layers, encoder, head, emit. `metadata` stands alone.
"""
