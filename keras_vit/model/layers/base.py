"""Base of the layers: the config of a layer, and the shape of its output."""

import inspect
from typing import Any

import keras


class BaseLayer(keras.layers.Layer):
    """A layer whose output has the shape of its input; each argument of `__init__` is an attribute of the same name."""

    def compute_output_shape(self, input_shape: tuple[Any, ...], *_: Any) -> tuple[Any, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        kinds = [kind for kind in type(self).mro() if issubclass(kind, BaseLayer) and "__init__" in vars(kind)]
        names = [name for kind in kinds for name in inspect.signature(vars(kind)["__init__"]).parameters]
        arguments = {name: getattr(self, name) for name in names if name not in ("self", "kwargs")}
        return {**super().get_config(), **arguments}
