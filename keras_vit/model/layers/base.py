"""Base classes of the layers (config, shape of the output, quantization by Keras), and initializers."""

import contextlib
import gc
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

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


class BaseLayer(keras.layers.Layer):
    """A layer whose output has the shape of its input; each argument of `__init__` is an attribute of the same name."""

    def compute_output_shape(self, input_shape: tuple[Any, ...], *_: Any) -> tuple[Any, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        kinds = [kind for kind in type(self).mro() if issubclass(kind, BaseLayer) and "__init__" in vars(kind)]
        names = [name for kind in kinds for name in inspect.signature(vars(kind)["__init__"]).parameters]
        arguments = {name: getattr(self, name) for name in names if name not in ("self", "kwargs")}
        return {**super().get_config(), **arguments}


class Quantizable(keras.layers.Layer):
    """Let Keras quantize a subclass of its own dense layers, which it refuses otherwise."""

    def quantize(self, mode: Any = None, type_check: bool = True, config: Any = None) -> None:
        del type_check
        super().quantize(mode, type_check=False, config=config)


# ---- dense layers that Keras' `quantize` has quantized, which get other variables

_KEY = "quantization"  # among a layer's own variables: a JSON object as bytes, from inner layer to Keras' config of it


def save_quantization(store: Any, layers: Iterable[keras.layers.Layer]) -> None:
    """Note in `store` which of the layers are quantized, and how; a store without any stays as it is."""
    found = {
        layer.name: keras.saving.serialize_keras_object(layer.quantization_config)
        for layer in layers
        if layer.quantization_mode is not None
    }
    if found:
        text = json.dumps(found)
        json.loads(text, object_hook=_check_module)
        store[_KEY] = np.frombuffer(text.encode(), np.uint8)


def load_quantization(store: Any, layers: Iterable[keras.layers.Layer]) -> None:
    """Quantize the layers that `store` notes, before Keras loads their variables."""
    if _KEY not in store:
        return
    found = json.loads(np.asarray(store[_KEY]).tobytes(), object_hook=_check_module)
    with quick_collections():
        for layer in layers:
            if layer.name in found and layer.quantization_mode is None:
                layer.quantize(config=keras.saving.deserialize_keras_object(found[layer.name]))


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Keep what exists out of the garbage collections inside: Keras makes one, of a fifth of a second, a kernel."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check_module(found: dict[str, Any]) -> dict[str, Any]:
    """Raise a ValueError if Keras would make an object of a class outside of keras.quantizers."""
    if "class_name" in found and (found.get("module") != "keras.quantizers" or found.get("registered_name")):
        raise ValueError(
            f"Only the quantizers in keras.quantizers are saved and loaded. Received: {found['class_name']!r:.100}"
        )
    return found


def quantization_problem(model: keras.Model) -> str | None:
    """Return a sentence that names the quantized layers, and what to use instead; None if there are none."""
    names = [layer.path for layer in model._flatten_layers() if layer.quantization_mode is not None]
    if not names:
        return None
    return (
        f"Use the model as it was before Keras' `quantize`. Received: {len(names)} quantized layers, {names[0]} first"
    )
