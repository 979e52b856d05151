"""Train a tiny model for 24 steps in several ways, and evaluate one; test_train_parity.py compares the results.

    python tests/parity_runs.py one|mirrored|workers OUT.npz

Writes weights and counts; with workers, the second writes what it has counted to OUT.second.npz.

It runs in a new process, because virtual devices and clusters must be set up before TensorFlow starts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from keras_vit import digits, train, zoo
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.sources import open_data
from keras_vit.train.evaluation import replicate
from keras_vit.train.loop import HeldOut
from keras_vit.train.prepare import adapt_model
from keras_vit.train.step import TrainState, make_train_step
from tiny_models import tiny

STEPS = 24
IMAGES = 16  # images of a step, on all replicas together
PRIME = 353  # images of an evaluation: no number of replicas or images in a batch divides it
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.05}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1}
MEASURED = "measured"  # in place of a run's name
# name: fields of the recipe. The limits of the norm are far below the norms: every step is clipped.
RUNS: dict[str, dict[str, Any]] = {
    "sgd, clip": SGD | {"clip_norm": 0.1, "xla": False},
    "adamw, clip": ADAMW | {"clip_norm": 0.1, "xla": False, "remat": True},
    "sgd, all": SGD | {"clip_norm": 0.1, "accumulation": 2, "ema_decay": 0.9, "steps_per_call": 6, "xla": True},
    "adamw, all": ADAMW | {"clip_norm": 0.1, "accumulation": 2, "ema_decay": 0.9, "steps_per_call": 6},
}


def trained(fields: dict[str, Any], strategy: tf.distribute.Strategy) -> dict[str, np.ndarray]:
    """Return everything that a checkpoint would have after the last step."""
    recipe = Recipe(name="parity", steps=STEPS, batch_size=IMAGES, warmup_steps=4, start="scratch", **fields)
    with strategy.scope():
        state = TrainState(recipe, adapt_model(recipe, _model(), num_classes=5), total_steps=STEPS)
    train_step = make_train_step(state, strategy)
    batches = iter(strategy.distribute_datasets_from_function(_batches))
    for _ in range(STEPS // recipe.steps_per_call):
        figures = train_step(batches, tf.constant(recipe.steps_per_call), tf.constant(0.0))
    held = {name: v.numpy().astype(np.float32) for name, v in state.variables.items()}
    return held | {"figures": figures.numpy()}


def measured(strategy: tf.distribute.Strategy) -> dict[str, np.ndarray]:
    """Return counts, losses and accuracies of evaluations on these devices."""
    data, random = digits.load(), np.random.default_rng(0)
    model, plain = replicate(zoo.load("digits"), strategy), _plain_model()
    images, labels = data.test_images[:PRIME], data.test_labels[:PRIME]
    # Wrong labels: an image that is lost or counted twice changes the number of right ones.
    wrong = {"evaluation": (images, random.integers(0, 10, PRIME)), "num_classes": 10}
    several = {"evaluation": (images, (random.random((PRIME, 10)) < 0.1).astype(np.float32))}
    evaluations = {
        "digits": train.evaluate(model, "digits", batch_size=50),  # created with the strategy, which it finds
        "prime": train.evaluate(model, wrong, strategy=strategy, batch_size=50),
        "real": train.evaluate(model, several, strategy=strategy, batch_size=50, labels="real"),
        "plain": train.evaluate(plain, wrong, strategy=strategy, batch_size=1000),  # copied to the devices
    }
    found = {
        name: np.array([e.count, e.unlabelled, round(e.top1 * e.count), round(e.top5 * e.count), e.loss])
        for name, e in evaluations.items()
    }
    few = {"train": (data.train_images[:211], data.train_labels[:211]), "evaluation": (images, labels)}
    shots = train.few_shot(plain, few, shots=(1, 5), layer="flat", strategy=strategy, batch_size=32)
    found["few-shot"] = np.array([round(share * PRIME) for share in shots.values()])
    recipe = Recipe(name="parity", steps=1, batch_size=4, start="scratch", **SGD)
    with strategy.scope():
        state = TrainState(recipe, adapt_model(recipe, _model(), num_classes=10), total_steps=1)
    held_out = HeldOut(state, open_data(wrong, training=False), folder=None, is_new=True, say=lambda _: None)
    found["while training"] = np.array([held_out.evaluate(1)[name] for name in ("accuracy", "top5")]) * PRIME
    return found


def _plain_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    flat = keras.layers.Flatten(name="flat")(inputs)
    return keras.Model(inputs, keras.layers.Dense(10, kernel_initializer="glorot_uniform")(flat))


def _model() -> VisionTransformer:
    keras.utils.set_random_seed(0)
    return VisionTransformer(tiny(image_size=16, num_layers=1))


def initial() -> dict[str, np.ndarray]:
    """Return the initial weights of every run."""
    return {f"weights/{v.path}": v.numpy() for v in _model().weights}


def _batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
    random = np.random.default_rng(0)
    images = random.normal(size=(STEPS * IMAGES, 16, 16, 3)).astype(np.float32)
    labels = np.eye(5, dtype=np.float32)[random.integers(0, 5, STEPS * IMAGES)]
    per_replica = IMAGES // context.num_replicas_in_sync
    replicas = np.arange(STEPS * IMAGES) // per_replica % context.num_replicas_in_sync
    local = context.num_replicas_in_sync // context.num_input_pipelines
    mine = replicas // local == context.input_pipeline_id
    stream = tf.data.Dataset.from_tensor_slices({"image": images[mine], "label": labels[mine]})
    return stream.batch(per_replica, drop_remainder=True)


def main(kind: str, out: str) -> None:
    """Evaluate, train in all ways, and write the results."""
    if kind == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = strategies.strategy(kind)
    found = {json.dumps([MEASURED, name]): array for name, array in measured(strategy).items()}
    if not strategies.is_chief(strategy):
        np.savez(Path(out).with_suffix(".second.npz"), **found)
    arrays = found | {
        json.dumps([name, variable]): value
        for name, fields in RUNS.items()
        for variable, value in trained(fields, strategy).items()
    }
    if strategies.is_chief(strategy):
        np.savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
