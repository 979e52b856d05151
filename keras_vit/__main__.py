"""Run `keras-vit` as `python -m keras_vit`."""

from keras_vit.cli import main

main()
