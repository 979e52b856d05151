"""Layers come back from their configs, compute in their dtypes, can be trained and start as in the papers' code.

Their outputs are those of the official code in test_formats.py, and of NumPy in test_position_variants.py.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import scipy.special
import tensorflow as tf

from keras_vit import position
from keras_vit.model import layers as vit
from keras_vit.model.config import ACTIVATIONS, BlockConfig, ViTConfig
from keras_vit.model.layers.base import activation_function
from keras_vit.model.vision_transformer import VisionTransformer
from marks import full_except

# float32 holds 6e-8 of a value; sums of some hundred products of size 1 stay far below this.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
RESNET = {"norm_epsilon": 1e-6, "conv_epsilon": 1e-5, "conv_epsilon_place": "std"}

TOKENS, MAP = (2, 9, 32), (2, 9, 7, 64)
# name: the layer's class, its arguments, the shape of an input
LAYERS: dict[str, tuple[type[keras.layers.Layer], dict[str, Any], tuple[int, ...]]] = {
    "attention": (vit.MultiHeadAttention, {"num_heads": 4}, TOKENS),
    "attention, no bias": (vit.MultiHeadAttention, {"num_heads": 2, "use_bias": False, "dropout_rate": 0.1}, TOKENS),
    "mlp": (vit.MLP, {"mlp_dim": 48, "activation": "gelu_erf", "dropout_rate": 0.1}, TOKENS),
    "layer norm": (vit.LayerNormalization, {"epsilon": 1e-3, "is_fused": True}, TOKENS),
    "layer scale": (vit.LayerScale, {"initial": 0.3}, TOKENS),
    "dropout": (vit.Dropout, {"rate": 0.2}, TOKENS),
    "stochastic depth": (vit.StochasticDepth, {"rate": 0.2}, TOKENS),
    "block": (vit.EncoderBlock, {"num_heads": 4, "mlp_dim": 48}, TOKENS),
    "block with all": (
        vit.EncoderBlock,
        {
            "num_heads": 2,
            "mlp_dim": 40,
            "activation": "silu",
            "norm_epsilon": 1e-3,
            "qkv_bias": False,
            "layer_scale": 0.5,
            "dropout_rate": 0.1,
            "attention_dropout_rate": 0.1,
            "stochastic_depth": 0.2,
        },
        TOKENS,
    ),
    "patches": (vit.PatchEmbedding, {"hidden_size": 16, "patch_size": (4, 3)}, (2, 9, 10, 3)),
    "patches, no bias": (
        vit.PatchEmbedding,
        {"hidden_size": 16, "patch_size": (4, 4), "use_bias": False},
        (2, 8, 8, 3),
    ),
    "token pooling": (vit.TokenPooling, {"token": 1}, TOKENS),
    "class token pooling": (vit.TokenPooling, {"token": 0, "num_tokens": 2}, TOKENS),
    "mean pooling": (vit.TokenPooling, {"prefix_tokens": 2}, TOKENS),
    "attention pooling": (vit.AttentionPooling, {"num_heads": 4, "mlp_dim": 48, "norm_epsilon": 1e-3}, TOKENS),
    "length 1": (vit.L2Normalization, {}, TOKENS),
    "position": (vit.PositionEmbedding, {"grid": (2, 4), "prefix_tokens": 1, "method": "bicubic"}, TOKENS),
    "sincos": (vit.PositionEmbedding, {"grid": (3, 3), "kind": "sincos2d"}, TOKENS),
    "prefix": (vit.PrefixTokens, {"class_token": True, "distilled": True, "num_registers": 3}, TOKENS),
    "class tokens": (vit.PrefixTokens, {"num_class_tokens": 3, "num_registers": 2}, TOKENS),
    "registers alone": (vit.PrefixTokens, {"class_token": False, "num_registers": 2}, TOKENS),
    "standardized conv": (vit.StandardizedConv2D, {"filters": 8, "kernel_size": 3, "strides": 2}, MAP),
    "standardized conv, timm": (
        vit.StandardizedConv2D,
        {"filters": 8, "kernel_size": 1, "epsilon": 1e-3, "epsilon_place": "variance"},
        MAP,
    ),
    "group norm": (vit.GroupNormalization, {"epsilon": 1e-3, "gamma_initializer": "zeros"}, MAP),
    "root": (vit.ResNetRoot, {"width": 32, **RESNET}, (2, 17, 14, 3)),
    "unit": (vit.ResNetUnit, {"width": 32, "strides": 2, **RESNET}, MAP),
    "identity unit": (vit.ResNetUnit, {"width": 32, **RESNET}, (2, 5, 4, 128)),
}


def drawn(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def filled(layer: keras.layers.Layer, shape: tuple[int, ...], seed: int = 5) -> keras.layers.Layer:
    """Return the layer, built, with random weights."""
    layer.build(shape)
    for number, weight in enumerate(layer.weights):
        weight.assign(drawn(tuple(weight.shape), seed + number) * 0.3)
    return layer


def test_every_public_layer_is_tried() -> None:
    public = {getattr(vit, name) for name in vit.__all__ if isinstance(getattr(vit, name), type)}
    assert public == {cls for cls, _, _ in LAYERS.values()}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_comes_back_from_its_config_knows_its_output_shape_and_can_be_trained(name: str) -> None:
    cls, arguments, shape = LAYERS[name]
    layer = filled(cls.from_config({**arguments, "name": "some_name", "dtype": "float32"}), shape)
    config = layer.get_config()
    assert arguments.items() <= config.items()
    other = cls.from_config(config)
    other.build(shape)
    other.set_weights(layer.get_weights())
    assert other.get_config() == config
    output = layer(drawn(shape))
    np.testing.assert_array_equal(other(drawn(shape)), output)
    assert type(keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))) is cls

    assert tuple(layer.compute_output_shape(shape)) == tuple(output.shape)
    assert tuple(layer.compute_output_shape((None, *shape[1:]))) == (None, *output.shape[1:])
    assert layer(keras.Input(shape[1:])).shape == (None, *output.shape[1:])

    x = tf.constant(drawn(shape))
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(layer(x, training=False) ** 2 * drawn(tuple(output.shape), 7))
    values = {"input": x} | {weight.path: weight.value for weight in layer.trainable_weights}
    gradients = dict(zip(values, tape.gradient(loss, list(values.values())), strict=True))
    assert [path for path, gradient in gradients.items() if gradient is None or not np.isfinite(gradient).all()] == []
    # The bias of the keys adds the same number to a whole row of scores, which softmax cancels.
    zero = [path for path, gradient in gradients.items() if not np.abs(gradient).max() > 0]
    assert [path for path in zero if not path.endswith("key/bias")] == []


# bfloat16 has 8 bits, an error of 2^-9 each time; a block rounds some ten times, a pure bfloat16 GroupNorm more.
LARGEST_ERROR = {"float64": 1e-15, "mixed_float16": 0.01, "mixed_bfloat16": 0.05, "bfloat16": 0.05}


@pytest.mark.parametrize("name", full_except([*LAYERS][::2], LAYERS))
def test_a_layer_computes_in_its_policys_dtype(name: str) -> None:
    cls, arguments, shape = LAYERS[name]
    exact = filled(cls.from_config({**arguments, "dtype": "float64"}), shape)
    want = np.array(exact(drawn(shape).astype(np.float64)))
    for policy, largest in LARGEST_ERROR.items():
        layer = cls.from_config({**arguments, "dtype": policy})
        layer.build(shape)
        layer.set_weights(exact.get_weights())
        # Keras' LayerNormalization does not cast its input to float64.
        output = layer(drawn(shape).astype(np.float64 if policy == "float64" else np.float32))
        assert keras.backend.standardize_dtype(output.dtype) == layer.compute_dtype, policy
        assert {weight.dtype for weight in layer.weights} <= {layer.variable_dtype}, policy
        difference = keras.ops.convert_to_numpy(keras.ops.cast(output, "float64")) - want
        assert np.abs(difference).max() < largest * np.abs(want).max(), policy


EXACT = {
    "gelu_erf": lambda x: x * scipy.special.ndtr(x),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_quick": lambda x: x * scipy.special.expit(1.702 * x),
    "silu": lambda x: x * scipy.special.expit(x),
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "hard_swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "sigmoid": scipy.special.expit,
    "tanh": np.tanh,
    "linear": lambda x: x,
}


def test_activations_are_their_formulas() -> None:
    x = np.linspace(-12, 12, 2401)
    for name in ACTIVATIONS:
        function = activation_function(name)
        np.testing.assert_allclose(function(tf.constant(x)), EXACT[name](x), rtol=1e-12, atol=1e-14, err_msg=name)
        single = np.array(function(tf.constant(x, tf.float32)))
        np.testing.assert_allclose(single, EXACT[name](x), rtol=2e-6, atol=2e-6, err_msg=name)


def test_stochastic_depth_drops_whole_images_at_its_rate_and_keeps_the_mean() -> None:
    for shape in ((4000, 3, 3), (4000, 3, 3, 3)):
        layer = vit.StochasticDepth(0.3)
        output = np.array(layer(np.ones(shape, np.float32), training=True)).reshape(4000, -1)
        assert (output == output[:, :1]).all()
        np.testing.assert_allclose(np.unique(output), [0, 1 / 0.7], rtol=1e-6)
        # The share of 4000 draws has a standard deviation of sqrt(.3 * .7 / 4000) = .0072; the limit is five of them.
        assert abs((output[:, 0] == 0).mean() - 0.3) < 0.036
    x = drawn(TOKENS)
    for rate, training in ((0.9, False), (0.9, None), (0.0, True)):
        np.testing.assert_array_equal(vit.StochasticDepth(rate)(x, training=training), x)


def test_dropout_acts_while_training_only() -> None:
    block, x = {"num_heads": 4, "mlp_dim": 48}, drawn(TOKENS)
    for layer in (
        filled(vit.MultiHeadAttention(4, dropout_rate=0.5), TOKENS),
        filled(vit.EncoderBlock(BlockConfig(**block, dropout_rate=0.3)), TOKENS),
        filled(vit.EncoderBlock(BlockConfig(**block), stochastic_depth=0.5), TOKENS),
    ):
        quiet = np.array(layer(x))
        np.testing.assert_array_equal(layer(x, training=False), quiet)
        outputs = [np.array(layer(x, training=True)) for _ in range(8)]
        assert len({output.tobytes() for output in outputs}) > 1


def test_group_norm_keeps_its_precision_far_from_zero() -> None:
    x = drawn((2, 8, 8, 32)) + 3000
    layer = vit.GroupNormalization(dtype="float32")
    exact = vit.GroupNormalization(dtype="float64")(x.astype(np.float64)).numpy()
    # The input itself has a precision of 3000 * 6e-8 = 2e-4; E[x^2] - E[x]^2 would have an error of 0.5.
    assert np.abs(np.array(layer(x)) - exact).max() < 2e-3


def test_group_norm_takes_its_statistics_in_float32_under_half_precision() -> None:
    x = (drawn((2, 8, 8, 32)) * 300).astype(np.float16)  # squares overflow float16
    output = np.array(vit.GroupNormalization(dtype="mixed_float16")(x))
    assert np.abs(output.astype(np.float32).std() - 1) < 0.01


def test_a_sincos_embedding_is_fixed_and_leaves_the_prefix_alone() -> None:
    layer = vit.PositionEmbedding((2, 4), prefix_tokens=1, kind="sincos2d")
    x = drawn(TOKENS)
    added = np.array(layer(x)) - x
    assert layer.weights == []
    assert (added[:, 0] == 0).all()
    np.testing.assert_allclose(added[0, 1:], position.sincos2d((2, 4), 32)[0], **CLOSE)


# The initialisers of vit_jax/models_vit.py and models_resnet.py, by the end of a weight's path:
# the expected deviation, and the largest possible value (None: no bound).
WIDTH, MLP, HEADS = 192, 768, 3
INITIAL = {
    # flax's lecun_normal is cut at two deviations of a normal that is 1 / .8796 wider
    "embedding/kernel": ((16 * 64) ** -0.5, 2.274 * (16 * 64) ** -0.5),
    "root/conv/kernel": (147**-0.5, 2.274 * 147**-0.5),
    "stage_1_unit_1/conv3/kernel": (64**-0.5, 2.274 * 64**-0.5),
    "pre_logits/kernel": (WIDTH**-0.5, 2.274 * WIDTH**-0.5),
    # xavier_uniform of a and b: deviation sqrt(2 / (a + b)), bound sqrt(6 / (a + b))
    **{
        f"block_0/attention/{name}/kernel": ((1 / WIDTH) ** 0.5, (3 / WIDTH) ** 0.5)
        for name in ("query", "key", "value", "out")
    },
    "block_0/mlp/dense1/kernel": ((2 / (WIDTH + MLP)) ** 0.5, (6 / (WIDTH + MLP)) ** 0.5),
    "block_0/mlp/dense2/kernel": ((2 / (WIDTH + MLP)) ** 0.5, (6 / (WIDTH + MLP)) ** 0.5),
    "block_0/mlp/dense1/bias": (1e-6, None),
    "position/embedding": (0.02, None),
    "prefix/cls": (0, 0),
    "head/kernel": (0, 0),
    "embedding/bias": (0, 0),
    "block_0/attention/query/bias": (0, 0),
    "stage_1_unit_1/gn3/gamma": (0, 0),
}


def test_weights_start_as_in_the_papers_code() -> None:
    keras.utils.set_random_seed(0)
    config = ViTConfig.from_name(
        "Ti/16",
        resnet={"num_layers": (1,)},
        **{"patch_size": 2, "image_size": 64, "num_layers": 1, "representation_size": WIDTH, "head_bias_init": -10},
    )
    fresh = {weight.path: np.array(weight) for weight in VisionTransformer(config).weights}
    assert fresh["embedding/kernel"].shape == (2, 2, 256, WIDTH)  # a patch of 2x2 cells of the stem's 256 channels
    wrong = {}
    for path, (deviation, bound) in INITIAL.items():
        values = fresh[path]
        largest = np.abs(values).max()
        # 768 values or more: their deviation has an error of 1 / sqrt(2 * 768) = 2.6 %; four times that.
        is_spread = values.std() == pytest.approx(deviation, rel=0.1)
        is_centred = abs(values.mean()) <= 5 * deviation / values.size**0.5
        is_bounded = bound is None or bound * 0.9 <= largest <= bound * 1.0001
        if not (is_spread and is_centred and is_bounded):
            wrong[path] = (values.std(), values.mean(), largest)
    assert wrong == {}
    assert (fresh["head/bias"] == -10).all()
    for path in ("encoder_norm/gamma", "block_0/norm1/gamma", "root/gn/gamma", "stage_1_unit_1/gn1/gamma"):
        assert (fresh[path] == 1).all()


def test_a_probe_and_registers_start_small_and_apart() -> None:
    pool: Any = vit.AttentionPooling(4, 48)
    pool.build((None, 9, 512))
    assert np.abs(pool.probe).max() <= (6 / 513) ** 0.5
    assert np.std(pool.probe) == pytest.approx((2 / 513) ** 0.5, rel=0.15)
    prefix = vit.PrefixTokens(class_token=False, num_registers=4)
    prefix.build((None, 9, 512))
    assert 0 < np.abs(prefix.get_weights()[0]).max() < 1e-5


def test_uninitialized_gives_zeros_and_only_inside() -> None:
    def kernels(**kwargs: Any) -> list[np.ndarray]:
        config = ViTConfig.from_name("Ti/16", image_size=32, num_layers=1, hidden_size=48, num_heads=2, **kwargs)
        weights = VisionTransformer(config).weights
        return [np.array(weight) for weight in weights if weight.path.endswith(("kernel", "embedding", "probe"))]

    with pytest.raises(RuntimeError, match="inside"), vit.uninitialized():
        drawn_inside = kernels(resnet={"num_layers": (1,)}, patch_size=1, classifier="map", representation_size=8)
        raise RuntimeError("inside")
    assert all((kernel == 0).all() for kernel in drawn_inside)
    outside = kernels(classifier="map")
    assert sum((kernel == 0).all() for kernel in outside) == 1  # the head's


def test_causal_attention_refuses_relative_positions() -> None:
    layer = vit.MultiHeadAttention(2, causal=True)
    tokens = np.zeros((1, 4, 8), np.float32)
    assert layer(tokens).shape == (1, 4, 8)
    with pytest.raises(ValueError, match="Causal attention takes no relative positions"):
        layer(tokens, relative=np.zeros((1, 2, 4, 4), np.float32))
