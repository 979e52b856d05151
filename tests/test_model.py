"""VisionTransformer as a Keras model: saving, cloning, nesting, training, features."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import scipy.special
import tensorflow as tf

from keras_vit import position
from keras_vit.model import layers as vit
from keras_vit.model.vision_transformer import VisionTransformer
from marks import full_except
from tiny_models import FAMILIES, OTHERS, VARIANTS, built, prepared, randomised, tiny

QUICK = (
    "pure",
    "hybrid",
    "map",
    "unpooled",
    "representation",
    "registers",
    "distilled",
    "sincos",
    "relative positions",
    "rotary",
)


@pytest.fixture(params=full_except(QUICK, VARIANTS | FAMILIES))
def model(request: pytest.FixtureRequest) -> VisionTransformer:
    return built(**(VARIANTS | FAMILIES)[request.param])


def same_weights(model: keras.Model, other: keras.Model) -> None:
    for mine, theirs in zip(model.weights, other.weights, strict=True):
        assert mine.path.split("/")[-3:] == theirs.path.split("/")[-3:]
        np.testing.assert_array_equal(mine, theirs)


# Shapes


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("pure", (2, 5)),
        ("hybrid", (2, 5)),
        ("map", (2, 5)),
        ("unpooled", (2, 16, 5)),
        ("token unpooled", (2, 17, 5)),
        ("headless", (2, 32)),
        ("representation", (2, 5)),
        ("registers", (2, 5)),
        ("distilled", (2, 5)),
    ],
)
def test_the_output_has_the_documented_shape(name: str, shape: tuple[int, ...]) -> None:
    model = built(**VARIANTS[name])
    assert model(prepared(model.config)).shape == shape
    assert model.output_shape == (None, *shape[1:])


def test_a_headless_model_with_a_representation_gives_the_representation() -> None:
    model = built(num_classes=0, representation_size=24)
    assert model(prepared(model.config)).shape == (2, 24)
    assert np.abs(model(prepared(model.config))).max() <= 1  # it ends in tanh


def test_a_new_models_head_is_zero_and_its_logits_are_the_heads_bias() -> None:
    model = VisionTransformer(tiny(head_bias_init=-7))
    np.testing.assert_array_equal(model(prepared(model.config)), np.full((2, 5), -7, np.float32))


def test_a_distilled_model_averages_its_two_heads() -> None:
    model = built(distilled=True)
    tokens = np.array(model.features(prepared(model.config), ["encoder_norm"])["encoder_norm"])
    heads = [model.get_layer(name).get_weights() for name in ("head", "head_distillation")]
    want = sum(tokens[:, i] @ kernel + bias for i, (kernel, bias) in enumerate(heads)) / 2
    np.testing.assert_allclose(model(prepared(model.config)), want, rtol=1e-4, atol=1e-5)


def test_summary_can_be_read() -> None:
    lines: list[str] = []
    built().summary(print_fn=lambda line, **_: lines.append(line))
    assert "block_1" in "\n".join(lines)


# Saved, cloned and nested


def test_a_model_saved_as_keras_comes_back(model: VisionTransformer, tmp_path: Path) -> None:
    model.features(prepared(model.config))  # computed features are not saved
    model.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    assert type(other) is VisionTransformer
    assert (other.config, other.name) == (model.config, model.name)
    same_weights(model, other)
    np.testing.assert_array_equal(other(prepared(model.config)), model(prepared(model.config)))


def test_a_saved_file_holds_every_weight_once(tmp_path: Path) -> None:
    import h5py

    model = built()
    model.save_weights(tmp_path / "fresh.weights.h5")
    model.features(prepared(model.config), ["block_0"])
    model.attention_maps(prepared(model.config))
    model.save_weights(tmp_path / "used.weights.h5")
    for name in ("fresh", "used"):
        with h5py.File(tmp_path / f"{name}.weights.h5") as file:
            sizes: list[int] = []
            file.visititems(lambda _, item, sizes=sizes: sizes.append(getattr(item, "size", 0)))
        grid_and_prefix = 3
        assert sum(sizes) == model.count_params() + grid_and_prefix


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_a_saved_model_keeps_its_dtype_policy(policy: str, tmp_path: Path) -> None:
    model = built(dtype=policy)
    model.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    assert [layer.dtype_policy.name for layer in other.layers] == [layer.dtype_policy.name for layer in model.layers]
    np.testing.assert_array_equal(other(prepared(model.config)), model(prepared(model.config)))


def test_what_is_frozen_stays_frozen_when_saved(tmp_path: Path) -> None:
    model = built()
    for layer in model.layers[:-1]:
        layer.trainable = False
    model.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    assert [weight.path for weight in other.trainable_weights] == [weight.path for weight in model.trainable_weights]
    assert len(other.trainable_weights) == 2


def test_a_compiled_model_comes_back_with_its_optimizer(tmp_path: Path) -> None:
    model = built()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, run_eagerly=True)
    x, y = prepared(model.config, 8), np.arange(8) % 5
    model.train_on_batch(x, y)
    model.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    assert other.train_on_batch(x, y) == pytest.approx(model.train_on_batch(x, y), rel=1e-5)
    assert int(other.optimizer.iterations) == 2


def test_weights_alone_go_into_the_same_architecture(model: VisionTransformer, tmp_path: Path) -> None:
    model.save_weights(tmp_path / "model.weights.h5")
    other = VisionTransformer(model.config)
    other.load_weights(tmp_path / "model.weights.h5")
    same_weights(model, other)


@pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning")  # Keras' warning, before its error
def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    built().save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError):
        VisionTransformer(tiny(hidden_size=16)).load_weights(tmp_path / "model.weights.h5")


def test_a_clone_computes_the_same(model: VisionTransformer) -> None:
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    # The clone is Keras' own model of the graph, whose last block computes every token: rounding differs.
    np.testing.assert_allclose(clone(prepared(model.config)), model(prepared(model.config)), rtol=0, atol=3e-6)


def functional(model: VisionTransformer) -> keras.Model:
    images = keras.Input(model.input_shape[1:])
    return keras.Model(images, keras.layers.Dense(3)(model(images)))


def sequential(model: VisionTransformer) -> keras.Model:
    return keras.Sequential([keras.Input(model.input_shape[1:]), model, keras.layers.Dense(3)])


@pytest.mark.parametrize(
    ("wrap", "name"),
    full_except(
        [(functional, "map"), (sequential, "pure")],
        itertools.product([functional, sequential], ["pure", "hybrid", "map", "distilled"]),
    ),
)
def test_a_model_works_and_is_saved_inside_a_users_own(wrap: Any, name: str, tmp_path: Path) -> None:
    model = built(**VARIANTS[name])
    outer = wrap(model)
    x = prepared(model.config)
    outer.save(tmp_path / "outer.keras")
    other = keras.saving.load_model(tmp_path / "outer.keras")
    np.testing.assert_array_equal(other(x), outer(x))
    assert sum(isinstance(layer, VisionTransformer) for layer in other.layers) == 1
    other.save_weights(tmp_path / "outer.weights.h5")
    outer.load_weights(tmp_path / "outer.weights.h5")


def test_a_models_own_layers_can_be_used_in_another_graph() -> None:
    model = built()
    tail = keras.Model(model.input, keras.layers.Dense(3)(model.get_layer("encoder_norm").output))
    assert tail(prepared(model.config)).shape == (2, 17, 3)


# Another resolution


@pytest.mark.parametrize("image_size", [pytest.param(48, marks=pytest.mark.full), (16, 40)], ids=str)
@pytest.mark.parametrize("name", full_except(["hybrid"], ["pure", "hybrid", "registers"]))
def test_every_way_to_another_resolution_interpolates_alike(name: str, image_size: Any, tmp_path: Path) -> None:
    model = built(**VARIANTS[name])
    resized = model.resized(image_size)
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = VisionTransformer(model.config.replace(image_size=image_size))
    loaded.load_weights(tmp_path / "model.weights.h5")
    copied = model.with_config(model.config.replace(image_size=image_size))
    want = position.resize(
        np.array(model.get_layer("position").embedding),
        resized.config.grid,
        source_grid=model.config.grid,
        prefix_tokens=model.config.position_prefix_tokens,
    )
    np.testing.assert_array_equal(resized.get_layer("position").embedding, want)
    same_weights(resized, loaded)
    same_weights(resized, copied)
    others = [weight for weight in resized.weights if not weight.path.endswith("position/embedding")]
    sources = [weight for weight in model.weights if not weight.path.endswith("position/embedding")]
    for mine, theirs in zip(others, sources, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert np.isfinite(resized(prepared(resized.config))).all()


@pytest.mark.parametrize("name", full_except(["pure"], ["pure", "hybrid", "map", "distilled"]))
def test_there_and_back_to_an_equal_grid_is_bit_equal(name: str) -> None:
    model = built(**VARIANTS[name])
    same_weights(model.resized(32).resized((32, 32)), model)


def test_equal_numbers_of_tokens_on_another_grid_are_interpolated() -> None:
    model = built()
    flat = model.resized((16, 64))
    assert (model.config.num_tokens, flat.config.grid) == (flat.config.num_tokens, (2, 8))
    before, after = (np.array(m.get_layer("position").embedding) for m in (model, flat))
    assert np.abs(before - after)[0, 1:].max() > 0.1
    np.testing.assert_array_equal(before[0, 0], after[0, 0])  # the class token's row stays
    # The first row of the new grid has the end points of the old one.
    np.testing.assert_array_equal(after[0, [1, 8]], before[0, [1, 4]])


@pytest.mark.parametrize("method", position.METHODS)
def test_a_method_can_be_chosen_and_is_kept(method: str) -> None:
    model = built()
    resized = model.resized(48, method=method)
    want = position.resize(np.array(model.get_layer("position").embedding), 6, method=method)
    np.testing.assert_array_equal(resized.get_layer("position").embedding, want)
    assert resized.config.position_method == method
    with pytest.raises(ValueError, match="position_method"):
        model.resized(48, method="best")


def test_resizing_keeps_dtype_policy_and_name() -> None:
    model = VisionTransformer(tiny(), dtype="mixed_bfloat16", name="mine")
    resized = model.resized(48)
    assert resized.name == "mine"
    assert resized.get_layer("block_0").dtype_policy.name == "mixed_bfloat16"


def test_a_fixed_sincos_embedding_is_computed_anew() -> None:
    model = built(**VARIANTS["sincos"])
    resized = model.resized(48)
    np.testing.assert_array_equal(resized.get_layer("position").fixed, position.sincos2d(6, 32))
    assert resized(prepared(resized.config)).shape == (2, 5)


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        yield messages


@pytest.mark.parametrize(
    ("changes", "image_size", "used"),
    [
        ({}, 36, "36x36.* 8x8.*32x32"),
        ({}, (32, 41), "32x41.* 8x8.*32x40"),
        ({"patch_size": (8, 5)}, 40, None),
        ({"patch_size": (8, 5)}, 42, "42x42.* 8x5.*40x40"),
        ({}, 32, None),
        (VARIANTS["hybrid"], 37, None),  # the stem pads, so no pixel is lost
        (VARIANTS["stem only"], 36, "36x36.* 8x8.*32x32"),
        (VARIANTS["stem only"], 32, None),
    ],
    ids=str,
)
def test_a_size_that_is_no_multiple_warns_once(
    changes: dict[str, Any], image_size: Any, used: str | None, caught: list[warnings.WarningMessage]
) -> None:
    model = VisionTransformer(tiny(**changes, image_size=image_size))
    model(prepared(model.config))
    model.features(prepared(model.config))
    ours = [message for message in caught if str(message.message).startswith("keras_vit:")]
    assert len(ours) == (used is not None)
    if used:
        assert ours[0].category is UserWarning
        assert ours[0].filename == __file__  # it shows the user's own line
        assert re.search(used, str(ours[0].message))


@pytest.mark.filterwarnings("ignore:keras_vit. images of:UserWarning")
def test_the_rest_that_fills_no_patch_is_not_seen() -> None:
    model, x = built(image_size=(35, 39)), np.zeros((1, 35, 39, 3), np.float32)
    y = np.array(model(x))
    x[:, 32:], x[:, :, 32:] = 9, 9
    np.testing.assert_array_equal(model(x), y)


# Numbers


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "mixed_float16", "float64"])
@pytest.mark.parametrize("name", full_except(["pure"], ["pure", "hybrid", "headless"]))
def test_logits_are_float32_under_any_policy_and_float64_under_float64(policy: str, name: str) -> None:
    exact = built("float64", **VARIANTS[name])
    model = VisionTransformer(tiny(**VARIANTS[name]), dtype=policy)
    model.set_weights(exact.get_weights())
    x = prepared(model.config)
    output, want = model(x), np.array(exact(x))
    assert output.dtype == ("float64" if policy == "float64" else "float32")
    # bfloat16 has 8 bits, float16 has 11; two blocks and a stem with random weights round about ten times.
    tolerance = {"float64": 1e-12, "float32": 1e-4, "mixed_float16": 0.02, "float16": 0.02}.get(policy, 0.1)
    assert np.abs(np.array(output) - want).max() <= tolerance * np.abs(want).max()


def test_a_models_own_policy_wins_over_the_global_one() -> None:
    plain, x = built(), prepared(tiny())
    want = np.array(plain(x))
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = built(dtype="float32")
        assert VisionTransformer(tiny()).get_layer("block_0").compute_dtype == "bfloat16"
        # Only float32 noise; bfloat16 would give errors of one per cent.
        np.testing.assert_allclose(model(x), want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(model.predict(x, verbose=0), want, rtol=1e-4, atol=1e-5)
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(("name", "jit_compile"), [("pure", False), ("pure", True), ("hybrid", True)])
def test_a_compiled_graph_gives_the_same_logits(name: str, jit_compile: bool) -> None:
    model = built(**VARIANTS[name])
    x = prepared(model.config)
    want = np.array(model(x))
    compiled = tf.function(model, jit_compile=jit_compile)
    # Another order of summation: float32 noise, amplified by a ResNet's many norms with random weights.
    np.testing.assert_allclose(
        compiled(x), want, rtol=0, atol=(1e-4 if name == "hybrid" else 1e-5) * np.abs(want).max()
    )


def test_the_batch_size_is_free() -> None:
    model = built()
    x = prepared(model.config, 5)
    want = np.array(model(x))
    for size in (1, 2, 5):
        np.testing.assert_allclose(model.predict(x, batch_size=size, verbose=0), want, rtol=1e-4, atol=1e-5)


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        built()(np.zeros((1, 48, 48, 3), np.float32))


# Training


def learns(model: VisionTransformer, *, run_eagerly: bool) -> None:
    x, y = prepared(model.config, 10), np.arange(10) % 5
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(5e-3), loss, run_eagerly=run_eagerly)
    # Eager, because tracing a graph takes longer than these few steps.
    losses = model.fit(x, y, batch_size=10, epochs=6, verbose=0).history["loss"]
    assert losses[0] == pytest.approx(np.log(5), rel=1e-3)  # the head is zero
    assert float(loss(y, model(x))) < 0.8 * np.log(5)


@pytest.mark.parametrize("name", full_except(["map"], ["hybrid", "map", "distilled", "layer scale", "representation"]))
def test_a_model_learns(name: str) -> None:
    learns(VisionTransformer(tiny(**VARIANTS[name], num_layers=1)), run_eagerly=True)


@pytest.mark.full
def test_a_model_learns_with_dropout_and_stochastic_depth_in_a_graph() -> None:
    rates = {"dropout_rate": 0.1, "attention_dropout_rate": 0.1, "stochastic_depth": 0.1}
    learns(VisionTransformer(tiny(**rates)), run_eagerly=False)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_model_learns_in_half_precision(policy: str) -> None:
    model = VisionTransformer(tiny(num_layers=1), dtype=policy)
    learns(model, run_eagerly=True)
    assert {weight.dtype for weight in model.weights} == {"float32"}


def test_a_model_is_built_and_trained_under_a_distribution_strategy() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = VisionTransformer(tiny(num_layers=1))
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = prepared(model.config, 8), np.arange(8) % 5
    losses = model.fit(x, y, batch_size=8, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert model.predict(x, verbose=0).shape == (8, 5)


# Intermediate outputs


def test_features_are_by_default_the_blocks_tokens_and_the_heads_input(model: VisionTransformer) -> None:
    features = model.features(prepared(model.config))
    assert list(features) == ["block_0", "block_1", "pre_logits"]
    tokens = (2, model.config.num_tokens, 32)
    assert features["block_0"].shape == features["block_1"].shape == tokens
    feature = 24 if model.config.representation_size else model.config.feature_size
    pooled = "unpooled" not in model.config.classifier
    assert features["pre_logits"].shape == ((2, feature) if pooled else (*tokens[:2], feature))


def test_every_feature_name_can_be_asked_for(model: VisionTransformer) -> None:
    features = model.features(prepared(model.config), model.feature_names)
    assert list(features) == model.feature_names
    wanted = {"embedding", "tokens", "block_0", "block_1", "pre_logits"} | (
        {"logits"} if model.config.num_classes else set()
    )
    assert wanted <= set(features)
    if model.config.num_classes:
        # The model itself computes fewer tokens in the last block: products of another shape round differently.
        np.testing.assert_allclose(features["logits"], model(prepared(model.config)), rtol=0, atol=3e-6)


READING = ["pure", "distilled", "representation", "relative positions", "rotary", "mixer with a class token", "gap"]


@pytest.mark.parametrize("name", READING)
def test_the_last_block_computes_the_tokens_that_the_head_reads(name: str) -> None:
    model = built("float64", **(VARIANTS | FAMILIES | OTHERS)[name])
    images = prepared(model.config).astype(np.float64)
    every_token = keras.Model(model.input, model.output)  # Keras' own model of the graph
    results = []
    for function in (model, every_token):
        with tf.GradientTape() as tape:
            output = function(images, training=True)
            loss = tf.reduce_sum(output**2)
        results.append([output, *tape.gradient(loss, [v.value for v in model.trainable_variables])])
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max() + 1e-12)
    with vit.final_tokens_only():
        assert model.features(images, ["block_1"])["block_1"].shape[1] == model.config.num_final_tokens
    assert model.features(images, ["block_1"])["block_1"].shape[1] == model.config.num_tokens


def test_a_hybrid_shows_its_maps() -> None:
    model = built(**VARIANTS["hybrid"])
    features = model.features(prepared(model.config), ["root", "stage_1", "stage_2"])
    assert [feature.shape for feature in features.values()] == [(2, 8, 8, 32), (2, 8, 8, 128), (2, 4, 4, 256)]


@pytest.mark.parametrize("layers", [["block_2"], ["block_0", "nothing"], []])
def test_an_unknown_feature_is_refused_and_the_known_are_named(layers: list[str]) -> None:
    with pytest.raises(ValueError, match="'block_1'.*Received: "):
        built().features(prepared(tiny()), layers)


def test_the_pre_logits_are_what_the_head_sees() -> None:
    model = built(representation_size=24)
    feature = np.array(model.features(prepared(model.config))["pre_logits"])
    kernel, bias = model.get_layer("head").get_weights()
    np.testing.assert_allclose(feature @ kernel + bias, model(prepared(model.config)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["pure", "registers", "hybrid", "no biases", "pre-norm"])
def test_attention_maps_are_the_softmax_of_the_scores(name: str) -> None:
    model = built(**VARIANTS[name])
    x = prepared(model.config)
    maps = model.attention_maps(x)
    tokens = [np.array(value, np.float64) for value in model.features(x, ["tokens", "block_0"]).values()]
    assert len(maps) == 2
    for i, (weights, states) in enumerate(zip(maps, tokens, strict=True)):
        assert weights.shape == (2, 4, model.config.num_tokens, model.config.num_tokens)
        np.testing.assert_allclose(np.sum(weights, axis=-1), 1, rtol=1e-5)
        block = model.get_layer(f"block_{i}")
        gamma, beta = block.norm1.get_weights()
        deviation = np.sqrt(states.var(-1, keepdims=True) + 1e-6)
        normed = (states - states.mean(-1, keepdims=True)) / deviation * gamma + beta
        parts = [block.attention.query, block.attention.key]
        biases = [0 if part.bias is None else np.array(part.bias) for part in parts]
        q, k = (
            np.einsum("btd,dhk->bthk", normed, part.kernel) + bias for part, bias in zip(parts, biases, strict=True)
        )
        want = scipy.special.softmax(np.einsum("bqhk,bthk->bhqt", q, k) / np.sqrt(8), axis=-1)
        np.testing.assert_allclose(weights, want, rtol=1e-3, atol=1e-4)


# From images to class names


def test_predictions_are_the_softmax_best_first() -> None:
    model = built(labels=("ant", "bee", "cat", "dog", "elk"))
    logits = np.array([[0, 2, 1, -1, 5], [3, 3, 0, 0, 0]], np.float32)
    (first, second), probabilities = model.decode_predictions(logits, top=3), scipy.special.softmax(logits, axis=1)
    assert [prediction.label for prediction in first] == ["elk", "bee", "cat"]
    assert [prediction.label for prediction in second] == ["ant", "bee", "cat"]  # ties by class
    np.testing.assert_allclose([p.probability for p in first], probabilities[0, [4, 1, 2]], rtol=1e-6)
    label_id, label, probability = first[0]
    assert (label_id, label) == ("4", "elk") and isinstance(probability, float)


def test_predictions_stay_finite_for_large_logits_and_top_stops_at_the_classes() -> None:
    (row,) = built().decode_predictions(tf.constant([[1e4, 0, -1e4, 1e4, 0]]), top=99)
    assert [(p.label, p.probability) for p in row[:2]] == [("class 0", 0.5), ("class 3", 0.5)]
    assert len(row) == 5


@pytest.mark.parametrize("logits", [np.zeros(5), np.zeros((1, 4)), np.zeros((1, 16, 5))], ids=lambda a: str(a.shape))
def test_logits_of_another_shape_are_refused(logits: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"num_classes=5.*Received: shape"):
        built().decode_predictions(logits)


def test_a_headless_model_predicts_no_classes() -> None:
    with pytest.raises(ValueError, match="num_classes=0"):
        built(num_classes=0).decode_predictions(np.zeros((1, 32)))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_classify_is_the_manual_path(policy: str) -> None:
    model = built(dtype=policy)
    images = [np.random.default_rng(i).integers(0, 256, (20 + i, 30, 3), np.uint8) for i in range(3)]
    manual = model.decode_predictions(model(model.preprocess(images)), top=2)
    classified = model.classify(images, top=2)
    tolerance = 1e-5 if policy == "float32" else 1e-2  # a graph may round less often
    for ours, theirs in zip(classified, manual, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.probability == pytest.approx(other.probability, abs=tolerance)
    if policy == "float32":
        assert [[p.label for p in row] for row in classified] == [[p.label for p in row] for row in manual]


def test_a_grey_model_takes_grey_images() -> None:
    model = built(num_channels=1)
    batch = model.preprocess(np.full((40, 50), 255, np.uint8))
    assert batch.shape == (1, 32, 32, 1)
    np.testing.assert_array_equal(batch, 1)
    assert len(model.classify(np.zeros((40, 50, 1), np.uint8))[0]) == 5


def test_building_without_initial_values_draws_nothing() -> None:
    with vit.uninitialized():
        model = VisionTransformer(tiny(resnet={"num_layers": (1,), "width_factor": 0.5}, patch_size=1, num_registers=1))
    drawn = {weight.path for weight in model.weights if np.any(weight)}
    assert all(path.endswith("gamma") for path in drawn)
    assert np.any(randomised(model)(prepared(model.config)))


def test_a_single_block_has_attention_maps() -> None:
    model = built(num_layers=1)
    [weights] = model.attention_maps(prepared(model.config))
    assert weights.shape == (2, 4, 17, 17)
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1, atol=1e-6)  # float32 sums of 17 numbers
