"""Decode image files upright, all in the same way: JPEG and PNG with TensorFlow, other formats with Pillow."""
