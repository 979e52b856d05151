"""Fuse the operations between two matrix products into one compiled program, in training steps that enable it.

On a CPU, TensorFlow is faster for matrix products, and XLA for a chain of elementwise operations.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
from keras import ops

# (function, **settings) -> a compiled function of tensors that computes function(*tensors, **settings), with gradient.
# With gradient=g only the gradient is compiled, which is g(output, upstream).
Compiler: TypeAlias = Callable[..., Callable[..., Any]]


class _Local(threading.local):
    """State of the thread that calls the layers. A distribution strategy traces each replica in its own thread."""

    compiler: Compiler | None = None


_local = _Local()


@contextlib.contextmanager
def fuse_with(compiler: Compiler | None) -> Iterator[None]:
    """Compile the operations between matrix products inside the context, also when a gradient recomputes them."""
    before, _local.compiler = _local.compiler, compiler
    try:
        yield
    finally:
        _local.compiler = before


def product_then(
    layer: keras.layers.Layer, x: Any, after: Callable[..., Any] | None = None, *, axes: int = 1, **settings: Any
) -> Any:
    """Return after(layer(x), **settings). With a compiler, bias and `after` are one program, forward and backward.

    The layer's kernel begins with the last `axes` axes of x, over which it sums. `after` is a function of one tensor
    at module level, so that it is compiled once; `settings` must be hashable.
    """
    if _local.compiler is None or getattr(layer, "quantization_mode", None):
        return layer(x) if after is None else after(layer(x), **settings)
    kernel = ops.convert_to_tensor(layer.kernel)  # includes LoRA weights; in the layer's compute dtype
    rows, columns = math.prod(kernel.shape[:axes]), math.prod(kernel.shape[axes:])
    shape = (*x.shape[1:-axes], *kernel.shape[axes:])
    product = ops.matmul(ops.reshape(x, (-1, rows)), ops.reshape(kernel, (rows, columns)))
    bias = () if layer.bias is None else (ops.reshape(layer.bias, (columns,)),)
    if after is None:
        return ops.reshape(ops.add(product, *bias) if bias else product, (-1, *shape))
    return _local.compiler(add_bias_and_apply, after=after, shape=shape, **settings)(product, *bias)


def softmax(x: Any) -> Any:
    """Return the softmax over the last axis; with a compiler, its gradient is one program."""
    if _local.compiler is None:
        return _softmax(x)
    return _local.compiler(_softmax, gradient=_softmax_gradient)(x)


def layer_norm(layer: keras.layers.LayerNormalization, x: Any) -> Any:
    """Return layer(x), of a layer that normalizes the last axis; with a compiler, it is one program."""
    if _local.compiler is None:
        return layer(x)
    return _local.compiler(normalize, epsilon=layer.epsilon)(x, layer.gamma, layer.beta)


def _softmax(x: Any) -> Any:
    return ops.softmax(x, axis=-1)


def _softmax_gradient(weights: Any, upstream: Any) -> Any:
    w, u = _widened(weights, upstream)
    return ops.cast(w * (u - ops.sum(w * u, axis=-1, keepdims=True)), weights.dtype)


def normalize(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Compute a LayerNorm over the last axis, in at least float32."""
    wide, gamma, beta = _widened(x, gamma, beta)
    mean = ops.mean(wide, axis=-1, keepdims=True)
    centred = wide - mean
    variance = ops.mean(ops.square(centred), axis=-1, keepdims=True)
    return ops.cast(centred * ops.rsqrt(variance + epsilon) * gamma + beta, x.dtype)


def _widened(*tensors: Any) -> list[Any]:
    """Cast tensors to at least float32: results inside of a fused program are not written to memory, so it is free."""
    wide = keras.backend.result_type(tensors[0].dtype, "float32")
    return [ops.cast(tensor, wide) for tensor in tensors]


def add_bias_and_apply(
    product: Any, *bias: Any, after: Callable[..., Any], shape: tuple[int, ...], **settings: Any
) -> Any:
    """Return after(product + bias) in the given shape of one example; it computes in at least float32."""
    x = functools.reduce(ops.add, _widened(product, *bias))
    return ops.cast(after(ops.reshape(x, (-1, *shape)), **settings), product.dtype)
