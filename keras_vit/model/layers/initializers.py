"""Initializers of the paper's code (vit_jax/models_vit.py, models_resnet.py; big_vision for the probe)."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import keras

_INITIALIZERS: dict[str, Callable[[], keras.initializers.Initializer]] = {
    "convolution": lambda: keras.initializers.LecunNormal(),  # truncated, as flax's lecun_normal
    "dense": lambda: keras.initializers.GlorotUniform(),
    "dense_bias": lambda: keras.initializers.RandomNormal(stddev=1e-6),
    "position": lambda: keras.initializers.RandomNormal(stddev=0.02),
    "register": lambda: keras.initializers.RandomNormal(stddev=1e-6),
}

_uninitialized: ContextVar[bool] = ContextVar("uninitialized", default=False)


@contextmanager
def uninitialized() -> Iterator[None]:
    """Build layers with zeros inside the context, for models whose weights are loaded next.

    Python's garbage collector, which would take a fifth of the time, is paused for the whole process.
    """
    token = _uninitialized.set(True)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        _uninitialized.reset(token)


def initializer(name: str) -> keras.initializers.Initializer:
    """Return the initializer of a kind of weight, a key of `_INITIALIZERS`; zeros inside `uninitialized`."""
    return keras.initializers.Zeros() if _uninitialized.get() else _INITIALIZERS[name]()


def glorot_uniform_matrix(fan_in: int, fan_out: int) -> keras.initializers.Initializer:
    """Return Glorot uniform for a (fan_in, fan_out) matrix whose variable has another shape (an axis for heads)."""
    if _uninitialized.get():
        return keras.initializers.Zeros()
    limit = (6 / (fan_in + fan_out)) ** 0.5
    return keras.initializers.RandomUniform(-limit, limit)
