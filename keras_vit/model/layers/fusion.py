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
    return _local.compiler(_add_bias_and_apply, after=after, shape=shape, **settings)(product, *bias)


def _add_bias_and_apply(
    product: Any, *bias: Any, after: Callable[..., Any], shape: tuple[int, ...], **settings: Any
) -> Any:
    # At least float32: intermediate results of a fused program are not written to memory, so it costs nothing.
    wide = keras.backend.result_type(product.dtype, "float32")
    x = functools.reduce(ops.add, (ops.cast(part, wide) for part in (product, *bias)))
    return ops.cast(after(ops.reshape(x, (-1, *shape)), **settings), product.dtype)
