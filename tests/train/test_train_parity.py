"""One replica, two replicas and two worker processes train the same weights, and count the same in evaluations.

The test starts this file in new processes, because virtual devices and clusters are set up before TensorFlow starts:

    python tests/train/test_train_parity.py one|mirrored|workers OUT.npz

They train a tiny model for 12 steps in several ways, evaluate one, and write weights and counts; with workers, the
second writes what it has counted to OUT.second.npz.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from places import ROOT, SUPPORT

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import digits, train, zoo
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import strategies
from keras_vit.train._recipe import Recipe
from keras_vit.train.data.sources import open_data
from keras_vit.train.evaluation import replicate
from keras_vit.train.held_out import HeldOut
from keras_vit.train.objective import supervised
from keras_vit.train.prepare import adapt_model
from keras_vit.train.step import TrainState, make_train_step
from tiny_models import tiny

pytestmark = pytest.mark.full

STEPS = 12
IMAGES = 16  # images of a step, on all replicas together
PRIME = 353  # images of an evaluation: no number of replicas or images in a batch divides it
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.05}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1}
MEASURED = "measured"  # in place of a run's name
# name: fields of the recipe. The limits of the norm are far below the norms: every step is clipped.
RUNS: dict[str, dict[str, Any]] = {
    "sgd, all": SGD | {"clip_norm": 0.1, "accumulation": 2, "ema_decay": 0.9, "steps_per_call": 6, "xla": True},
    "adamw, lora": ADAMW
    | {"clip_norm": 0.1, "xla": False, "remat": True, "lora_rank": 2, "train_only": ["lora", "norms", "biases"]},
}


def trained(fields: dict[str, Any], strategy: tf.distribute.Strategy) -> dict[str, np.ndarray]:
    """Return everything that a checkpoint would have after the last step."""
    recipe = Recipe(name="parity", steps=STEPS, batch_size=IMAGES, warmup_steps=4, start="scratch", **fields)
    with strategy.scope():
        model = adapt_model(recipe, _model(), num_classes=5)
        state = TrainState(recipe, model, supervised(recipe, model), total_steps=STEPS)
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
        small = adapt_model(recipe, _model(), num_classes=10)
        state = TrainState(recipe, small, supervised(recipe, small), total_steps=1)
    held_out = HeldOut(state, open_data(wrong, training=False), folder=None, is_new=True, print_line=lambda _: None)
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


def run_script(kind: str, out: str) -> None:
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


# ---- the comparison

# Replicas add in another order, which differs between processors too: SGD adds up float32 noise (measured 1.5e-8),
# AdamW divides small gradients by their own size (1.5e-6). One step of AdamW moves a weight by 1e-3.
TOLERANCES = {"sgd": 2e-7, "adamw": 5e-6}
# It cancels out of the softmax: its gradient is only rounding, which AdamW divides by its own size.
WITHOUT_EFFECT = "attention/key/bias"
LOSSES = ("digits", "prime", "real", "plain")
Runs = dict[str, dict[str, np.ndarray]]


def started(kind: str, out: Path, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(SUPPORT), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, __file__, kind, str(out)],
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""} | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    """Return the results of all runs."""
    folder = tmp_path_factory.mktemp("parity")
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    configs = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in (0, 1)]
    processes = [started(kind, folder / f"{kind}.npz") for kind in ("one", "mirrored")]
    processes += [started("workers", folder / "workers.npz", TF_CONFIG=json.dumps(config)) for config in configs]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
    return {kind: loaded(folder / f"{kind}.npz") for kind in ("one", "mirrored", "workers", "workers.second")}


def loaded(path: Path) -> Runs:
    arrays: Runs = {}
    with np.load(path) as file:
        for key in file:
            run, variable = json.loads(key)
            arrays.setdefault(run, {})[variable] = file[key]
    return arrays


def is_frozen(variable: str) -> bool:
    return not variable.endswith(("gamma", "beta", "bias")) and not variable.startswith("weights/head/")


@pytest.mark.parametrize("name", RUNS)
def test_two_replicas_train_what_one_does(runs: dict[str, Runs], name: str) -> None:
    one, start = runs["one"][name], initial()
    trained = [variable for variable in one if variable.startswith(("weights/", "average/"))]
    noise = {variable for variable in trained if variable.endswith(WITHOUT_EFFECT)}
    # Weights that agree must also have changed, and their gradients were clipped.
    moved = {variable: np.abs(one[variable] - start[variable]).max() for variable in start}
    frozen = {variable for variable in start if "train_only" in RUNS[name] and is_frozen(variable)}
    assert all(
        (distance > 1e-5) != (variable in frozen) for variable, distance in moved.items() if variable not in noise
    ), moved
    assert one["figures"][2] > 2 * RUNS[name]["clip_norm"]
    for kind in ("mirrored", "workers"):
        two = runs[kind][name]
        assert one.keys() == two.keys()
        for variable in trained:
            if variable not in noise or name.startswith("sgd"):
                np.testing.assert_allclose(
                    two[variable], one[variable], rtol=0, atol=TOLERANCES[name.partition(",")[0]], err_msg=variable
                )
        np.testing.assert_allclose(two["figures"], one["figures"], rtol=1e-4)  # loss, accuracy, norm of the batch


def test_two_replicas_count_what_one_does_and_one_counts_every_image(runs: dict[str, Runs]) -> None:
    one, prime = runs["one"][MEASURED], PRIME
    assert one["digits"][:4].tolist() == [360, 0, 357, 360]
    assert one["prime"][0] == prime and 0 < one["prime"][2] < one["prime"][3] < prime
    assert one["real"][:2].sum() == prime and one["real"][1] > 0
    assert one["plain"][0] == prime and (one["few-shot"] > 0.5 * prime).all()
    assert 0 < one["while training"][0] < prime
    for kind in ("mirrored", "workers", "workers.second"):
        two = runs[kind][MEASURED]
        assert one.keys() == two.keys()
        for name, expected in one.items():
            # Counts are equal. The last figure of an evaluation is its loss: the same, added up in another order.
            np.testing.assert_allclose(two[name], expected, rtol=1e-6 if name in LOSSES else 0, err_msg=name)
            np.testing.assert_array_equal(two[name][:4], expected[:4], err_msg=name)


if __name__ == "__main__":
    run_script(*sys.argv[1:])
