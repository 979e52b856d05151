"""The command line, `keras-vit`."""

from keras_vit.cli._app import app, main

__all__ = ["app", "main"]
