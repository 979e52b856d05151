"""Compute a model's served outputs, without the parts that they do not need."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_vit.model import layers as vit
from keras_vit.model.layers.activations import activation
from keras_vit.model.layers.fusion import fuse_with
from keras_vit.model.vision_transformer import VisionTransformer

Outputs = dict[str, Any]  # tensors by name

# On CPUs, TensorFlow's optimizer recognizes its own GELUs, and joins them with the matrix product before them.
GELUS = {activation("gelu_tanh"): functools.partial(tf.nn.gelu, approximate=True), activation("gelu_erf"): tf.nn.gelu}
NORM_DTYPES = (tf.float32, tf.bfloat16)  # that TensorFlow's batch norm takes


def model_function(model: VisionTransformer) -> Callable[[Any], Outputs]:
    """Return the model as a function: prepared images -> float32 "features", the head's input, and "logits" if any.

    For classifiers that read the class token, the last block computes that token only.
    """
    run = _unfused_function(model)

    def run_fused(images: Any) -> Outputs:
        with fuse_with(_join_gelu):
            return run(images)

    return run_fused


def _unfused_function(model: VisionTransformer) -> Callable[[Any], Outputs]:
    config = model.config
    names = ["pre_logits", *(["logits"] if config.num_classes else [])]
    if config.position_place != "stem" or not config.num_layers:
        return lambda images: _as_outputs(model.features(images, names))
    blocks = [model.get_layer(f"block_{i}") for i in range(config.num_layers)]
    # The name is a prefix of every operator's name in the graph: a short one keeps the file small.
    front = keras.Model(model.inputs[0], blocks[0].input, name=model.name)
    if config.classifier == "token" and config.has_attention:

        def head(tokens: Any) -> Outputs:
            tokens = _block(blocks[-1], tokens, count=config.num_final_tokens)
            tokens = _norm(model.get_layer("encoder_norm"), tokens)  # acts on each token separately
            return _heads(model, [tokens[:, index] for index in range(config.num_final_tokens)])

    else:
        last = keras.Model(blocks[-1].output, {name: model._intermediates[name] for name in names}, name=model.name)

        def head(tokens: Any) -> Outputs:
            return _as_outputs(last(_block(blocks[-1], tokens), training=False))

    def run(images: Any) -> Outputs:
        return head(functools.reduce(lambda x, block: _block(block, x), blocks[:-1], front(images, training=False)))

    return run


def _as_outputs(outputs: Outputs) -> Outputs:
    return {"features": keras.ops.cast(outputs.pop("pre_logits"), "float32"), **outputs}


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


def _join_gelu(_: Any, *, after: Callable[..., Any], shape: tuple[int, ...], **settings: Any) -> Callable[..., Any]:
    """Return a function of a product (rows, columns) and its bias, if any, that applies `after` to their sum.

    Only a GELU follows its product directly. Any other bias is added after a reshape, which the optimizer does not
    join: with weights in variables, a joint product takes 1.5 times as long in bfloat16.
    """
    tokens = shape[:1] if len(shape) > 1 else ()

    def apply(product: Any, *bias: Any) -> Any:
        is_gelu = after in GELUS
        x = product if is_gelu else tf.reshape(product, (-1, *tokens, product.shape[-1]))
        x = tf.nn.bias_add(x, *bias) if bias else x
        return tf.reshape(GELUS[after](x), (-1, *shape)) if is_gelu else after(tf.reshape(x, (-1, *shape)), **settings)

    return apply


def _block(block: vit.EncoderBlock, x: Any, *, count: int | None = None) -> Any:
    """Return the block's output for the first `count` tokens, which attend to all tokens; None for all tokens."""
    normed, kept = _norm(block.norm1, x), x[:, :count]
    update = block.attention(normed[:, :count], normed) if count else block._mix(normed, None, False)
    kept = kept + (update if block.scale1 is None else block.scale1(update))
    update = block.mlp(_norm(block.norm2, kept))
    return kept + (update if block.scale2 is None else block.scale2(update))


def _norm(layer: keras.layers.LayerNormalization, x: Any) -> Any:
    """Apply a LayerNorm as a batch norm with the rows as channels.

    On CPUs, TensorFlow's optimizer turns it into one operator, which computes in float32.
    """
    if x.dtype not in NORM_DTYPES:
        return layer(x)
    rows = tf.size(x) // x.shape[-1]
    y = tf.raw_ops.FusedBatchNormV3(
        x=tf.reshape(x, [1, rows, x.shape[-1], 1]),
        scale=tf.fill([rows], 1.0),
        offset=tf.fill([rows], 0.0),
        mean=tf.constant([], tf.float32),
        variance=tf.constant([], tf.float32),
        epsilon=layer.epsilon,
        data_format="NCHW",
    ).y
    gamma, beta = (tf.cast(keras.ops.convert_to_tensor(weight), x.dtype) for weight in (layer.gamma, layer.beta))
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
