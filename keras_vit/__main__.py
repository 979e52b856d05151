"""`python -m keras_vit` is `keras-vit`."""

from keras_vit.cli import main

main()
