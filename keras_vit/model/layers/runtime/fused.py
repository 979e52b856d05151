"""Compute what lies between two matrix products as one compiled program, in training steps that enable it.

On a CPU, TensorFlow is faster for matrix products, and XLA for a chain of elementwise operations.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_vit.model.layers.runtime.settings import settings


def product_then(
    layer: keras.layers.Layer,
    call: Callable[[Any], Any],
    x: Any,
    after: Callable[..., Any] | None = None,
    *,
    axes: int = 1,
    **options: Any,
) -> Any:
    """Return after(call(x), **options), where `call` is Keras' way to call this dense layer.

    With a compiler, bias and `after` are one program, forward and backward. The layer's kernel begins with the last
    `axes` axes of x, over which it sums. `after` is a function of one tensor at module level, so that it is compiled
    once; `options` must be hashable.
    """
    compiler = settings().compiler
    if compiler is None or layer.quantization_mode is not None:
        return call(x) if after is None else after(call(x), **options)
    kernel = ops.convert_to_tensor(layer.kernel)  # includes LoRA weights; in the layer's compute dtype
    rows, columns = math.prod(kernel.shape[:axes]), math.prod(kernel.shape[axes:])
    shape = (*x.shape[1:-axes], *kernel.shape[axes:])
    product = ops.matmul(ops.reshape(x, (-1, rows)), ops.reshape(kernel, (rows, columns)))
    bias = () if layer.bias is None else (ops.reshape(layer.bias, (columns,)),)
    if after is None:
        return ops.reshape(ops.add(product, *bias) if bias else product, (-1, *shape))
    return compiler(add_bias_and_apply, after=after, shape=shape, **options)(product, *bias)


def attend(query: Any, key: Any, added: Any, value: Any, *, training: bool | None = None) -> Any:
    """Return softmax(query key' + added) value, (batch, heads, queries, head size); `added` may be None.

    With a compiler, the gradient of softmax is one program.
    """
    more = () if added is None else (added,)
    compiler = settings().compiler
    if compiler is None or not training:
        return ops.matmul(attention_weights(query, key, *more), value)
    softmax_gradient = compiler(_softmax_gradient)

    @ops.custom_gradient
    def attended(query: Any, key: Any, value: Any, *more: Any) -> Any:
        weights = attention_weights(query, key, *more)
        mixed = ops.matmul(weights, value)

        def gradient(upstream: Any) -> tuple[Any, ...]:
            d_scores = softmax_gradient(weights, ops.matmul(upstream, _transposed(value)), mixed, upstream)
            d_key, d_value = ops.matmul(_transposed(d_scores), query), ops.matmul(_transposed(weights), upstream)
            return ops.matmul(d_scores, key), d_key, d_value, *[d_scores] * len(more)

        return mixed, gradient

    return attended(query, key, value, *more)


def attention_weights(query: Any, key: Any, added: Any = None) -> Any:
    """Return softmax(query key' + added), (batch, heads, queries, keys); every row sums to 1."""
    scores = ops.matmul(query, _transposed(key))
    return ops.softmax(scores if added is None else scores + added, axis=-1)


def _transposed(x: Any) -> Any:
    return ops.swapaxes(x, -1, -2)


def layer_norm(layer: keras.layers.LayerNormalization, call: Callable[[Any], Any], x: Any) -> Any:
    """Return call(x), Keras' way to normalize the last axis; with a compiler, it is one program."""
    compiler = settings().compiler
    if compiler is None:
        return call(x)
    compiled = compiler(normalize, gradient=_normalize_gradient, epsilon=layer.epsilon)
    return compiled(x, layer.gamma, layer.beta)


def _softmax_gradient(weights: Any, d_weights: Any, mixed: Any, upstream: Any) -> Any:
    # The sum of weights * d_weights over the keys is that of mixed * upstream over the channels, which are fewer.
    w, d_w, m, u = _widened(weights, d_weights, mixed, upstream)
    return ops.cast(w * (d_w - ops.matmul(m * u, ops.ones((m.shape[-1], 1), m.dtype))), weights.dtype)


def normalize(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Compute a LayerNorm over the last axis, in at least float32."""
    wide, gamma, beta = _widened(x, gamma, beta)
    centred, root = _standardized(wide, epsilon)
    return ops.cast(centred * root * gamma + beta, x.dtype)


def _normalize_gradient(upstream: Any, x: Any, gamma: Any, beta: Any, *, epsilon: float) -> tuple[Any, Any, Any]:
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


def _standardized(x: Any, epsilon: float) -> tuple[Any, Any]:
    """Return x - mean, and 1 / (standard deviation) in each row. XLA is faster with products than with sums."""
    to_mean = ops.full((x.shape[-1], 1), 1 / x.shape[-1], x.dtype)
    centred = x - ops.matmul(x, to_mean)
    return centred, ops.rsqrt(ops.matmul(ops.square(centred), to_mean) + epsilon)


def _widened(*tensors: Any) -> list[Any]:
    """Cast tensors to at least float32: results inside of a fused program are not written to memory, so it is free."""
    wide = keras.backend.result_type(tensors[0].dtype, "float32")
    return [ops.cast(tensor, wide) for tensor in tensors]


def add_bias_and_apply(
    product: Any, *bias: Any, after: Callable[..., Any], shape: tuple[int, ...], **options: Any
) -> Any:
    """Return after(product + bias) in the given shape of one example; it computes in at least float32."""
    x = functools.reduce(ops.add, _widened(product, *bias))
    return ops.cast(after(ops.reshape(x, (-1, *shape)), **options), product.dtype)
