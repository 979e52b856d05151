"""Learning rate schedules, as `create_learning_rate_schedule` in vit_jax/utils.py and big_vision/utils.py."""

import math
from collections.abc import Callable

import tensorflow as tf

from keras_vit.train._recipe import Recipe


def factor(recipe: Recipe, total_steps: int, warmup: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function of the step (int64 from 0) to the share of the recipe's learning rate: float32, 1 at the peak.

    The rate rises linearly from 0 for `warmup` steps, then follows the recipe's schedule up to `total_steps`.
    """
    if not 0 <= warmup < max(total_steps, 1):
        raise ValueError(f"The warm-up must be shorter than the run. Received: {warmup} of {total_steps} steps")
    end = recipe.linear_end / recipe.learning_rate

    def share(step: tf.Tensor) -> tf.Tensor:
        step = tf.cast(step, tf.int64)
        # The difference is taken of whole numbers: float32 holds them only up to 16.7 million.
        progress = tf.clip_by_value(tf.cast(step - warmup, tf.float32) / float(total_steps - warmup), 0.0, 1.0)
        if recipe.schedule == "cosine":
            value = 0.5 * (1.0 + tf.cos(math.pi * progress))
        elif recipe.schedule == "linear":
            value = end + (1.0 - end) * (1.0 - progress)
        else:
            value = tf.ones_like(progress)
        return value * tf.minimum(1.0, tf.cast(step, tf.float32) / float(warmup)) if warmup else value

    return share
