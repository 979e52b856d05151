"""Choose what XLA compiles of a training step, and compile the pieces between matrix products."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from keras_vit.model.layers.fusion import Compiler


def jit_scope(xla: bool | str, strategy: tf.distribute.Strategy) -> Literal["step", "pieces", "nothing"]:
    """Return what XLA compiles, for a recipe's `xla`: the whole step, its pieces between products, or nothing."""
    if isinstance(strategy, tf.distribute.TPUStrategy) or not xla:  # a TPU compiles everything anyway
        return "nothing"
    return "pieces" if xla == "auto" and not tf.config.list_logical_devices("GPU") else "step"


def piece_compiler() -> Compiler:
    """Return a function that compiles a function of tensors and its gradient, once for the same settings."""

    @functools.cache
    def compiled(
        function: Callable[..., Any], *, gradient: Callable[..., Any] | None = None, **settings: Any
    ) -> Callable[..., Any]:
        bound = functools.partial(function, **settings)
        return _with_gradient(bound) if gradient is None else _with_compiled_gradient(bound, gradient)

    return compiled


def _with_compiled_gradient(function: Callable[..., Any], gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one tensor whose gradient(output, upstream) is compiled; only its output is kept."""
    backward = tf.function(gradient, jit_compile=True)

    @tf.custom_gradient
    def with_gradient(tensor: Any) -> Any:
        output = function(tensor)
        return output, lambda upstream: backward(output, upstream)

    return with_gradient


def _with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function and its gradient; the gradient recomputes the function, so that only inputs are kept."""
    forward = tf.function(function, jit_compile=True)

    @tf.function(jit_compile=True)
    def backward(upstream: Any, *tensors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            output = function(*tensors)
        return tape.gradient(output, tensors, upstream)

    @tf.custom_gradient
    def with_gradient(*tensors: Any) -> Any:
        return forward(*tensors), lambda upstream: backward(upstream, *tensors)

    return with_gradient
