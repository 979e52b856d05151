"""The operations that are compiled between matrix products give the outputs and gradients of the layers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import VisionTransformer
from keras_vit.model.layers import runtime
from keras_vit.model.layers.runtime import fuse_with, product_then, random_scope
from keras_vit.train import step
from marks import full_except
from tiny_models import FAMILIES, VARIANTS, built, prepared, randomised, tiny

SEED = tf.constant([3, 4])
# In exact arithmetic these gradients are zero: what the keys' biases add to the scores of a query is the same for all
# tokens, and the softmax removes it. They hold nothing but rounding errors of the gradients around them.
ZERO = "attention/key/bias"


def gradients(model: VisionTransformer, compiler: Any, *, remat: bool = False) -> dict[str, np.ndarray]:
    """Return the output and, by path, the gradients of a loss in which every number of the output counts."""
    images = prepared(model.config, batch=3)
    factors = np.random.default_rng(2).normal(size=(3, *model.output_shape[1:]))

    @tf.function
    def compute() -> Any:
        with fuse_with(compiler), random_scope(SEED, remat=remat), tf.GradientTape() as tape:
            output = model(images, training=True)
            loss = tf.reduce_sum(output * tf.cast(factors, output.dtype))
            return [output, *tape.gradient(loss, [v.value for v in model.trainable_variables])]

    names = ["output", *(v.path for v in model.trainable_variables)]
    return {name: np.array(tensor, np.float64) for name, tensor in zip(names, compute(), strict=True)}


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    """Compare every tensor on its own scale, gradients that are zero in exact arithmetic on that of all gradients."""
    whole = max(np.abs(tensor).max() for name, tensor in wanted.items() if name != "output")
    for name, tensor in wanted.items():
        # 2e-8 of the largest gradient in float32 on an Intel CPU with AMX: a tenth of what is allowed.
        scale = whole / 100 if name.endswith(ZERO) else np.abs(tensor).max()
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=tolerance * scale, err_msg=name)


BIASES = ("relative biases", "relative biases of one MLP")


@pytest.mark.parametrize("variant", full_except(["pure"], ["pure", "map", "no biases", "relative positions", *BIASES]))
def test_in_float64_the_model_has_the_gradients_that_its_layers_have(variant: str) -> None:
    model = built("float64", num_layers=1, **(VARIANTS | FAMILIES)[variant])
    # Measured 1.4e-13 in two blocks: 1e-16 for a rounding, and some thousand terms in a gradient of such large weights.
    assert_close(gradients(model, step.piece_compiler()), gradients(model, None), 1e-12)


@pytest.mark.full
@pytest.mark.parametrize("activation", ["gelu_erf", "gelu_quick", "silu"])
def test_other_activations(activation: str) -> None:
    model = built(activation=activation, num_layers=1)
    assert_close(gradients(model, step.piece_compiler()), gradients(model, None), 2e-5)  # float32: 1e-5 here


@pytest.mark.full
def test_blocks_that_are_computed_again_have_the_same_gradients_and_masks() -> None:
    config = tiny(dropout_rate=0.2, attention_dropout_rate=0.2, stochastic_depth=0.5, relative_bias="shared")
    model = randomised(VisionTransformer(config))
    plain = gradients(model, None)
    for remat in (False, True):
        assert_close(gradients(model, step.piece_compiler(), remat=remat), plain, 2e-5)


@pytest.mark.full
def test_in_bfloat16_it_is_as_near_to_float32_as_the_layers_are() -> None:
    model = built("mixed_bfloat16")
    exact = VisionTransformer(model.config)
    exact.set_weights(model.get_weights())
    wanted = gradients(exact, None)

    def errors(compiler: Any) -> float:
        found = gradients(model, compiler)
        names = [name for name in wanted if not name.endswith(ZERO)]
        return sum(np.linalg.norm(found[name] - wanted[name]) / np.linalg.norm(wanted[name]) for name in names)

    # Kernels of processors round at other places: 0.96 without oneDNN, 1.08 with AVX-512 BF16, 1.05 with AMX.
    assert errors(step.piece_compiler()) < 1.3 * errors(None)


# ---- the layers


def counting(made: list[Any]) -> Callable[..., Callable[..., Any]]:
    """Return a stand-in for the compiler that compiles nothing and records the functions it gets."""

    def compiler(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        made.append((function, *sorted(settings.items(), key=lambda item: item[0])))
        own = {name: value for name, value in settings.items() if name not in ("gradient", "keeps_first")}
        return functools.partial(function, **own)

    return compiler


def test_all_blocks_share_their_programs_and_nothing_is_compiled_without_a_compiler() -> None:
    made: list[Any] = []
    model = built(num_layers=5)
    with fuse_with(counting(made)):
        model(prepared(model.config), training=True)
    # Query, key, value, softmax, the activation between the MLP's two layers, and two norms.
    assert len(made) == 5 * 7
    # Keys and values share a program, as the norms do. The last block has its own for the query and the activation of
    # the class token.
    assert len(set(made)) == 7
    with pytest.raises(RuntimeError, match="inside"), fuse_with(counting(made)):
        raise RuntimeError("inside")
    model(prepared(model.config), training=True)
    assert len(made) == 5 * 7 and runtime.settings().compiler is None


def test_low_rank_updates_and_missing_biases_are_part_of_the_product() -> None:
    cases = {1: ("abc,cde->abde", (None, 4, 6), "de", (2, 3, 8)), 2: ("abcd,cde->abe", (None, 8), "e", (2, 3, 4, 6))}
    for (axes, (equation, shape, bias, inputs)), use_bias in itertools.product(cases.items(), (True, False)):
        layer = keras.layers.EinsumDense(equation, output_shape=shape, bias_axes=bias if use_bias else None)
        x = np.random.default_rng(0).normal(size=inputs).astype(np.float32)
        layer.build(x.shape)
        layer.enable_lora(2)
        for weight in layer.weights:
            weight.assign(np.random.default_rng(1).normal(size=weight.shape))
        with fuse_with(counting([])), random_scope(tf.constant([0, 0])):  # as in training: two narrow products
            found = product_then(layer, layer, x, keras.ops.tanh, axes=axes), product_then(layer, layer, x, axes=axes)
        np.testing.assert_allclose(found[0], np.tanh(layer(x)), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found[1], layer(x), rtol=1e-5, atol=1e-5)


def test_the_inputs_of_norms_can_be_observed() -> None:
    model = built(num_layers=2, mlp_norm=True, pre_norm=True)
    images = prepared(model.config)
    seen: dict[str, Any] = {}
    with runtime.observe_norms(seen.__setitem__):
        tokens = model.features(images, ["tokens", "block_0", "block_1", "logits"])
    norms = [f"block_{i}/{norm}" for i in range(2) for norm in ("norm1", "norm2", "mlp/norm")]
    assert list(seen) == ["pre_norm", *norms, "encoder_norm"]
    for name, features in (("block_0/norm1", "tokens"), ("block_1/norm1", "block_0"), ("encoder_norm", "block_1")):
        np.testing.assert_array_equal(seen[name], tokens[features])
    model(images)
    assert len(seen) == len(norms) + 2


# ---- the training step


def test_what_is_compiled() -> None:
    one = tf.distribute.get_strategy()
    wanted = "step" if tf.config.list_logical_devices("GPU") else "pieces"
    assert [step.jit_scope(setting, one) for setting in (True, False, "auto")] == ["step", "nothing", wanted]
