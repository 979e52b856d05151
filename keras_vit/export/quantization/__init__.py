"""Quantization modes, and the quantization of LiteRT files."""
