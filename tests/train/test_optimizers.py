"""The update rules agree with their formulas in float64 NumPy, and so does the step around them."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from ml_dtypes import bfloat16

from keras_vit.train._recipe import FIELD_RULES, SLOTS
from keras_vit.train.optimizer import Optimizer, clip, schedule
from keras_vit.train.step import _apply, accumulate, replica_seed
from marks import full_except
from optimizer_cases import CASES, CHOSEN, NAMES, NUM_LAYERS, STEPS, WARMUP, gradients, make_recipe, start, trained

# Values stay below 8, and each of 60 updates rounds to float32, 2**-24 of a value: at worst 60 * 8 / 2**24 = 3e-5, if
# all roundings had one sign. They have both signs, so their sum is about sqrt(60) of one.
FLOAT32 = {"rtol": 0, "atol": 4e-6}
# For small t, 1 - beta2 ** t in float32 has a relative error of 1e-5, and its root half of that. The first updates
# together change a variable by 0.1.
ADAM = {"rtol": 0, "atol": 6e-6}
BFLOAT16_CASES = [name for name in CASES if "bfloat16" in name]
# A bfloat16 momentum of up to 8 that is rounded the other way differs by 2**-6; rates are at most 0.03.
BFLOAT16 = {"rtol": 0, "atol": 3e-3}
# XLA keeps the product of a momentum and a number in float32 where TensorFlow, and JAX by itself, round it to bfloat16:
# by 2**-9 of up to 4, at each of 60 steps, remembered for 10, times a rate of 0.03: sqrt(60) * 10 * 0.03 * 0.008. JAX's
# XLA does the same, and test_optimizers_optax.py finds no difference to that.
XLA_BFLOAT16 = {"rtol": 0, "atol": 2e-2}

# Powers of the layer-wise decay: BEiT's numbers for two blocks.
DEPTHS = {"embedding/kernel": 3, "block_0/norm1/gamma": 2, "block_1/mlp/dense1/kernel": 1}


def make(recipe, variables):
    return Optimizer(recipe, variables, NAMES, total_steps=STEPS, warmup=WARMUP, num_layers=NUM_LAYERS)


def shares(recipe) -> np.ndarray:
    """Compute the schedule by its formula, in float64."""
    step = np.arange(STEPS)
    progress = np.clip((step - WARMUP) / (STEPS - WARMUP), 0, 1)
    end = recipe.linear_end / recipe.learning_rate
    course = {"cosine": (1 + np.cos(np.pi * progress)) / 2, "linear": end + (1 - end) * (1 - progress), "constant": 1}
    return course[recipe.schedule] * np.minimum(1, step / WARMUP)


def expected(recipe, values, given):
    """Compute the rules of the papers and of optax in float64; bfloat16 slots are rounded to bfloat16."""
    values = [value.astype("float64") for value in values]
    rounded = (lambda a: a.astype(bfloat16).astype("float64")) if recipe.momentum_dtype == "bfloat16" else (lambda a: a)
    beta1, beta2 = recipe.beta1, recipe.beta2
    momenta, seconds = ([np.zeros(value.shape) for value in values] for _ in range(2))
    for step, (share, each) in enumerate(zip(shares(recipe), given, strict=True)):
        for i, gradient in enumerate(each):
            kept = recipe.momentum if recipe.optimizer == "sgd" else beta1
            decayed = rounded(rounded(np.float64(kept)) * momenta[i])
            if recipe.optimizer == "sgd":
                momentum = direction = gradient + decayed
            else:
                momentum = (1 - beta1) * gradient + decayed
                seconds[i] = beta2 * seconds[i] + (1 - beta2) * gradient.astype("float64") ** 2
                root = np.sqrt(seconds[i] / (1 - beta2 ** (step + 1)))
                direction = momentum / (1 - beta1 ** (step + 1)) / (root + recipe.epsilon)
            momenta[i] = rounded(momentum)
            rate = share * recipe.learning_rate * recipe.layer_decay ** DEPTHS.get(NAMES[i], 0)
            decay = recipe.weight_decay * (share if recipe.weight_decay_independent else rate)
            values[i] = values[i] - rate * direction - decay * values[i] * NAMES[i].endswith("kernel")
    return values


def test_every_optimizer_has_slots_and_a_rule():
    assert {*SLOTS, "least_squares"} == {*FIELD_RULES["optimizer"].choices}
    for name in SLOTS:
        variables = [tf.Variable(value) for value in start()]
        trained(make(make_recipe(optimizer=name), variables), variables, gradients()[:1])


def test_the_schedule_is_its_formula():
    for name in ("cosine", "linear", "constant"):
        recipe = make_recipe(schedule=name)
        share = schedule(recipe, STEPS, WARMUP)
        found = [share(tf.constant(step, tf.int64)) for step in range(STEPS)]
        assert all(value.dtype == tf.float32 and value.shape == () for value in found)
        np.testing.assert_allclose(found, shares(recipe), rtol=0, atol=3e-7)  # a few roundings of numbers up to 1
        end = {"cosine": 0.0, "linear": 1e-5 / 0.03, "constant": 1.0}[name]
        assert share(0) == 0 and share(WARMUP) == 1
        np.testing.assert_allclose([share(STEPS), share(STEPS + 5)], end, atol=1e-7)
        assert schedule(recipe, STEPS, 0)(0) == 1
    share = schedule(make_recipe(schedule="linear"), 2**25 + 4, 2**25)  # beyond what float32 counts to
    assert len({float(share(2**25 + step)) for step in range(5)}) == 5


@pytest.mark.parametrize("name", CASES)
def test_the_rule_is_its_formula(name):
    recipe, given = make_recipe(**CASES[name]), gradients()
    variables = [tf.Variable(value) for value in start()]
    found = trained(make(recipe, variables), variables, given)
    # Products that lie in the middle between two bfloat16 numbers may go either way.
    tolerance = BFLOAT16 if name in BFLOAT16_CASES else ADAM if recipe.optimizer == "adamw" else FLOAT32
    for value, formula in zip(found, expected(recipe, start(), given), strict=True):
        np.testing.assert_allclose(value, formula, **tolerance)


def test_adam_of_tiny_gradients_has_the_textbook_epsilon():
    # If the gradient is as small as epsilon, the first step is half of a full one; Keras' is a fortieth.
    recipe = make_recipe(optimizer="adamw", schedule="constant", learning_rate=1.0)
    variable = tf.Variable([0.0])
    optimizer = Optimizer(recipe, [variable], ["head/kernel"], total_steps=9, warmup=0, num_layers=1)
    optimizer.apply([tf.constant([1e-8])], tf.constant(0, tf.int64))
    np.testing.assert_allclose(variable, [-0.5], rtol=1e-4)


def test_only_kernels_decay():
    recipe = make_recipe(schedule="constant", weight_decay=0.1)
    names = ["head/kernel", "head/bias", "position/embedding", "block_0/norm1/gamma", "prefix/cls", "kernel/bias"]
    variables = [tf.Variable([1.0]) for _ in names]
    optimizer = Optimizer(recipe, variables, names, total_steps=9, warmup=0, num_layers=1)
    optimizer.apply([tf.zeros(1) for _ in names], tf.constant(0, tf.int64))
    assert [name for name, variable in zip(names, variables, strict=True) if variable.numpy() != 1] == ["head/kernel"]


TIMES = {
    **dict.fromkeys(("embedding/kernel", "prefix/cls", "prefix/registers", "position/embedding"), 13),
    **dict.fromkeys(("pre_norm/gamma", "root/conv/kernel", "root/gn/beta", "stage_3_unit_12/gn1/gamma"), 13),
    **{"block_0/norm1/gamma": 12, "block_1/attention/query/kernel": 11, "block_11/mlp/dense2/bias": 1},
    **{"masked_patch/mask_embedding": 13, "position_0/embedding": 12, "position_11/relative_embedding": 1},
    **{"relative_bias_0/table": 12, "relative_bias_11/dense1/kernel": 1, "relative_bias/table": 0},
    **dict.fromkeys(("encoder_norm/gamma", "pool/probe", "pre_logits/kernel", "head/kernel"), 0),
    **dict.fromkeys(("head_distillation/bias", "position/relative_embedding", "colours/kernel"), 0),
}


def test_layer_wise_rates_are_beits():
    recipe = make_recipe(schedule="constant", layer_decay=0.75)
    variables = [tf.Variable([0.0]) for _ in TIMES]
    optimizer = Optimizer(recipe, variables, list(TIMES), total_steps=9, warmup=0, num_layers=12)
    optimizer.apply([tf.constant([-1.0]) for _ in TIMES], tf.constant(0, tf.int64))
    found = dict(zip(TIMES, (float(variable[0]) for variable in variables), strict=True))
    assert found == pytest.approx({name: 0.03 * 0.75**times for name, times in TIMES.items()}, rel=1e-6)


def test_the_gradient_of_a_lookup_is_taken():
    variable = tf.Variable([[1.0], [2.0], [3.0]])
    optimizer = Optimizer(make_recipe(), [variable], ["position/embedding"], total_steps=9, warmup=0, num_layers=1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(variable, [1, 1]))
    found, norm = clip([tape.gradient(loss, variable)], None)
    optimizer.apply(found, tf.constant(0, tf.int64))
    assert norm == 2.0
    np.testing.assert_allclose(variable[:, 0], [1.0, 2.0 - 0.03 * 2, 3.0], rtol=1e-6)


def test_clipping_keeps_the_direction_and_tells_the_norm():
    given = [tf.constant([3.0, 0.0]), tf.constant([[4.0]])]
    for limit, norm_after in ((None, 5.0), (10.0, 5.0), (5.0, 5.0), (1.0, 1.0)):
        clipped, norm = clip(given, limit)
        assert norm == 5.0
        for before, after in zip(given, clipped, strict=True):
            np.testing.assert_allclose(after, before * norm_after / 5, rtol=1e-6)
    clipped, norm = clip([tf.zeros(3)], 1.0)
    assert norm == 0 and not np.any(clipped[0])
    assert np.isnan(clip([tf.constant([float("nan"), 1.0])], 1.0)[1])


@pytest.mark.parametrize("name", full_except(CHOSEN[-1:], CHOSEN))
def test_variables_of_keras_and_a_compiled_function_give_the_same(name):
    recipe, given = make_recipe(**CASES[name]), gradients()
    eager = [tf.Variable(value) for value in start()]
    values = trained(make(recipe, eager), eager, given)
    for jit_compile in (False, True):
        variables = [keras.Variable(value).value for value in start()]
        optimizer = make(recipe, variables)
        step = tf.function(optimizer.apply, jit_compile=jit_compile)
        tolerance = FLOAT32
        if jit_compile:  # XLA fuses operations: one rounding where there were two
            tolerance = XLA_BFLOAT16 if name in BFLOAT16_CASES else ADAM
        for value, found in zip(values, trained(optimizer, variables, given, step), strict=True):
            np.testing.assert_allclose(found, value, **tolerance)


# ---- the step around the rule


def sums(batch, seed):
    """Return gradients that show their images and seeds."""
    return [tf.reduce_sum(batch["image"], axis=0)], tf.cast(seed, tf.float32)


def test_micro_batches_add_up_to_the_batch_and_draw_their_own_numbers():
    images = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    seed = tf.constant([5, 7])
    zeros = [tf.zeros(3)], tf.zeros(2)
    for count in (1, 2, 4):
        (gradient,), seeds = accumulate(sums, {"image": tf.constant(images)}, seed, count=count, zeros=zeros)
        np.testing.assert_allclose(gradient, images.sum(axis=0), rtol=1e-5)
        folded = [tf.random.experimental.stateless_fold_in(seed, k) for k in range(count)] if count > 1 else [seed]
        np.testing.assert_allclose(seeds, np.sum([np.float32(each) for each in folded], axis=0))


def test_every_step_and_replica_has_its_own_seed():
    seeds = {
        tuple(replica_seed(make_recipe(seed=seed), tf.constant(step, tf.int64), replica).numpy())
        for seed in (3, 4)
        for step in range(3)
        for replica in range(2)
    }
    assert len(seeds) == 12


def test_gradients_are_clipped_applied_and_averaged():
    for decay in (None, 0.75):
        recipe = make_recipe(learning_rate=0.5, schedule="constant", clip_norm=1.0, ema_decay=decay)
        weight, average = tf.Variable([2.0, 2.0]), tf.Variable([2.0, 2.0])
        optimizer = Optimizer(recipe, [weight], ["head/bias"], total_steps=9, warmup=0, num_layers=1)
        averages = {"head/bias": average} if decay else {}
        state = SimpleNamespace(recipe=recipe, trained=[weight], averages=averages, optimizer=optimizer)
        norm = _apply(state, [tf.constant([3.0, 4.0])], tf.constant(0, tf.int64))
        assert norm == 5.0
        np.testing.assert_allclose(weight, [2 - 0.5 * 0.6, 2 - 0.5 * 0.8], rtol=1e-6)
        np.testing.assert_allclose(average, [2 - 0.25 * 0.3, 2 - 0.25 * 0.4] if decay else [2, 2], rtol=1e-6)
