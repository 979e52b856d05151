"""Dropout and stochastic depth; inside of `random_scope` all their random numbers are derived from one seed.

Keras' seed generators, used elsewhere, keep state: all replicas draw the same mask, a block that is recomputed for
its gradient draws another one, and after a restart the numbers depend on what was drawn before.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import keras
from keras import ops

from keras_vit.model.layers.base import BaseLayer
from keras_vit.model.layers.cost import Cost, Shape


class _FixedSeed(keras.random.SeedGenerator):
    """A seed generator that always returns the same tensor: keras.random does not accept a bare tensor as seed."""

    def __init__(self, seed: Any) -> None:  # without super(): there is no state
        self.seed_tensor = seed

    def next(self, ordered: bool = True) -> Any:
        del ordered
        return self.seed_tensor


class _Scope(threading.local):
    """State of the thread that calls the layers: a distribution strategy traces each replica in its own thread."""

    seed: Any = None
    remat = False
    inside_block = False
    draws = 0


_scope = _Scope()


@contextlib.contextmanager
def random_scope(seed: Any, *, remat: bool = False) -> Iterator[None]:
    """Derive all random numbers inside the context from `seed` and the order of the layers.

    `seed` is int32 (2,), different for every step and replica. With `remat`, encoder blocks keep only their input and
    are recomputed for their gradient: down to half the memory for a third more arithmetic.
    """
    with _set(seed=seed, remat=remat, inside_block=False, draws=0):
        yield


def as_one_block(function: Callable[..., Any], *tensors: Any) -> Any:
    """Return function(*tensors), with equal random numbers when `random_scope(remat=True)` recomputes it."""
    if _scope.seed is None:
        return function(*tensors)

    def call_with_seed(seed: Any, *tensors: Any) -> Any:
        with _set(seed=seed, remat=False, inside_block=True, draws=0):
            return function(*tensors)

    # All tensors are arguments, because the recomputation treats tensors in a closure as constants.
    return (keras.remat(call_with_seed) if _scope.remat else call_with_seed)(_next_seed(), *tensors)


@contextlib.contextmanager
def _set(**values: Any) -> Iterator[None]:
    before = {name: getattr(_scope, name) for name in values}
    vars(_scope).update(values)
    try:
        yield
    finally:
        vars(_scope).update(before)


def _next_seed() -> Any:
    # The first word counts blocks, the second counts draws inside of a block: no two draws share a seed.
    _scope.draws += 1
    return _scope.seed + ops.convert_to_tensor([0, _scope.draws] if _scope.inside_block else [_scope.draws, 0], "int32")


def _generator(own: keras.random.SeedGenerator) -> keras.random.SeedGenerator:
    return own if _scope.seed is None else _FixedSeed(_next_seed())


@keras.saving.register_keras_serializable("keras_vit")
class Dropout(keras.layers.Dropout):
    """Keras' Dropout, which takes its seeds from `random_scope` inside of it."""

    def call(self, inputs: Any, training: bool | None = False) -> Any:
        if not training or not self.rate:
            return inputs
        return keras.random.dropout(
            inputs, self.rate, noise_shape=self.noise_shape, seed=_generator(self.seed_generator)
        )

    def cost(self, shape: Shape) -> Cost:
        """Return the cost for values of any shape: the mask."""
        return Cost(kept_masks=prod(shape) if self.rate else 0)


@keras.saving.register_keras_serializable("keras_vit")
class StochasticDepth(BaseLayer):
    """Drop a residual branch of some images in training (arXiv 1603.09382; AugReg, arXiv 2106.10270, section 3).

    `rate` is the probability of dropping; branches that are kept are scaled by 1 / (1 - rate).
    """

    def __init__(self, rate: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rate = rate
        self.seed_generator = keras.random.SeedGenerator() if rate else None

    def call(self, x: Any, training: bool | None = None) -> Any:
        if not training or self.seed_generator is None:
            return x
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        return keras.random.dropout(ops.ones(shape, x.dtype), self.rate, seed=_generator(self.seed_generator)) * x
