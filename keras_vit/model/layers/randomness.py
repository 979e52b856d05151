"""Layers that draw random numbers while training, and where their seeds come from.

By themselves they draw from Keras' seed generators, as every Keras layer does. Those keep state: every replica of a
distributed run draws the same mask, a block that is computed again for its gradient draws another one, and what is
drawn after a restart depends on what was drawn before. Inside of `scope` all seeds follow from one instead.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops


class _Fixed(keras.random.SeedGenerator):
    """One seed, a tensor, in the clothes that keras.random wants."""

    def __init__(self, seed: Any) -> None:  # without super(): there is no state
        self.fixed = seed

    def next(self, ordered: bool = True) -> Any:
        del ordered
        return self.fixed


class _Scope(threading.local):
    """What holds for the layers that this thread is calling. Replicas are traced in threads of their own."""

    seed: Any = None
    remat = False
    inside_block = False
    draws = 0


_scope = _Scope()


@contextlib.contextmanager
def scope(seed: Any, *, remat: bool = False) -> Iterator[None]:
    """All random numbers that layers draw inside follow from `seed` and the order of the layers.

    Args:
        seed: int32 tensor (2,), another one for every step and replica.
        remat: encoder blocks keep their input only, and are computed again, with the same random numbers, when their
            gradient is wanted (rematerialisation: less memory, to about half, for a third more arithmetic).
    """
    with _set(seed=seed, remat=remat, inside_block=False, draws=0):
        yield


def as_one_block(function: Callable[..., Any], *tensors: Any) -> Any:
    """function(*tensors), whose random numbers are the same if it runs again; inside `scope(remat=True)` it will."""
    if _scope.seed is None:
        return function(*tensors)

    def run(seed: Any, *tensors: Any) -> Any:
        with _set(seed=seed, remat=False, inside_block=True, draws=0):
            return function(*tensors)

    # Every tensor goes in by position: what a closure holds is a constant to the recomputation.
    return (keras.remat(run) if _scope.remat else run)(_next_seed(), *tensors)


@contextlib.contextmanager
def _set(**values: Any) -> Iterator[None]:
    before = {name: getattr(_scope, name) for name in values}
    vars(_scope).update(values)
    try:
        yield
    finally:
        vars(_scope).update(before)


def _next_seed() -> Any:
    # Blocks count in the first word, draws inside of a block in the second: no two draws share a seed.
    _scope.draws += 1
    return _scope.seed + ops.convert_to_tensor([0, _scope.draws] if _scope.inside_block else [_scope.draws, 0], "int32")


def _generator(own: keras.random.SeedGenerator) -> keras.random.SeedGenerator:
    return own if _scope.seed is None else _Fixed(_next_seed())


@keras.saving.register_keras_serializable("keras_vit")
class Dropout(keras.layers.Dropout):
    """Keras' Dropout, with the seed of the `scope` where there is one."""

    def call(self, inputs: Any, training: bool | None = False) -> Any:
        if not training or not self.rate:
            return inputs
        return keras.random.dropout(
            inputs, self.rate, noise_shape=self.noise_shape, seed=_generator(self.seed_generator)
        )


@keras.saving.register_keras_serializable("keras_vit")
class StochasticDepth(keras.layers.Layer):
    """Drops a whole residual branch for some of the images while training (arXiv 1603.09382; AugReg, section 3).

    Args:
        rate: chance of dropping, in [0, 1). What is kept is scaled by 1 / (1 - rate).
    """

    def __init__(self, rate: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rate = rate
        self.seed_generator = keras.random.SeedGenerator() if rate else None

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Nothing to build."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        if not training or self.seed_generator is None:
            return x
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        return keras.random.dropout(ops.ones(shape, x.dtype), self.rate, seed=_generator(self.seed_generator)) * x

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "rate": self.rate}
