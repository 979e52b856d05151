"""The update rules agree with optax, which both official codes use, over 60 scheduled steps."""

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.train.optimizer import Optimizer, clip
from optimizer_cases import NAMES, NUM_LAYERS, STEPS, WARMUP, gradients, make_recipe, start

pytestmark = pytest.mark.jax

# Both compute in float32. Values are below 4, where float32 has steps of 2.4e-7, and few of the 60 updates round
# differently.
SAME = {"rtol": 0, "atol": 1e-6}
KERNELS = [name.endswith("kernel") for name in NAMES]


@pytest.fixture(autouse=True)
def packages():
    """Import JAX and optax when a test runs, or skip it: collecting the tests loads neither."""
    global jax, optax
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")


def course(recipe, base):
    """Return the recipe's learning rate as a schedule of optax, with the peak `base`."""
    decay = {
        "cosine": optax.cosine_decay_schedule(base, STEPS - WARMUP),
        "linear": optax.linear_schedule(base, base * recipe.linear_end / recipe.learning_rate, STEPS - WARMUP),
        "constant": optax.constant_schedule(base),
    }[recipe.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, base, WARMUP), decay], [WARMUP])


def sgd(recipe):
    """Return the optimizer of vit_jax/train.py."""
    dtype = None if recipe.momentum_dtype == "float32" else recipe.momentum_dtype
    rate = course(recipe, recipe.learning_rate)
    return optax.sgd(rate, momentum=recipe.momentum, accumulator_dtype=dtype)


def adamw(recipe):
    """Return AdamW with decay of kernels only."""
    rate = course(recipe, recipe.learning_rate)
    moments = {"b1": recipe.beta1, "b2": recipe.beta2, "eps": recipe.epsilon, "mu_dtype": recipe.momentum_dtype}
    return optax.adamw(rate, weight_decay=recipe.weight_decay, mask=KERNELS, **moments)


def big_vision(recipe):
    """Return the chain of big_vision/optax.py: the decay is after the learning rate and before the schedule."""
    return optax.chain(
        optax.scale_by_adam(recipe.beta1, recipe.beta2, recipe.epsilon, mu_dtype=recipe.momentum_dtype),
        optax.scale(recipe.learning_rate),
        optax.add_decayed_weights(recipe.weight_decay, KERNELS),
        optax.scale_by_schedule(course(recipe, 1.0)),
        optax.scale(-1.0),
    )


ADAM = {"optimizer": "adamw", "learning_rate": 1e-2}
BFLOAT16 = {"momentum_dtype": "bfloat16"}
CASES = {
    "sgd, linear": (sgd, {"schedule": "linear"}),
    "sgd, constant": (sgd, {"schedule": "constant"}),
    "fine-tuning: sgd, bfloat16 momentum, clip": (sgd, {**BFLOAT16, "clip_norm": 1.0}),
    "adamw, linear, clip": (adamw, {**ADAM, "weight_decay": 0.03, "schedule": "linear", "clip_norm": 1.0}),
    "adamw, bfloat16 moment": (adamw, {**ADAM, **BFLOAT16, "weight_decay": 0.1}),
    "adamw, other constants": (adamw, {**ADAM, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3}),
    "adamw, gradients as tiny as epsilon": (adamw, {**ADAM, "weight_decay": 0.1}),
    "big_vision": (
        big_vision,
        {**ADAM, **BFLOAT16, "weight_decay": 1e-3, "weight_decay_independent": True, "clip_norm": 1.0},
    ),
}


def optax_values(chain, recipe, given, *, compiled):
    clipped = optax.clip_by_global_norm(recipe.clip_norm) if recipe.clip_norm else optax.identity()
    rule = optax.chain(clipped, chain(recipe))
    update = jax.jit(rule.update) if compiled else rule.update
    values = [jax.numpy.asarray(value) for value in start()]
    state = rule.init(values)
    for each in given:
        updates, state = update([jax.numpy.asarray(gradient) for gradient in each], state, values)
        values = optax.apply_updates(values, updates)
    return values


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "XLA"])
@pytest.mark.parametrize("name", CASES)
def test_sixty_scheduled_steps_are_optaxs(name, compiled):
    # XLA does not round intermediate bfloat16 results, so both sides are compiled.
    chain, changes = CASES[name]
    recipe, given = make_recipe(**changes), gradients(1e-8 if "tiny" in name else 1.0)
    variables = [tf.Variable(value) for value in start()]
    optimizer = Optimizer(recipe, variables, NAMES, total_steps=STEPS, warmup=WARMUP, num_layers=NUM_LAYERS)

    @tf.function(jit_compile=compiled)
    def step(each, number):
        optimizer.apply(clip(each, recipe.clip_norm)[0], number)

    for number, each in enumerate(given):
        step([tf.constant(gradient) for gradient in each], tf.constant(number, tf.int64))
    for found, value in zip(variables, optax_values(chain, recipe, given, compiled=compiled), strict=True):
        np.testing.assert_allclose(found, value, **SAME)
