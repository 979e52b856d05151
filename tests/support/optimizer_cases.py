"""One small training problem for the tests of optimizers: gradients given in advance, so that only the rule counts."""

import numpy as np

from keras_vit.train._recipe import Recipe

STEPS, WARMUP = 60, 7
SHAPES = {
    "embedding/kernel": (3, 4),
    "block_0/norm1/gamma": (4,),
    "block_1/mlp/dense1/kernel": (4, 5),
    "head/kernel": (5, 2),
    "head/bias": (2,),
}
NAMES = list(SHAPES)
NUM_LAYERS = 2

# name: fields of the recipe
CASES = {
    "sgd, cosine": {},
    "sgd, linear, bfloat16 momentum": {"schedule": "linear", "momentum_dtype": "bfloat16"},
    "sgd, decay, layer-wise": {"schedule": "constant", "weight_decay": 0.05, "layer_decay": 0.75},
    "adamw, linear": {"optimizer": "adamw", "learning_rate": 3e-3, "schedule": "linear", "weight_decay": 0.1},
    "adamw, bfloat16 moment, layer-wise": {"optimizer": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1}
    | {"momentum_dtype": "bfloat16", "layer_decay": 0.65},
    "adamw, independent decay": {"optimizer": "adamw", "learning_rate": 1e-2, "weight_decay": 1e-3}
    | {"weight_decay_independent": True, "layer_decay": 0.65},
}
# These are also compiled, which takes seconds each: both rules, both dtypes, with and without decay.
CHOSEN = ["sgd, linear, bfloat16 momentum", "adamw, linear", "adamw, bfloat16 moment, layer-wise"]


def make_recipe(**changes) -> Recipe:
    fields = {"name": "test", "steps": STEPS, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.03}
    return Recipe(**{**fields, **changes})


def start() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.standard_normal(shape).astype("float32") for shape in SHAPES.values()]


def gradients(scale: float = 1.0) -> list[list[np.ndarray]]:
    """Return for each step a list with one gradient for each variable."""
    random = np.random.default_rng(2)
    return [
        [np.float32(scale) * random.standard_normal(shape).astype("float32") for shape in SHAPES.values()]
        for _ in range(STEPS)
    ]


def trained(optimizer, variables, given, step_fn=None):
    """Return the variables' values after one update for each list of gradients."""
    import tensorflow as tf

    apply = step_fn or optimizer.apply
    for number, each in enumerate(given):
        apply([tf.constant(gradient) for gradient in each], tf.constant(number, tf.int64))
    return [variable.numpy() for variable in variables]
