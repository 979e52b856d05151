"""Random numbers of layers come from one seed inside `random_scope`, and from Keras outside of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit.model import layers as vit
from keras_vit.model.layers.runtime import random_scope
from tiny_models import built, prepared

SEED, OTHER = tf.constant([3, 4]), tf.constant([3, 5])
RATES: dict[str, dict[str, Any]] = {
    "dropout": {"dropout_rate": 0.3},
    "attention dropout": {"attention_dropout_rate": 0.3},
    "stochastic depth": {"stochastic_depth": 0.5},
    "all": {"dropout_rate": 0.2, "attention_dropout_rate": 0.3, "stochastic_depth": 0.5},
}
SMALL = {"num_heads": 2, "mlp_dim": 12}
ONES = np.ones((200, 100), np.float32)


def deviations(count: float, draws: int, chance: float) -> float:
    """Return how many standard deviations of the binomial distribution a count is from its mean; five do not occur."""
    return abs(count - draws * chance) / (draws * chance * (1 - chance)) ** 0.5


def independent(first: Any, second: Any, rate: float) -> bool:
    """Return whether two masks agree as often as independent masks."""
    agreeing = int(((np.array(first) == 0) == (np.array(second) == 0)).sum())
    return deviations(agreeing, np.size(first), rate**2 + (1 - rate) ** 2) < 5


def blocks(rates: dict[str, Any], count: int = 2) -> list[Any]:
    """Return blocks with random weights; the dtype policy does not matter here."""
    random = np.random.default_rng(0)
    made = [vit.EncoderBlock.from_config({**SMALL, "layer_scale": 1.0, **rates}) for _ in range(count)]
    for block in made:
        block.build((None, 5, 8))
        for weight in block.weights:
            if weight.dtype == "float32":  # except the state of a seed generator
                weight.assign(random.normal(scale=0.5, size=weight.shape))
    return made


def chained(made: list[Any], x: Any) -> Any:
    for block in made:
        x = block(x, training=True)
    return x


INPUT = np.random.default_rng(1).normal(size=(16, 5, 8)).astype(np.float32)


# ---- inside


@pytest.mark.parametrize(
    ("name", "jit_compile"), [*((name, None) for name in RATES), ("all", False), ("all", True)], ids=str
)
def test_the_same_seed_gives_the_same_output_and_another_seed_another(name: str, jit_compile: bool | None) -> None:
    made = blocks(RATES[name], count=1)

    def drawn(seed: Any) -> Any:
        with random_scope(seed):
            return chained(made, INPUT)

    run = drawn if jit_compile is None else tf.function(drawn, jit_compile=jit_compile)
    first = np.array(run(SEED))
    run(OTHER)  # earlier draws have no effect
    np.testing.assert_array_equal(run(SEED), first)
    assert np.abs(np.array(run(OTHER)) - first).max() > 0.1


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(rate: float) -> None:
    with random_scope(SEED):
        output = np.array(vit.Dropout(rate)(ONES, training=True))
    assert deviations(int((output == 0).sum()), ONES.size, rate) < 5
    np.testing.assert_allclose(output[output != 0], 1 / (1 - rate), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_stochastic_depth_drops_whole_images_at_its_rate(rate: float) -> None:
    images = np.ones((4000, 2, 3), np.float32)
    with random_scope(SEED):
        output = np.array(vit.StochasticDepth(rate)(images, training=True)).reshape(4000, -1)
    assert (output == output[:, :1]).all()
    assert deviations(int((output[:, 0] == 0).sum()), 4000, rate) < 5
    np.testing.assert_allclose(output[output != 0], 1 / (1 - rate), rtol=1e-6)


def test_masks_of_two_layers_and_of_two_calls_of_one_have_nothing_to_do_with_each_other() -> None:
    one, two = vit.Dropout(0.3), vit.Dropout(0.3)
    with random_scope(SEED):
        masks = [layer(ONES, training=True) for layer in (one, one, two)]
    with random_scope(tf.constant([3, 1_000_000])):
        masks.append(one(ONES, training=True))
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert independent(first, second, 0.3)


def test_no_two_draws_of_a_model_share_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seeds = built(**RATES["all"], num_layers=3), []
    dropout = keras.random.dropout

    def recorded(inputs: Any, rate: float, *, seed: Any, **options: Any) -> Any:
        seeds.append(tuple(np.array(seed.next())))
        return dropout(inputs, rate, seed=seed, **options)

    monkeypatch.setattr(keras.random, "dropout", recorded)
    with random_scope(SEED):
        model(prepared(model.config), training=True)
    # The stem; in each block attention's weights and output and two of the MLP; both branches except block 0's.
    assert len(seeds) == len(set(seeds)) == 1 + 3 * 4 + 2 * 2


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_nothing_is_drawn_outside_of_training(rates: dict[str, Any]) -> None:
    (block,) = blocks(rates, count=1)
    quiet = np.array(block(INPUT))
    for remat in (False, True):
        with random_scope(SEED, remat=remat):
            np.testing.assert_array_equal(block(INPUT, training=False), quiet)


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "eager") for name in RATES), ("all", "graph"), ("all", "XLA")], ids=str
)
def test_blocks_that_are_computed_again_have_the_same_gradients(name: str, mode: str) -> None:
    made = blocks(RATES[name], count=2 if mode == "eager" else 1)  # compiling a block takes seconds
    weights = [weight for block in made for weight in block.trainable_weights]

    def gradients(x: Any, seed: Any, remat: bool) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with random_scope(seed, remat=remat):
                loss = tf.reduce_sum(chained(made, x) ** 2)
        return [loss, *tape.gradient(loss, [x, *(weight.value for weight in weights)])]

    run = gradients if mode == "eager" else tf.function(gradients, jit_compile=mode == "XLA")
    kept, again = (run(tf.constant(INPUT), SEED, remat) for remat in (False, True))
    for path, want, got in zip(["loss", "input", *(weight.path for weight in weights)], kept, again, strict=True):
        assert np.any(want), path
        # Equal bits if operations run one by one. Compilers fuse the two programs differently: float32's 6e-8 over
        # sums of 80 terms that partly cancel. Another mask would give large errors.
        tolerance = 0 if mode == "eager" else 1e-5 * np.abs(want).max() + 1e-4
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, err_msg=path)


# ---- outside


def test_outside_the_seed_is_keras_own() -> None:
    def outputs() -> list[np.ndarray]:
        keras.utils.set_random_seed(7)
        layers = [vit.Dropout(0.3), vit.Dropout(0.3)]
        drawn = [np.array(layer(ONES, training=True)) for layer in (*layers, *layers)]
        theirs = keras.layers.Dropout(0.3)
        drawn.append(np.array(theirs(ONES, training=True)))
        return drawn

    first, again = outputs(), outputs()
    np.testing.assert_array_equal(first, again)
    assert all(independent(first[i], first[j], 0.3) for i in range(5) for j in range(i))


def test_outside_a_dropout_with_a_seed_is_keras_dropout_with_it() -> None:
    ours, theirs = vit.Dropout(0.3, seed=5), keras.layers.Dropout(0.3, seed=5)
    for _ in range(2):
        np.testing.assert_array_equal(ours(ONES, training=True), theirs(ONES, training=True))


def test_a_scope_ends_with_its_block_even_by_an_error_and_leaves_the_layers_state_alone() -> None:
    layer, plain = vit.Dropout(0.3, seed=5), vit.Dropout(0.3, seed=5)
    with pytest.raises(RuntimeError, match="inside"), random_scope(SEED):
        layer(ONES, training=True)
        raise RuntimeError("inside")
    np.testing.assert_array_equal(layer(ONES, training=True), plain(ONES, training=True))


def test_scopes_nest_and_the_outer_one_goes_on_where_it_was() -> None:
    layer = vit.Dropout(0.3)
    with random_scope(SEED):
        want = [np.array(layer(ONES, training=True)) for _ in range(2)]
    with random_scope(SEED):
        got = [np.array(layer(ONES, training=True))]
        with random_scope(OTHER):
            layer(ONES, training=True)
        got.append(np.array(layer(ONES, training=True)))
    np.testing.assert_array_equal(got, want)


def test_another_thread_has_no_part_in_a_scope() -> None:
    layer, plain, drawn = vit.Dropout(0.3, seed=5), vit.Dropout(0.3, seed=5), []
    with random_scope(SEED):
        thread = threading.Thread(target=lambda: drawn.append(np.array(layer(ONES, training=True))))
        thread.start()
        thread.join()
    np.testing.assert_array_equal(drawn[0], plain(ONES, training=True))


# ---- several replicas

REPLICAS = """
import numpy as np
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from keras_vit.model import layers as vit
from keras_vit.model.config import BlockConfig
from keras_vit.model.layers.runtime import random_scope

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    layer, block = vit.Dropout(0.3), vit.EncoderBlock(BlockConfig(num_heads=2, mlp_dim=12, dropout_rate=0.3))
    block.build((None, 5, 8))

def masks(seed):
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    with random_scope(tf.random.experimental.stateless_fold_in(seed, replica)):
        return layer(tf.ones((200, 100)), training=True), block(tokens, training=True)

@tf.function
def run(seed):
    return strategy.run(masks, (seed,))

tokens = tf.sin(tf.reshape(tf.range(640.0), (16, 5, 8)))
drawn = [strategy.experimental_local_results(value) for _ in range(2) for value in run(tf.constant([3, 4]))]
np.savez("masks.npz", **{f"{i}_{replica}": value for i, pair in enumerate(drawn) for replica, value in enumerate(pair)})
"""


@pytest.mark.full
def test_two_replicas_draw_different_masks_and_the_same_ones_again(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", REPLICAS]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(tmp_path / "masks.npz") as file:
        drawn = dict(file)
    assert independent(drawn["0_0"], drawn["0_1"], 0.3)
    assert np.abs(drawn["1_0"] - drawn["1_1"]).max() > 0.1  # inside a block
    for first, again in (("0", "2"), ("1", "3")):
        for replica in "01":
            np.testing.assert_array_equal(drawn[f"{first}_{replica}"], drawn[f"{again}_{replica}"])
