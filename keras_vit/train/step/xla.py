"""Choose what XLA compiles of a training step, and compile the pieces between matrix products."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from keras_vit.model.layers.runtime import Compiler


def jit_scope(xla: bool | str, strategy: tf.distribute.Strategy) -> Literal["step", "pieces", "nothing"]:
    """Return what XLA compiles, for a recipe's `xla`: the whole step, its pieces between products, or nothing."""
    if isinstance(strategy, tf.distribute.TPUStrategy) or not xla:  # a TPU compiles everything anyway
        return "nothing"
    return "pieces" if xla == "auto" and not tf.config.list_logical_devices("GPU") else "step"


def piece_compiler() -> Compiler:
    """Return a function that compiles a function of tensors and its gradient, once for the same settings.

    Only the inputs of the function are kept for gradient(upstream, *tensors); without one it is computed again.
    """

    @functools.cache
    def compiled(
        function: Callable[..., Any], *, gradient: Callable[..., Any] | None = None, **settings: Any
    ) -> Callable[..., Any]:
        bound = functools.partial(function, **settings)

        def recomputed(upstream: Any, *tensors: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                output = bound(*tensors)
            return tape.gradient(output, tensors, upstream)

        forward = tf.function(bound, jit_compile=True)
        backward = tf.function(functools.partial(gradient, **settings) if gradient else recomputed, jit_compile=True)

        @tf.custom_gradient
        def with_gradient(*tensors: Any) -> Any:
            return forward(*tensors), lambda upstream: backward(upstream, *tensors)

        return with_gradient

    return compiled
