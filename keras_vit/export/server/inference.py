"""Compute a model's served outputs, without the parts that they do not need."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_vit.model.layers import runtime
from keras_vit.model.layers.activations import activation_function
from keras_vit.model.vision_transformer import VisionTransformer

Outputs = dict[str, Any]  # tensors by name

# On CPUs, TensorFlow's optimizer recognizes its own GELUs, and joins them with the matrix product before them.
GELUS = {
    activation_function("gelu_tanh"): functools.partial(tf.nn.gelu, approximate=True),
    activation_function("gelu_erf"): tf.nn.gelu,
}
NORM_DTYPES = (tf.float32, tf.bfloat16)  # that TensorFlow's batch norm takes


def model_function(model: keras.Model) -> Callable[[Any], Outputs]:
    """Return the model as a function: prepared images -> float32 "features", the head's input, and the head's output.

    For classifiers that read the class token, the last block computes that token only. A model of maps has no features.
    """
    if not isinstance(model, VisionTransformer):
        return functools.partial(_map_outputs, model)
    names = ["pre_logits", *(name for name in model.task.outputs[:1] if name != "features")]

    def run(images: Any) -> Outputs:
        with runtime.final_tokens_only(), runtime.fuse_with(_for_graphs):
            outputs = model.features(images, names)
        return {"features": keras.ops.cast(outputs.pop("pre_logits"), "float32"), **outputs}

    return run


def _map_outputs(model: keras.Model, images: Any) -> Outputs:
    with runtime.fuse_with(_for_graphs):
        return {model.task.outputs[0]: model(images, training=False)}


def bfloat16_function(model: VisionTransformer) -> Callable[[Any], Outputs]:
    """Return `model_function` with matrix products in bfloat16. Each call converts the model's float32 weights."""
    with runtime.uninitialized():
        bfloat16_model = VisionTransformer(model.config, dtype="mixed_bfloat16", name=model.name)
    if len(bfloat16_model.variables) != len(model.variables):
        raise ValueError(
            "bfloat16=True needs a model with only the weights of its config. Received: a model with added weights, "
            "such as LoRA's. Pass model.with_config(model.config), which has LoRA's updates in its kernels"
        )
    run = model_function(bfloat16_model)
    pairs = list(zip(bfloat16_model.variables, model.variables, strict=True))

    def run_with_weights(images: Any) -> Outputs:
        with keras.StatelessScope(state_mapping=[(variable, weight.value) for variable, weight in pairs]):
            return run(images)

    return run_with_weights


def _for_graphs(function: Callable[..., Any], *, gradient: Any = None, **settings: Any) -> Callable[..., Any]:
    """Return a function of the layers in the form that TensorFlow's optimizer joins to one operator on CPUs."""
    del gradient  # no graph that is served has one
    joined: Any = {runtime.add_bias_and_apply: _add_bias_and_apply, runtime.normalize: _normalize}
    return functools.partial(joined.get(function, function), **settings)


def _add_bias_and_apply(
    product: Any, *bias: Any, after: Callable[..., Any], shape: tuple[int, ...], **settings: Any
) -> Any:
    """Apply `after` to a product (rows, columns) and its bias. Only a GELU follows its product directly.

    Any other bias is added after a reshape, which the optimizer does not join: with weights in variables, a joint
    product takes 1.5 times as long in bfloat16.
    """
    is_gelu = after in GELUS
    tokens = shape[:1] if len(shape) > 1 else ()
    x = product if is_gelu else tf.reshape(product, (-1, *tokens, product.shape[-1]))
    x = tf.nn.bias_add(x, *bias) if bias else x
    return tf.reshape(GELUS[after](x), (-1, *shape)) if is_gelu else after(tf.reshape(x, (-1, *shape)), **settings)


def _normalize(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Apply a LayerNorm as a batch norm with the rows as channels: one operator, which computes in float32."""
    if x.dtype not in NORM_DTYPES:
        return runtime.normalize(x, gamma, beta, epsilon=epsilon)
    rows = tf.size(x) // x.shape[-1]
    y = tf.raw_ops.FusedBatchNormV3(
        x=tf.reshape(x, [1, rows, x.shape[-1], 1]),
        scale=tf.fill([rows], 1.0),
        offset=tf.fill([rows], 0.0),
        mean=tf.constant([], tf.float32),
        variance=tf.constant([], tf.float32),
        epsilon=epsilon,
        data_format="NCHW",
    ).y
    gamma, beta = (tf.cast(keras.ops.convert_to_tensor(weight), x.dtype) for weight in (gamma, beta))
    return tf.reshape(y, tf.shape(x)) * gamma + beta
