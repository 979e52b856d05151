"""XLA for the pieces of a step that lie between products of matrices, see `layers.fusion`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_vit.model.layers.fusion import Compiler


def compiler() -> Compiler:
    """Compiles a function of tensors, and its gradient; the same function with the same settings once."""

    @functools.cache
    def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        return _with_gradient(functools.partial(function, **settings))

    return compiled


def _with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Two programs. The gradient's computes what is inside again: all that is kept is what went in."""
    forward = tf.function(function, jit_compile=True)

    @tf.function(jit_compile=True)
    def backward(upstream: Any, *tensors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            output = function(*tensors)
        return tape.gradient(output, tensors, upstream)

    @tf.custom_gradient
    def whole(*tensors: Any) -> Any:
        return forward(*tensors), lambda upstream: backward(upstream, *tensors)

    return whole
