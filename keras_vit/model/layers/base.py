"""Base classes of the layers, and initializers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_vit.model.layers import runtime

# As in the paper's code: vit_jax/models_vit.py, models_resnet.py; big_vision for the probe.
_INITIALIZERS: dict[str, Callable[[], keras.initializers.Initializer]] = {
    "convolution": lambda: keras.initializers.LecunNormal(),  # truncated, as flax's lecun_normal
    "dense": lambda: keras.initializers.GlorotUniform(),
    "dense_bias": lambda: keras.initializers.RandomNormal(stddev=1e-6),
    "position": lambda: keras.initializers.RandomNormal(stddev=0.02),
    "register": lambda: keras.initializers.RandomNormal(stddev=1e-6),
}


def initializer(name: str) -> keras.initializers.Initializer:
    """Return the initializer of a kind of weight, a key of `_INITIALIZERS`; zeros inside `runtime.uninitialized`."""
    return keras.initializers.Zeros() if runtime.settings().uninitialized else _INITIALIZERS[name]()


def glorot_uniform_matrix(fan_in: int, fan_out: int) -> keras.initializers.Initializer:
    """Return Glorot uniform for a (fan_in, fan_out) matrix whose variable has another shape (an axis for heads)."""
    if runtime.settings().uninitialized:
        return keras.initializers.Zeros()
    limit = (6 / (fan_in + fan_out)) ** 0.5
    return keras.initializers.RandomUniform(-limit, limit)


def refuse_quantize(self: keras.layers.Layer, *arguments: Any, **options: Any) -> None:
    """Raise a NotImplementedError, in place of Keras' method `quantize`; a model around ours then skips the layer.

    Args:
        *arguments, **options: of Keras' method.
    """
    del arguments, options
    raise NotImplementedError(
        f"Keras' `quantize` is not for keras_vit's models and layers. Received: {self.path or self.name}. For a small "
        'file use keras_vit.export.tflite(model, path, quantize="dynamic")'
    )


def dense_layer(units: int, **options: Any) -> keras.layers.Dense:
    """Return Keras' Dense, which is not quantized as a part of another model: a file of ours would not hold that."""
    layer = keras.layers.Dense(units, **options)
    layer.quantize = functools.partial(refuse_quantize, layer)
    return layer


class BaseLayer(keras.layers.Layer):
    """A layer whose output has the shape of its input; each argument of `__init__` is an attribute of the same name."""

    def compute_output_shape(self, input_shape: tuple[Any, ...], *_: Any) -> tuple[Any, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        kinds = [kind for kind in type(self).mro() if issubclass(kind, BaseLayer) and "__init__" in vars(kind)]
        names = [name for kind in kinds for name in inspect.signature(vars(kind)["__init__"]).parameters]
        arguments = {name: getattr(self, name) for name in names if name not in ("self", "kwargs")}
        return {**super().get_config(), **arguments}
