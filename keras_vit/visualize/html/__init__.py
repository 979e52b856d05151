"""The HTML report of a model and some images."""
