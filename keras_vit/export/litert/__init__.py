"""LiteRT (.tflite) files written straight from the weights, without TensorFlow.

Each module imports only from those before it: builder, storage, operators, folding, images, stem, encoder, emit. Beside
them metadata; and calibration, gptq, quantize, which work on files.
"""
