"""Make the layers fast: compiled pieces, written-out gradients, recomputation, seeds, tokens that are not read.

The layers call these functions and read as the paper. Whoever runs a model chooses settings for all of its layers:

    with runtime.random_scope(seed, remat=True), runtime.fuse_with(compiler):
        logits = model(images, training=True)

Without settings the layers compute what Keras' own layers do. Settings hold for all layers called inside a `with`.
With a compiler, what lies between two matrix products is one program: on a CPU, TensorFlow is faster for matrix
products, and XLA for a chain of elementwise operations.
"""

import contextlib
import contextvars
import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
from keras import ops

Tensor: TypeAlias = Any  # of Keras' back end, or symbolic: Keras has no class for both
Shape: TypeAlias = tuple[Any, ...]  # int for each axis, None where it may have any size
# (function, **settings) -> a compiled function of tensors that computes function(*tensors, **settings), with gradient.
# Its gradient is gradient(upstream, *tensors, **settings) if that is given; keeps_first=False: without the first.
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


# Of each thread: a distribution strategy traces each replica in its own thread.
_DEFAULTS = Settings()
_current = contextvars.ContextVar("settings", default=_DEFAULTS)
settings = _current.get


@contextlib.contextmanager
def _use(new: Settings) -> Iterator[None]:
    token = _current.set(new)
    try:
        yield
    finally:
        _current.reset(token)


def _change(**changes: Any) -> contextlib.AbstractContextManager[None]:
    return _use(dataclasses.replace(settings(), **changes))


def fuse_with(compiler: Compiler | None) -> contextlib.AbstractContextManager[None]:
    """Compile the operations between matrix products inside the context, also when a gradient recomputes them."""
    return _change(compiler=compiler)


def observe_norms(observer: Observer) -> contextlib.AbstractContextManager[None]:
    """Call observer(path, input) for every LayerNorm that runs inside the context, in order; run the model eagerly."""
    return _change(observer=observer)


def observe(path: str, x: Tensor) -> None:
    """Show the input of a layer to the observer, if there is one."""
    if (observer := settings().observer) is not None:
        observer(path, x)


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
    """Generator from which a layer draws: its own, or inside `random_scope` one with the next seed."""
    seeds = settings().seeds
    return own if seeds is None else _FixedSeed(seeds.next())


def as_one_block(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
    """Call function(*tensors, **options), with equal random numbers when `random_scope(remat=True)` recomputes it.

    `options` are known when the layer is called; all tensors are in `tensors`, because the recomputation treats tensors
    in a closure as constants. `training` is an option: a recomputed block has no outer call to take it from.
    """
    outside = settings()
    if outside.seeds is None:
        return function(*tensors, **options)

    def call_with_seed(seed: Any, *tensors: Tensor) -> Any:
        # The settings of the first call: when the gradient recomputes the block, its contexts may have ended.
        with _use(dataclasses.replace(outside, seeds=_Seeds(seed, inside_block=True), remat=False)):
            return function(*tensors, **options)

    return (keras.remat(call_with_seed) if outside.remat else call_with_seed)(outside.seeds.next(), *tensors)


def final_tokens_only() -> contextlib.AbstractContextManager[None]:
    """Let blocks inside the context compute only the tokens that are read of them, `EncoderBlock.final_tokens`."""
    return _change(final_tokens_only=True)


def tokens_to_compute(final_tokens: int | None) -> int | None:
    """Number of tokens to compute: `final_tokens` inside of `final_tokens_only`, else None for all."""
    return final_tokens if settings().final_tokens_only else None


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


def product_then(
    layer: keras.layers.Layer,
    call: Callable[[Any], Any],
    x: Tensor,
    after: Callable[..., Any] | None = None,
    *,
    back: Callable[..., Any] | None = None,
    axes: int = 1,
    **options: Any,
) -> Any:
    """Compute after(call(x), **options), where `call` is Keras' way to call this dense layer.

    With a compiler, bias and `after` are one program, forward and backward. The layer's kernel begins with the last
    `axes` axes of x, over which it sums. `after` is a function of one tensor at module level, so that it is compiled
    once; `options` must be hashable. If it is linear, back(upstream, **options) is its gradient, and nothing is kept.
    """
    compiler, is_trained = settings().compiler, settings().seeds is not None
    lora = (layer.lora_kernel_a, layer.lora_kernel_b) if is_trained and getattr(layer, "lora_enabled", False) else ()
    if compiler is None and not lora:
        return call(x) if after is None else after(call(x), **options)
    kernel = ops.convert_to_tensor(layer._kernel if lora else layer.kernel)  # in the layer's compute dtype
    rows, columns = math.prod(kernel.shape[:axes]), math.prod(kernel.shape[axes:])
    shape = (*x.shape[1:-axes], *kernel.shape[axes:])
    flat = ops.reshape(x, (-1, rows))
    product = ops.matmul(flat, ops.reshape(kernel, (rows, columns)))
    if lora:  # two narrow products: a frozen kernel with the update added would cost its whole gradient
        down, up = (ops.convert_to_tensor(weight) for weight in lora)
        narrow = ops.reshape(ops.matmul(flat, ops.reshape(down, (rows, -1))), (-1, up.shape[0]))
        product += (layer.lora_alpha / layer.lora_rank) * ops.reshape(ops.matmul(narrow, up), (-1, columns))
    bias = () if layer.bias is None else (ops.reshape(layer.bias, (columns,)),)
    if after is None:
        return ops.reshape(ops.add(product, *bias) if bias else product, (-1, *shape))
    if compiler is None:
        return add_bias_and_apply(product, *bias, after=after, shape=shape, **options)
    if back is not None:
        options |= {"gradient": _linear_gradient, "keeps_first": False, "back": back}
    return compiler(add_bias_and_apply, after=after, shape=shape, **options)(product, *bias)


def attend(query: Tensor, key: Tensor, added: Tensor, value: Tensor, *, training: bool | None = None) -> Tensor:
    """Compute softmax(query key' + added) value, (batch, heads, queries, head size); `added` may be None.

    With a compiler, the gradient of softmax is one program.
    """
    more = () if added is None else (added,)
    compiler = settings().compiler
    if compiler is None or not training:
        return ops.matmul(attention_weights(query, key, *more), value)
    softmax_gradient = compiler(_softmax_gradient)

    @ops.custom_gradient
    def attended(query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Tensor:
        weights = attention_weights(query, key, *more)

        def gradient(upstream: Tensor) -> tuple[Tensor, ...]:
            d_scores = softmax_gradient(weights, ops.matmul(upstream, _transposed(value)))
            d_key, d_value = ops.matmul(_transposed(d_scores), query), ops.matmul(_transposed(weights), upstream)
            is_shared = bool(more) and more[0].shape[0] == 1  # one bias for all images
            d_added = ops.sum(d_scores, axis=0, keepdims=True) if is_shared else d_scores
            return ops.matmul(d_scores, key), d_key, d_value, *[d_added] * len(more)

        return ops.matmul(weights, value), gradient

    return attended(query, key, value, *more)


def attention_weights(query: Tensor, key: Tensor, added: Tensor = None) -> Tensor:
    """Compute softmax(query key' + added), (batch, heads, queries, keys); every row sums to 1."""
    scores = ops.matmul(query, _transposed(key))
    return ops.softmax(scores if added is None else scores + added, axis=-1)


def _transposed(x: Tensor) -> Tensor:
    return ops.swapaxes(x, -1, -2)


def layer_norm(layer: Any, call: Callable[[Any], Any], x: Tensor) -> Tensor:
    """Compute call(x), Keras' way to normalize the last axis; with a compiler, it is one program."""
    compiler = settings().compiler
    if compiler is None:
        return call(x)
    if layer.is_rms:
        return compiler(divide_by_rms, epsilon=layer.epsilon)(x, layer.gamma)
    compiled = compiler(normalize, gradient=_normalize_gradient, epsilon=layer.epsilon)
    return compiled(x, layer.gamma, layer.beta)


def _softmax_gradient(weights: Tensor, d_weights: Tensor) -> Tensor:
    w, d_w = _widened(weights, d_weights)
    return ops.cast(w * (d_w - ops.matmul(w * d_w, ops.ones((w.shape[-1], 1), w.dtype))), weights.dtype)


def normalize(x: Tensor, gamma: Tensor, beta: Tensor, *, epsilon: float) -> Tensor:
    """Compute a LayerNorm over the last axis, in at least float32."""
    wide, gamma, beta = _widened(x, gamma, beta)
    centred, root = _standardized(wide, epsilon)
    return ops.cast(centred * root * gamma + beta, x.dtype)


def divide_by_rms(x: Tensor, gamma: Tensor, *, epsilon: float) -> Tensor:
    """Compute an RMSNorm over the last axis, in at least float32: a sum of squares overflows float16."""
    wide, gamma = _widened(x, gamma)
    root = ops.rsqrt(ops.mean(ops.square(wide), axis=-1, keepdims=True) + epsilon)
    return ops.cast(wide * root * gamma, x.dtype)


def _normalize_gradient(
    upstream: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, *, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    width = x.shape[-1]
    wide, u, gain = (ops.reshape(tensor, (-1, width)) for tensor in _widened(x, upstream, gamma))
    centred, root = _standardized(wide, epsilon)
    normalized = centred * root
    d_gamma = u * normalized
    to_mean, to_sum = ops.transpose(gain) / width, ops.transpose(ops.ones_like(root))
    d_x = root * (u * gain - ops.matmul(u, to_mean) - normalized * ops.matmul(d_gamma, to_mean))
    sums = (ops.matmul(to_sum, tensor)[0] for tensor in (d_gamma, u))
    gradients = zip((ops.reshape(d_x, (-1, *x.shape[1:])), *sums), (x, gamma, beta), strict=True)
    return tuple(ops.cast(gradient, tensor.dtype) for gradient, tensor in gradients)


def _standardized(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Compute x - mean, and 1 / (standard deviation) in each row. XLA is faster with products than with sums."""
    to_mean = ops.full((x.shape[-1], 1), 1 / x.shape[-1], x.dtype)
    centred = x - ops.matmul(x, to_mean)
    return centred, ops.rsqrt(ops.matmul(ops.square(centred), to_mean) + epsilon)


def _widened(*tensors: Tensor) -> list[Tensor]:
    """Cast tensors to at least float32: results inside of a fused program are not written to memory, so it is free."""
    wide = keras.backend.result_type(tensors[0].dtype, "float32")
    return [ops.cast(tensor, wide) for tensor in tensors]


def add_bias_and_apply(
    product: Any, *bias: Any, after: Callable[..., Any], shape: tuple[int, ...], back: Any = None, **options: Any
) -> Any:
    """Compute after(product + bias) in the given shape of one example, in at least float32."""
    del back
    x = functools.reduce(ops.add, _widened(product, *bias))
    return ops.cast(after(ops.reshape(x, (-1, *shape)), **options), product.dtype)


def _linear_gradient(
    upstream: Any, *bias: Any, after: Any, shape: tuple[int, ...], back: Callable[..., Any], **options: Any
) -> tuple[Any, ...]:
    del after, shape
    [wide] = _widened(upstream)
    wide = back(wide, **options)
    flat = ops.reshape(wide, (-1, math.prod(wide.shape[2:])))
    sums = [ops.sum(flat, axis=0)] if bias else []
    return tuple(ops.cast(gradient, upstream.dtype) for gradient in (flat, *sums))
