"""Read quantization modes (converters/exports/*.toml) and quantize LiteRT files by them."""
