"""What stands between two products of matrices, which a training step may have compiled as one program.

On a CPU TensorFlow's own products are faster than XLA's, while XLA passes over memory once where TensorFlow takes a
pass for every operation. A step that brings a compiler has both.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
from keras import ops

# (function, **settings) -> what calls function(*tensors, **settings), compiled, with a gradient.
Compiler: TypeAlias = Callable[..., Callable[..., Any]]


class _Local(threading.local):
    """What holds for the layers that this thread is calling. Replicas are traced in threads of their own."""

    compiler: Compiler | None = None


_local = _Local()


@contextlib.contextmanager
def compiled_by(compiler: Compiler | None) -> Iterator[None]:
    """What layers compute between products is compiled inside; so it is where a gradient computes them again."""
    before, _local.compiler = _local.compiler, compiler
    try:
        yield
    finally:
        _local.compiler = before


def product_then(
    layer: keras.layers.Layer, x: Any, after: Callable[..., Any] | None = None, *, axes: int = 1, **settings: Any
) -> Any:
    """after(layer(x), **settings); with a compiler the bias and `after` are one program, and so are their gradients.

    Args:
        layer: Dense, or EinsumDense whose kernel begins with the axes that it sums over.
        x: (batch, ..., and these axes).
        after: of one tensor; None leaves the layer's output as it is. Defined in a module: it is compiled once.
        axes: how many of x the product sums over.
        settings: hashable, for `after`.
    """
    if _local.compiler is None or getattr(layer, "quantization_mode", None):
        return layer(x) if after is None else after(layer(x), **settings)
    kernel = ops.convert_to_tensor(layer.kernel)  # with its LoRA, and in the layers' compute dtype
    rows, columns = math.prod(kernel.shape[:axes]), math.prod(kernel.shape[axes:])
    shape = (*x.shape[1:-axes], *kernel.shape[axes:])
    product = ops.matmul(ops.reshape(x, (-1, rows)), ops.reshape(kernel, (rows, columns)))
    bias = () if layer.bias is None else (ops.reshape(layer.bias, (columns,)),)
    if after is None:
        return ops.reshape(ops.add(product, *bias) if bias else product, (-1, *shape))
    return _local.compiler(_finished, after=after, shape=shape, **settings)(product, *bias)


def _finished(product: Any, *bias: Any, after: Callable[..., Any], shape: tuple[int, ...], **settings: Any) -> Any:
    # At least in float32: it costs nothing where nothing in between is written to memory.
    wide = keras.backend.result_type(product.dtype, "float32")
    x = functools.reduce(ops.add, (ops.cast(part, wide) for part in (product, *bias)))
    return ops.cast(after(ops.reshape(x, (-1, *shape)), **settings), product.dtype)
