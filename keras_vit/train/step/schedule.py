"""The learning rate's course, as `create_learning_rate_schedule` in vit_jax/utils.py and big_vision/utils.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from keras_vit.train._recipe import Recipe


def factor(recipe: Recipe, total_steps: int, warmup: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """The share of the recipe's learning rate that each step has: 1 at the peak.

    Args:
        recipe: its schedule, learning_rate and linear_end count.
        total_steps: updates of the run.
        warmup: of these, how many the rate rises linearly in; step 0 then has rate 0.

    Returns:
        A function of a step's number, an int64 scalar from 0, to a float32 scalar.

    Raises:
        ValueError: the warm-up takes the whole run.
    """
    if not 0 <= warmup < max(total_steps, 1):
        raise ValueError(f"The warm-up is shorter than the run. Received: {warmup} of {total_steps} steps")
    end = recipe.linear_end / recipe.learning_rate

    def share(step: tf.Tensor) -> tf.Tensor:
        step = tf.cast(step, tf.int64)
        # Subtracted as whole numbers: float32 counts to 16.7 million only.
        progress = tf.clip_by_value(tf.cast(step - warmup, tf.float32) / float(total_steps - warmup), 0.0, 1.0)
        if recipe.schedule == "cosine":
            value = 0.5 * (1.0 + tf.cos(math.pi * progress))
        elif recipe.schedule == "linear":
            value = end + (1.0 - end) * (1.0 - progress)
        else:
            value = tf.ones_like(progress)
        return value * tf.minimum(1.0, tf.cast(step, tf.float32) / float(warmup)) if warmup else value

    return share
