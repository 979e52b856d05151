"""The HTML report of a model and some images."""

__all__: list[str] = []
