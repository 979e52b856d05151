"""Compute a model's served outputs, without the parts that they do not need."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_vit.model import layers as vit
from keras_vit.model.layers import fusion
from keras_vit.model.layers.activations import activation
from keras_vit.model.vision_transformer import VisionTransformer

Outputs = dict[str, Any]  # tensors by name

# On CPUs, TensorFlow's optimizer recognizes its own GELUs, and joins them with the matrix product before them.
GELUS = {activation("gelu_tanh"): functools.partial(tf.nn.gelu, approximate=True), activation("gelu_erf"): tf.nn.gelu}
NORM_DTYPES = (tf.float32, tf.bfloat16)  # that TensorFlow's batch norm takes


def model_function(model: VisionTransformer) -> Callable[[Any], Outputs]:
    """Return the model as a function: prepared images -> float32 "features", the head's input, and "logits" if any.

    For classifiers that read the class token, the last block computes that token only.
    """
    run = _outputs_function(model)

    def run_fused(images: Any) -> Outputs:
        with fusion.fuse_with(_for_graphs):
            return run(images)

    return run_fused


def _outputs_function(model: VisionTransformer) -> Callable[[Any], Outputs]:
    config = model.config
    if config.classifier != "token" or config.position == "relative" or not config.has_attention:
        names = ["pre_logits", *(["logits"] if config.num_classes else [])]

        def all_tokens(images: Any) -> Outputs:
            outputs = model.features(images, names)
            outputs["features"] = keras.ops.cast(outputs.pop("pre_logits"), "float32")
            return outputs

        return all_tokens
    block = model.get_layer(f"block_{config.num_layers - 1}")
    # The name is a prefix of every operator's name in the graph: a short one keeps the file small.
    front = keras.Model(model.inputs[0], block.input, name=model.name)

    def final_tokens(images: Any) -> Outputs:
        tokens = _last_block(block, front(images, training=False), count=config.num_final_tokens)
        # The norm acts on each token separately: before or after pooling.
        tokens = fusion.layer_norm(model.get_layer("encoder_norm"), tokens)
        return _heads(model, [tokens[:, index] for index in range(config.num_final_tokens)])

    return final_tokens


def bfloat16_function(model: VisionTransformer) -> Callable[[Any], Outputs]:
    """Return `model_function` with matrix products in bfloat16. Each call converts the model's float32 weights."""
    with vit.uninitialized():
        bfloat16_model = VisionTransformer(model.config, dtype="mixed_bfloat16", name=model.name)
    if len(bfloat16_model.variables) != len(model.variables):
        raise ValueError(
            "bfloat16=True needs a model with only the weights of its config. Received: a model with added weights, "
            "such as LoRA's. Pass model.rebuilt(model.config), which has LoRA's updates in its kernels"
        )
    run = model_function(bfloat16_model)
    pairs = list(zip(bfloat16_model.variables, model.variables, strict=True))

    def run_with_weights(images: Any) -> Outputs:
        with keras.StatelessScope(state_mapping=[(variable, weight.value) for variable, weight in pairs]):
            return run(images)

    return run_with_weights


def _last_block(block: vit.EncoderBlock, x: Any, *, count: int) -> Any:
    """Return the block's output for the first `count` tokens, which attend to all tokens."""
    normed, kept = fusion.layer_norm(block.norm1, x), x[:, :count]
    update = block.attention(normed[:, :count], normed)
    kept = kept + (update if block.scale1 is None else block.scale1(update))
    update = block.mlp(fusion.layer_norm(block.norm2, kept))
    return kept + (update if block.scale2 is None else block.scale2(update))


def _for_graphs(function: Callable[..., Any], *, gradient: Any = None, **settings: Any) -> Callable[..., Any]:
    """Return a function of the layers in the form that TensorFlow's optimizer joins to one operator on CPUs."""
    del gradient  # no graph that is served has one
    joined: Any = {fusion.add_bias_and_apply: _add_bias_and_apply, fusion.normalize: _normalize}
    return functools.partial(joined.get(function, function), **settings)


def _add_bias_and_apply(
    product: Any, *bias: Any, after: Callable[..., Any], shape: tuple[int, ...], **settings: Any
) -> Any:
    """Apply `after` to a product (rows, columns) and its bias. Only a GELU follows its product directly.

    Any other bias is added after a reshape, which the optimizer does not join: with weights in variables, a joint
    product takes 1.5 times as long in bfloat16.
    """
    is_gelu, tokens = after in GELUS, shape[:1] if len(shape) > 1 else ()
    x = product if is_gelu else tf.reshape(product, (-1, *tokens, product.shape[-1]))
    x = tf.nn.bias_add(x, *bias) if bias else x
    return tf.reshape(GELUS[after](x), (-1, *shape)) if is_gelu else after(tf.reshape(x, (-1, *shape)), **settings)


def _normalize(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Apply a LayerNorm as a batch norm with the rows as channels: one operator, which computes in float32."""
    if x.dtype not in NORM_DTYPES:
        return fusion.normalize(x, gamma, beta, epsilon=epsilon)
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


def _heads(model: VisionTransformer, tokens: list[Any]) -> Outputs:
    """Apply the model's head to the class token; for a distilled model average the two heads."""
    config = model.config
    if config.representation_size is not None:
        tokens = [model.get_layer("pre_logits")(token) for token in tokens]
    if config.normalize_features:
        tokens = [model.get_layer("normalized")(token) for token in tokens]
    outputs = {"features": keras.ops.cast(_mean(tokens), "float32")}
    if config.num_classes:
        names = ("head", "head_distillation")[: len(tokens)]
        outputs["logits"] = _mean([model.get_layer(name)(x) for name, x in zip(names, tokens, strict=True)])
    return outputs


def _mean(tensors: list[Any]) -> Any:
    return sum(tensors[1:], tensors[0]) / len(tensors)
