"""Random numbers of layers come from one seed inside `random_scope`, and from Keras outside of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit.model import layers as vit
from keras_vit.model.layers.runtime import random_scope
from marks import full_except
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
    ("name", "jit_compile"),
    [*((name, None) for name in RATES), ("all", False), pytest.param("all", True, marks=pytest.mark.full)],
    ids=str,
)
def test_the_same_seed_gives_the_same_output_and_another_seed_another(name: str, jit_compile: bool | None) -> None:
    made = blocks(RATES[name], count=1)

    def drawn(seed: Any, remat: bool = False, training: bool = True) -> Any:
        with random_scope(seed, remat=remat):
            return made[0](INPUT, training=training)

    run = drawn if jit_compile is None else tf.function(drawn, jit_compile=jit_compile)
    first = np.array(run(SEED))
    run(OTHER)  # earlier draws have no effect
    np.testing.assert_array_equal(run(SEED), first)
    assert np.abs(np.array(run(OTHER)) - first).max() > 0.1
    for remat in (False, True) if jit_compile is None else ():  # nothing is drawn outside of training
        np.testing.assert_array_equal(drawn(SEED, remat, training=False), made[0](INPUT))


def test_dropout_and_stochastic_depth_drop_at_their_rates_and_keep_the_mean() -> None:
    for rate in (0.1, 0.5, 0.9):
        with random_scope(SEED):
            output = np.array(vit.Dropout(rate)(ONES, training=True))
            images = np.array(vit.StochasticDepth(rate)(np.ones((4000, 2, 3), np.float32), training=True))
        assert deviations(int((output == 0).sum()), ONES.size, rate) < 5
        np.testing.assert_allclose(output[output != 0], 1 / (1 - rate), rtol=1e-6)
        assert (images == images[:, :1, :1]).all()  # whole images
        assert deviations(int((images[:, 0, 0] == 0).sum()), 4000, rate) < 5
        np.testing.assert_allclose(images[images != 0], 1 / (1 - rate), rtol=1e-6)


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


@pytest.mark.parametrize("mode", full_except(["eager"], ["eager", "graph", "XLA"]))
def test_blocks_that_are_computed_again_have_the_same_gradients(mode: str) -> None:
    made = blocks(RATES["all"], count=2 if mode == "eager" else 1)  # compiling a block takes seconds
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
        drawn.append(np.array(keras.layers.Dropout(0.3)(ONES, training=True)))
        return drawn

    first, again = outputs(), outputs()
    np.testing.assert_array_equal(first, again)
    assert all(independent(first[i], first[j], 0.3) for i in range(5) for j in range(i))
    ours, theirs = vit.Dropout(0.3, seed=5), keras.layers.Dropout(0.3, seed=5)
    for _ in range(2):
        np.testing.assert_array_equal(ours(ONES, training=True), theirs(ONES, training=True))


def test_a_scope_ends_even_by_an_error_leaves_the_layers_state_alone_and_is_of_one_thread() -> None:
    layer, plain = vit.Dropout(0.3, seed=5), vit.Dropout(0.3, seed=5)
    with pytest.raises(RuntimeError, match="inside"), random_scope(SEED):
        layer(ONES, training=True)
        raise RuntimeError("inside")
    np.testing.assert_array_equal(layer(ONES, training=True), plain(ONES, training=True))
    with random_scope(SEED), ThreadPoolExecutor() as pool:
        drawn = pool.submit(lambda: np.array(layer(ONES, training=True))).result()
    np.testing.assert_array_equal(drawn, plain(ONES, training=True))


def test_scopes_nest_and_the_outer_one_goes_on_where_it_was() -> None:
    layer, other = vit.Dropout(0.3), vit.Dropout(0.3)
    with random_scope(SEED):
        want = [np.array(each(ONES, training=True)) for each in (layer, layer, other)]
    assert all(independent(want[i], want[j], 0.3) for i in range(3) for j in range(i))
    with random_scope(SEED):
        got = [np.array(layer(ONES, training=True))]
        with random_scope(OTHER):
            assert independent(layer(ONES, training=True), got[0], 0.3)
        got += [np.array(each(ONES, training=True)) for each in (layer, other)]
    np.testing.assert_array_equal(got, want)
