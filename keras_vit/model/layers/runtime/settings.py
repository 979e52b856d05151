"""Settings that hold for all layers called inside a `with` block, each with its default outside of it."""

import contextlib
import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
from keras import ops

# (function, **settings) -> a compiled function of tensors that computes function(*tensors, **settings), with gradient.
# Its gradient is gradient(upstream, *tensors, **settings) if that is given.
Compiler: TypeAlias = Callable[..., Callable[..., Any]]
Observer: TypeAlias = Callable[[str, Any], None]  # takes the path of a layer and its input


class _Seeds:
    """Seeds that are derived from one seed and the order in which the layers ask for them."""

    def __init__(self, seed: Any, *, inside_block: bool) -> None:
        self.seed = seed
        self.inside_block = inside_block
        self.draws = 0

    def next(self) -> Any:
        # The first word counts blocks, the second counts draws inside of a block: no two draws share a seed.
        self.draws += 1
        return self.seed + ops.convert_to_tensor([0, self.draws] if self.inside_block else [self.draws, 0], "int32")


@dataclass(frozen=True)
class Settings:
    """Settings that the layers read. See the functions below, one for each setting."""

    compiler: Compiler | None = None
    observer: Observer | None = None
    seeds: _Seeds | None = None
    remat: bool = False
    final_tokens_only: bool = False
    uninitialized: bool = False


class _Local(threading.local):
    """Settings of the thread that calls the layers: a distribution strategy traces each replica in its own thread."""

    settings = Settings()


_local = _Local()


def settings() -> Settings:
    """Return the settings of this thread."""
    return _local.settings


@contextlib.contextmanager
def _use(new: Settings) -> Iterator[None]:
    before, _local.settings = _local.settings, new
    try:
        yield
    finally:
        _local.settings = before


def _change(**changes: Any) -> contextlib.AbstractContextManager[None]:
    return _use(dataclasses.replace(_local.settings, **changes))


def fuse_with(compiler: Compiler | None) -> contextlib.AbstractContextManager[None]:
    """Compile the operations between matrix products inside the context, also when a gradient recomputes them."""
    return _change(compiler=compiler)


def observe_norms(observer: Observer) -> contextlib.AbstractContextManager[None]:
    """Call observer(path, input) for every LayerNorm that runs inside the context, in the order of computation.

    Paths are those of the layers, such as "block_0/norm1", "block_0/mlp/norm" and "encoder_norm". Run the model
    eagerly; in a function that TensorFlow traces, inputs have no values.
    """
    return _change(observer=observer)


def observe(path: str, x: Any) -> None:
    """Show the input of a layer to the observer, if there is one."""
    if _local.settings.observer is not None:
        _local.settings.observer(path, x)


def random_scope(seed: Any, *, remat: bool = False) -> contextlib.AbstractContextManager[None]:
    """Derive all random numbers inside the context from `seed` and the order of the layers.

    `seed` is int32 (2,), different for every step and replica. With `remat`, encoder blocks keep only their input and
    are recomputed for their gradient: down to half the memory for a third more arithmetic.

    Keras' seed generators, used elsewhere, keep state: all replicas draw the same mask, a block that is recomputed for
    its gradient draws another one, and after a restart the numbers depend on what was drawn before.
    """
    return _change(seeds=_Seeds(seed, inside_block=False), remat=remat)


class _FixedSeed(keras.random.SeedGenerator):
    """A seed generator that always returns the same tensor: keras.random does not accept a bare tensor as seed."""

    def __init__(self, seed: Any) -> None:  # without super(): there is no state
        self.seed_tensor = seed

    def next(self, ordered: bool = True) -> Any:
        del ordered
        return self.seed_tensor


def seed_generator(own: keras.random.SeedGenerator) -> keras.random.SeedGenerator:
    """Return the generator from which a layer draws: its own, or inside `random_scope` one with the next seed."""
    seeds = _local.settings.seeds
    return own if seeds is None else _FixedSeed(seeds.next())


def as_one_block(function: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
    """Return function(*tensors, **options), with equal random numbers when `random_scope(remat=True)` recomputes it.

    `options` are known when the layer is called; all tensors are in `tensors`, because the recomputation treats tensors
    in a closure as constants. `training` is an option: a recomputed block has no outer call to take it from.
    """
    outside = _local.settings
    if outside.seeds is None:
        return function(*tensors, **options)

    def call_with_seed(seed: Any, *tensors: Any) -> Any:
        # The settings of the first call: when the gradient recomputes the block, its contexts may have ended.
        with _use(dataclasses.replace(outside, seeds=_Seeds(seed, inside_block=True), remat=False)):
            return function(*tensors, **options)

    return (keras.remat(call_with_seed) if outside.remat else call_with_seed)(outside.seeds.next(), *tensors)


def final_tokens_only() -> contextlib.AbstractContextManager[None]:
    """Let blocks inside the context compute only the tokens that are read of them, `EncoderBlock.final_tokens`."""
    return _change(final_tokens_only=True)


def tokens_to_compute(final_tokens: int | None) -> int | None:
    """Return `final_tokens` inside of `final_tokens_only`, else None: all."""
    return final_tokens if _local.settings.final_tokens_only else None


@contextlib.contextmanager
def uninitialized() -> Iterator[None]:
    """Build layers with zeros inside the context, for models whose weights are loaded next.

    Python's garbage collector, which would take a fifth of the time, is paused for the whole process.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with _change(uninitialized=True):
            yield
    finally:
        if collects:
            gc.enable()
