"""VisionTransformer as a Keras model: saving, cloning, nesting, training, features."""

from __future__ import annotations

import random
import re
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import scipy.special
import tensorflow as tf

from keras_vit import position
from keras_vit.model import layers as vit
from keras_vit.model.cost import symbolic_model
from keras_vit.model.vision_transformer import VisionTransformer
from marks import full_except
from tiny_models import FAMILIES, OTHERS, VARIANTS, built, prepared, tiny

ALL = VARIANTS | FAMILIES
QUICK = ("hybrid", "rotary")
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def same_weights(model: keras.Model, other: keras.Model) -> None:
    for mine, theirs in zip(model.weights, other.weights, strict=True):
        assert mine.path.split("/")[-3:] == theirs.path.split("/")[-3:]
        np.testing.assert_array_equal(mine, theirs)


# Shapes and heads


def test_outputs_have_the_documented_shapes() -> None:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("pure", "hybrid", "map", "representation", "registers", "distilled"), (5,)
    )
    shapes |= {"unpooled": (16, 5), "token unpooled": (17, 5), "headless": (32,)}
    assert {name: symbolic_model(tiny(**VARIANTS[name])).output_shape[1:] for name in shapes} == shapes


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


# Saved, cloned and nested


def test_a_head_reads_several_blocks_oldest_first_class_tokens_before_means() -> None:
    for fields, tokens, means in (
        ({"classifier": "token_gap", "token_blocks": 3}, (1, 2, 3), (3,)),  # as DINOv2's head "linear4"
        ({"classifier": "gap", "mean_blocks": 2}, (), (2, 3)),
        ({"classifier": "token", "token_blocks": 2}, (2, 3), ()),
        ({"classifier": "token", "token_blocks": 1, "mean_blocks": 3}, (3,), (1, 2)),
        ({"classifier": "map", "mean_blocks": 3}, (), (1, 2)),
    ):
        model = built(num_layers=4, num_registers=2, **fields)
        blocks = {name: np.asarray(x) for name, x in model.features(prepared(model.config)).items()}
        norm, prefix = model.get_layer("encoder_norm"), model.config.num_prefix_tokens
        normed = [np.asarray(norm(blocks[f"block_{i}"])) for i in range(4)]
        pooled = [np.asarray(model.get_layer("pool")(normed[3]))] if fields["classifier"] == "map" else []
        parts = pooled + [normed[i][:, 0] for i in tokens] + [normed[i][:, prefix:].mean(axis=1) for i in means]
        assert model.config.feature_size == model.get_layer("head").kernel.shape[0] == 32 * len(parts)
        # Measured: at most 5e-7.
        np.testing.assert_allclose(blocks["pre_logits"], np.concatenate(parts, axis=1), atol=1e-5)
    wider = built(num_layers=2).with_config(tiny(num_layers=2, token_blocks=2))
    assert wider.get_layer("head").kernel.shape[0] == 64 and not np.any(wider(prepared(wider.config)))
    for fields, message in (
        ({"token_blocks": 2, "classifier": "gap"}, "token_blocks above 1 needs a classifier of ('token', 'token_gap')"),
        ({"mean_blocks": 2, "classifier": "unpooled"}, "mean_blocks above 1 needs a classifier of ('token', 'gap'"),
        ({"token_blocks": 3}, "at most num_layers=2"),
        ({"token_blocks": 2, "final_norm": "pooled"}, "final_norm='tokens'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            tiny(**fields)


@pytest.mark.parametrize("name", full_except(QUICK, dict.fromkeys([*QUICK, *list(ALL)[::2]])))
def test_a_model_comes_back_from_a_file_from_its_weights_and_as_a_clone(name: str, tmp_path: Path) -> None:
    model = built(**ALL[name])
    images = prepared(model.config)
    model.features(images)  # computed features are not saved
    want = model(images)
    model.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    assert type(other) is VisionTransformer
    assert (other.config, other.name) == (model.config, model.name)
    same_weights(model, other)
    np.testing.assert_array_equal(other(images), want)

    model.save_weights(tmp_path / "model.weights.h5")
    same = VisionTransformer(model.config)
    same.load_weights(tmp_path / "model.weights.h5")
    same_weights(model, same)

    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    # The clone is Keras' own model of the graph, whose last block computes every token: rounding differs.
    np.testing.assert_allclose(clone(images), want, rtol=0, atol=3e-6)


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


def test_a_saved_model_keeps_its_dtype_policy(tmp_path: Path) -> None:
    model = built(dtype="mixed_bfloat16")
    model.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    policies = [[layer.dtype_policy.name for layer in each.layers] for each in (model, other)]
    assert policies[0] == policies[1]
    np.testing.assert_array_equal(other(prepared(model.config)), model(prepared(model.config)))


def test_a_compiled_model_comes_back_with_its_optimizer(tmp_path: Path) -> None:
    model = built()
    model.compile(keras.optimizers.Adam(1e-3), CROSSENTROPY, run_eagerly=True)
    x, y = prepared(model.config, 8), np.arange(8) % 5
    model.train_on_batch(x, y)
    model.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    model.reset_metrics()  # Keras 3.14 returns the mean loss of both steps
    assert other.train_on_batch(x, y) == pytest.approx(model.train_on_batch(x, y), rel=1e-5)
    assert int(other.optimizer.iterations) == 2


@pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning")  # Keras' warning, before its error
def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    built().save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError):
        VisionTransformer(tiny(hidden_size=16)).load_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="1 rows for prefix tokens"):
        VisionTransformer(tiny(position_prefix=False)).load_weights(tmp_path / "model.weights.h5")


@pytest.mark.parametrize(
    ("kind", "name"), full_except([("functional", "map")], [("functional", "map"), ("sequential", "pure")])
)
def test_a_model_works_and_is_saved_inside_a_users_own(kind: str, name: str, tmp_path: Path) -> None:
    model = built(**VARIANTS[name])
    images = keras.Input(model.input_shape[1:])
    if kind == "functional":
        outer = keras.Model(images, keras.layers.Dense(3)(model(images)))
    else:
        outer = keras.Sequential([images, model, keras.layers.Dense(3)])
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


def test_a_symbolic_model_has_the_real_variables_without_values_and_draws_no_random_numbers() -> None:
    for name in ("pure", "map", "hybrid"):
        model = built(**VARIANTS[name])
        before = random.getstate()
        symbolic = symbolic_model(model.config)
        assert random.getstate() == before
        shapes = {variable.path: variable.shape for variable in model.variables}
        assert {variable.path: variable.shape for variable in symbolic.variables} == shapes
        with keras.StatelessScope():  # a later scope gives them no values
            pass
        assert all(variable._value is None for variable in symbolic.variables)


# Another resolution


SIZES = [("hybrid", (16, 40)), ("registers", 48), ("pure", (16, 64))]


@pytest.mark.parametrize(("name", "image_size"), full_except(SIZES[:1], SIZES))
def test_every_way_to_another_resolution_interpolates_alike(name: str, image_size: Any, tmp_path: Path) -> None:
    model = built(**VARIANTS[name])
    resized = model.resized(image_size)
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = VisionTransformer(model.config.replace(image_size=image_size))
    loaded.load_weights(tmp_path / "model.weights.h5")
    copied = model.with_config(model.config.replace(image_size=image_size))
    before, after = (np.array(each.get_layer("position").embedding) for each in (model, resized))
    grid, prefix_tokens = resized.config.grid, model.config.position_prefix_tokens
    want = position.resize(before, grid, source_grid=model.config.grid, prefix_tokens=prefix_tokens)
    np.testing.assert_array_equal(after, want)
    if grid == (2, 8):  # as many tokens as before, but interpolated
        assert np.abs(after - before).max() > 0.1
    same_weights(resized, loaded)
    same_weights(resized, copied)
    others = [weight for weight in resized.weights if not weight.path.endswith("position/embedding")]
    sources = [weight for weight in model.weights if not weight.path.endswith("position/embedding")]
    for mine, theirs in zip(others, sources, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert np.isfinite(resized(prepared(resized.config))).all()


@pytest.mark.full
def test_a_method_can_be_chosen_and_is_kept_with_the_policy_and_the_name(tmp_path: Path) -> None:
    model = VisionTransformer(tiny(), dtype="mixed_bfloat16", name="mine")
    same_weights(model.resized((32, 32)), model)  # an equal grid: nothing changes
    model.save_weights(tmp_path / "model.weights.h5")
    embedding = np.array(model.get_layer("position").embedding)
    for method in position.METHODS:
        resized = model.resized(48, method=method)
        loaded = VisionTransformer(model.config.replace(image_size=48, position_method=method))
        loaded.load_weights(tmp_path / "model.weights.h5")
        want = position.resize(embedding, 6, method=method)
        for each in (resized, loaded):
            np.testing.assert_array_equal(each.get_layer("position").embedding, want, err_msg=method)
        assert (resized.config.position_method, resized.name) == (method, "mine")
        assert resized.get_layer("block_0").dtype_policy.name == "mixed_bfloat16"
    with pytest.raises(ValueError, match="position_method"):
        model.resized(48, method="best")


def test_a_fixed_sincos_embedding_is_computed_anew() -> None:
    model = built(**VARIANTS["sincos"])
    resized = model.resized(48)
    np.testing.assert_array_equal(resized.get_layer("position").fixed, position.sincos2d(6, 32))
    assert resized(prepared(resized.config)).shape == (2, 5)


def test_a_size_that_is_no_multiple_warns_once() -> None:
    cases: list[tuple[dict[str, Any], Any, str | None]] = [
        ({}, 36, "36x36.* 8x8.*32x32"),
        ({}, (32, 41), "32x41.* 8x8.*32x40"),
        ({"patch_size": (8, 5)}, 42, "42x42.* 8x5.*40x40"),
        ({}, 32, None),
        (VARIANTS["hybrid"], 37, None),  # the stem pads, so no pixel is lost
        (VARIANTS["stem only"], 36, "36x36.* 8x8.*32x32"),
    ]
    for changes, image_size, used in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = VisionTransformer(tiny(**changes, image_size=image_size))
            model(prepared(model.config))
            model.features(prepared(model.config))
        ours = [message for message in caught if str(message.message).startswith("keras_vit:")]
        assert len(ours) == (used is not None), (changes, image_size)
        if used:
            assert ours[0].category is UserWarning
            assert ours[0].filename == __file__  # it shows the user's own line
            assert re.search(used, str(ours[0].message))


# Numbers


@pytest.mark.parametrize("name", full_except(["pure"], ["pure", "hybrid", "headless"]))
def test_logits_are_float32_under_any_policy_and_float64_under_float64(name: str) -> None:
    exact = built("float64", **VARIANTS[name])
    x = prepared(exact.config)
    want = np.array(exact(x))
    # bfloat16 has 8 bits, float16 has 11; two blocks and a stem with random weights round about ten times.
    for policy, tolerance in {"mixed_bfloat16": 0.1, "bfloat16": 0.1, "mixed_float16": 0.02, "float64": 1e-12}.items():
        model = VisionTransformer(tiny(**VARIANTS[name]), dtype=policy)
        model.set_weights(exact.get_weights())
        output = model(x)
        assert output.dtype == ("float64" if policy == "float64" else "float32")
        assert np.abs(np.array(output) - want).max() <= tolerance * np.abs(want).max(), policy


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


@pytest.mark.parametrize("name", full_except(["pure"], ["pure", "hybrid"]))
def test_a_model_compiled_by_xla_gives_the_same_logits(name: str) -> None:
    model = built(**VARIANTS[name])
    x = prepared(model.config)
    want = np.array(model(x))
    compiled = tf.function(model, jit_compile=True)
    # Another order of summation: float32 noise, amplified by a ResNet's many norms with random weights.
    atol = (1e-4 if name == "hybrid" else 1e-5) * np.abs(want).max()
    np.testing.assert_allclose(compiled(x), want, rtol=0, atol=atol)


def test_the_batch_size_is_free_and_the_size_of_images_is_not() -> None:
    model = built()
    x = prepared(model.config, 5)
    want = np.array(model(x))
    for size in (1, 2):
        np.testing.assert_allclose(model.predict(x, batch_size=size, verbose=0), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="shape"):
        model(np.zeros((1, 48, 48, 3), np.float32))


# Training


def learns(model: VisionTransformer, *, run_eagerly: bool) -> None:
    x, y = prepared(model.config, 10), np.arange(10) % 5
    model.compile(keras.optimizers.Adam(5e-3), CROSSENTROPY, run_eagerly=run_eagerly)
    # Eager, because tracing a graph takes longer than these few steps.
    losses = model.fit(x, y, batch_size=10, epochs=6, verbose=0).history["loss"]
    assert losses[0] == pytest.approx(np.log(5), rel=1e-3)  # the head is zero
    assert float(CROSSENTROPY(y, model(x))) < 0.8 * np.log(5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["hybrid", "map"])
def test_a_model_learns(name: str) -> None:
    learns(VisionTransformer(tiny(**VARIANTS[name], num_layers=1)), run_eagerly=True)


@pytest.mark.full
def test_a_model_learns_with_dropout_and_stochastic_depth_in_a_graph() -> None:
    rates = {"dropout_rate": 0.1, "attention_dropout_rate": 0.1, "stochastic_depth": 0.1}
    learns(VisionTransformer(tiny(**rates)), run_eagerly=False)


@pytest.mark.parametrize("policy", full_except(["mixed_float16"], ["mixed_bfloat16", "mixed_float16"]))
def test_a_model_learns_in_half_precision(policy: str) -> None:
    model = VisionTransformer(tiny(num_layers=1), dtype=policy)
    learns(model, run_eagerly=True)
    assert {weight.dtype for weight in model.weights} == {"float32"}


@pytest.mark.full
def test_a_model_is_built_and_trained_under_a_distribution_strategy() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = VisionTransformer(tiny(num_layers=1))
        model.compile(keras.optimizers.SGD(0.1), CROSSENTROPY)
    x, y = prepared(model.config, 8), np.arange(8) % 5
    losses = model.fit(x, y, batch_size=8, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert model.predict(x, verbose=0).shape == (8, 5)


# Intermediate outputs


@pytest.mark.parametrize("name", full_except(QUICK, sorted({*QUICK, *[*ALL][::2]})))
def test_features_are_by_default_the_blocks_and_the_heads_input_and_all_can_be_asked_for(name: str) -> None:
    model = built(**ALL[name])
    config, images = model.config, prepared(model.config)
    features = model.features(images)
    assert list(features) == ["block_0", "block_1", "pre_logits"]
    tokens = (2, config.num_tokens, 32)
    assert features["block_0"].shape == features["block_1"].shape == tokens
    feature = 24 if config.representation_size else config.feature_size
    pooled = "unpooled" not in config.classifier
    assert features["pre_logits"].shape == ((2, feature) if pooled else (*tokens[:2], feature))

    everything = model.features(images, model.feature_names)
    assert list(everything) == model.feature_names
    assert {"embedding", "tokens", *features} <= set(everything)
    if config.num_classes:
        # The model itself computes fewer tokens in the last block: products of another shape round differently.
        np.testing.assert_allclose(everything["logits"], model(images), rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    "name", ["pure", "distilled", "relative positions", "rotary", "mixer with a class token", "gap"]
)
def test_the_last_block_computes_the_tokens_that_the_head_reads(name: str) -> None:
    model = built("float64", **(ALL | OTHERS)[name])
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


def test_an_unknown_feature_is_refused_and_the_known_are_named() -> None:
    for layers in (["block_2"], ["block_0", "nothing"], []):
        with pytest.raises(ValueError, match="'block_1'"):
            built().features(prepared(tiny()), layers)


def test_a_single_block_has_attention_maps() -> None:
    model = built(num_layers=1)
    [weights] = model.attention_maps(prepared(model.config))
    assert weights.shape == (2, 4, 17, 17)
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1, atol=1e-6)  # float32 sums of 17 numbers


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
    # Large logits, and more classes asked for than there are.
    (row,) = built().decode_predictions(tf.constant([[1e4, 0, -1e4, 1e4, 0]]), top=99)
    assert [(p.label, p.probability) for p in row[:2]] == [("class 0", 0.5), ("class 3", 0.5)]
    assert len(row) == 5


def test_logits_of_another_shape_are_refused() -> None:
    for shape in ((5,), (1, 4), (1, 16, 5)):
        with pytest.raises(ValueError, match="num_classes=5"):
            built().decode_predictions(np.zeros(shape))
    with pytest.raises(ValueError, match="num_classes=0"):
        built(num_classes=0).decode_predictions(np.zeros((1, 32)))


def test_classify_is_the_manual_path() -> None:
    images = [np.random.default_rng(i).integers(0, 256, (20 + i, 30, 3), np.uint8) for i in range(3)]
    for policy, tolerance in (("float32", 1e-5), ("mixed_bfloat16", 1e-2)):  # a graph may round less often
        model = built(dtype=policy)
        manual = model.decode_predictions(model(model.preprocess(images)), top=2)
        classified = model.classify(images, top=2)
        probabilities = [[[p.probability for p in row] for row in rows] for rows in (classified, manual)]
        np.testing.assert_allclose(*probabilities, rtol=0, atol=tolerance)
        if policy == "float32":
            assert [[p.label for p in row] for row in classified] == [[p.label for p in row] for row in manual]
