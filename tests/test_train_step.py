"""Tests of the single functions of a training step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.train._recipe import Recipe
from keras_vit.train.optimizer import Optimizer
from keras_vit.train.step import _apply, accumulate, replica_seed

SEED = tf.constant([5, 7])


def sums(batch: dict[str, Any], seed: Any) -> tuple[list[Any], Any]:
    """Return gradients that show their images and seeds."""
    return [tf.reduce_sum(batch["image"], axis=0)], tf.cast(seed, tf.float32)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_micro_batches_add_up_to_the_batch(count: int) -> None:
    images = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    (gradient,), seeds = accumulate(sums, {"image": tf.constant(images)}, SEED, count=count)
    np.testing.assert_allclose(gradient, images.sum(axis=0), rtol=1e-5)
    folded = [tf.random.experimental.stateless_fold_in(SEED, k) for k in range(count)] if count > 1 else [SEED]
    np.testing.assert_allclose(seeds, np.sum([np.float32(seed) for seed in folded], axis=0))
    assert len({tuple(seed.numpy()) for seed in folded}) == count


def test_every_step_and_replica_has_its_own_seed() -> None:
    recipe = Recipe(name="one", steps=9, batch_size=8, optimizer="sgd", learning_rate=0.5, seed=3)
    places = [(step, replica) for step in range(3) for replica in range(2)]
    seeds = {
        tuple(replica_seed(of, tf.constant(step, tf.int64), replica).numpy())
        for step, replica in places
        for of in (recipe, recipe.replace(seed=4))
    }
    assert len(seeds) == 2 * len(places)


@pytest.mark.parametrize("decay", [None, 0.75])
def test_gradients_are_clipped_applied_and_averaged(decay: float | None) -> None:
    recipe = Recipe(
        name="one",
        steps=9,
        batch_size=8,
        optimizer="sgd",
        learning_rate=0.5,
        schedule="constant",
        clip_norm=1.0,
        ema_decay=decay,
    )
    weight, average = tf.Variable([2.0, 2.0]), tf.Variable([2.0, 2.0])
    optimizer = Optimizer(recipe, [weight], ["head/bias"], total_steps=9, warmup=0, num_layers=1)
    averages = {"head/bias": average} if decay else {}
    state: Any = SimpleNamespace(recipe=recipe, trained=[weight], averages=averages, optimizer=optimizer)
    norm = _apply(state, [tf.constant([3.0, 4.0])], tf.constant(0, tf.int64))
    assert norm == 5.0
    np.testing.assert_allclose(weight, [2 - 0.5 * 0.6, 2 - 0.5 * 0.8], rtol=1e-6)
    expected = [2 - 0.25 * 0.3, 2 - 0.25 * 0.4] if decay else [2, 2]
    np.testing.assert_allclose(average, expected, rtol=1e-6)
