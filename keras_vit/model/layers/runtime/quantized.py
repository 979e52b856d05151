"""Save and load the dense layers that Keras' `quantize` has quantized, which get other variables."""

import contextlib
import gc
import json
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

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
    text = np.asarray(store[_KEY]).tobytes() if _KEY in store else "{}"
    found = json.loads(text, object_hook=_check_module)
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
