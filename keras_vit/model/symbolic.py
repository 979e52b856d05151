"""Build models without values: their layers, shapes and variable paths are there, but no memory for weights."""

import contextlib
import random
import warnings
from collections.abc import Iterator

import keras
from keras.src.backend.common import global_state

from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer

_UNINITIALIZED = "uninitialized_variables"  # Keras' list of variables that wait for a value


@contextlib.contextmanager
def no_values() -> Iterator[None]:
    """Give no values to variables that are created inside the context, and draw no random numbers for them."""
    drawn = random.getstate()  # from which initializers take their seeds
    waiting = list(global_state.get_global_attribute(_UNINITIALIZED, []))
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        # Otherwise Keras keeps the new variables, and gives them values at the end of another scope.
        global_state.set_global_attribute(_UNINITIALIZED, waiting)
        random.setstate(drawn)


def symbolic_model(config: ViTConfig) -> VisionTransformer:
    """Return a float32 model without values, in a fraction of a second; only its structure can be read."""
    with no_values(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "keras_vit: ", UserWarning)  # nobody asked for this model
        return VisionTransformer(config, dtype="float32")
