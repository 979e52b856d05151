"""Every array of visualize equals a computation with loops, in float64, of the model's attention and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import scipy.special

from format_cases import at, load
from keras_vit import position, visualize
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize import _models, attention, tokens
from model_weights import values
from package_source import imported_packages
from reference_cases import distance
from tiny_models import VARIANTS, built, prepared, tiny

# Between them they have all parts that the arrays read.
MODELS: dict[str, dict[str, Any]] = {
    "hybrid_eps": {},  # of the official code: a ResNet before the blocks
    "distilled, not square": {
        **{"distilled": True, "image_size": (24, 48), "patch_size": (8, 16)},
        **VARIANTS["2-D positions at every block"],
    },
    "map behind registers": {"classifier": "map", "num_registers": 2},
    "map, norm behind": {"classifier": "map", "final_norm": "pooled"},
    "mean": {
        **{"classifier": "gap", "class_token": True, "final_norm": "pooled", "representation_size": 24},
        **{"position": "sincos2d", "num_channels": 1},
    },
    "every token": {
        **{"classifier": "token_unpooled", "activation": "gelu_quick", "layer_scale": 0.1},
        **VARIANTS["relative positions"],
    },
}
# float32 noise of the models is up to 5e-7 of the largest value (see the manifest); the arrays add about the same.
BOUND = 1e-5


@dataclass(frozen=True)
class Case:
    """A model, its images, and what it computes of them, in float64."""

    model: VisionTransformer
    images: np.ndarray
    attention: list[np.ndarray]  # of every block: (batch, heads, tokens, tokens)
    tokens: list[np.ndarray]  # after every block: (batch, tokens, hidden_size)
    probe: np.ndarray | None  # attention of a map head: (batch, heads, patches)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def prefix(self) -> int:
        return self.config.num_prefix_tokens


def case_of(model: VisionTransformer, images: np.ndarray) -> Case:
    blocks = [f"block_{i}" for i in range(model.config.num_layers)]
    maps = [np.array(each, np.float64) for each in model.attention_maps(images)]
    after = [np.array(each, np.float64) for each in model.features(images, blocks).values()]
    probe = None
    if model.config.classifier == "map":
        place = "encoder_norm" if model.config.final_norm == "tokens" else blocks[-1]
        probe = probe_attention(model, np.array(model.features(images, [place])[place], np.float64))
    return Case(model, images, maps, after, probe)


def probe_attention(model: VisionTransformer, read: np.ndarray) -> np.ndarray:
    """Compute the attention of a map head to the tokens that it reads, head by head."""
    weights, patches, maps = values(model), read[:, model.config.num_prefix_tokens :], []
    for head in range(model.config.num_heads):
        query, keys = (
            x @ weights[f"pool/attention/{name}/kernel"][:, head] + weights[f"pool/attention/{name}/bias"][head]
            for name, x in (("query", weights["pool/probe"][0]), ("key", patches))
        )
        maps.append(scipy.special.softmax(keys @ query[0] / math.sqrt(len(query[0])), axis=-1))
    return np.stack(maps, axis=1)


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "hybrid_eps":
        outputs = at(request.param, "")
        images = outputs["input" if "input" in outputs else "input_nhwc"][:2]
        return case_of(load(request.param, tmp_path_factory.mktemp("case")), images)
    model = built(**MODELS[request.param])
    return case_of(model, prepared(model.config))


def pooled_tokens(config: Any) -> list[int]:
    """Return the tokens that the head reads."""
    if config.classifier in ("token", "token_unpooled"):
        return [0, 1] if config.distilled else [0]
    return list(range(config.num_prefix_tokens, config.num_tokens))


def equal(got: np.ndarray, want: Any) -> None:
    assert got.dtype == np.float32
    assert distance(got, np.asarray(want)) < BOUND


# Against the independent computation


def test_attention_maps(case: Case) -> None:
    got = visualize.attention_maps(case.model, case.images)
    equal(got, case.attention)  # in test_position_variants.py it is compared with NumPy
    np.testing.assert_allclose(got.sum(axis=-1), 1, atol=1e-5)


def test_attention_distance(case: Case) -> None:
    rows, columns = case.config.grid
    height, width = case.config.stride
    places = [(y * height, x * width) for y in range(rows) for x in range(columns)]
    want = np.zeros((case.config.num_layers, case.config.num_heads))
    for layer, weights in enumerate(case.attention):
        for head in range(case.config.num_heads):
            means = []
            for image in weights[:, head, case.prefix :, case.prefix :]:
                for query, row in zip(places, image, strict=True):
                    far = [math.dist(query, key) * weight for key, weight in zip(places, row, strict=True)]
                    means.append(sum(far) / sum(row))
            want[layer, head] = sum(means) / len(means)
    equal(visualize.attention_distance(case.model, case.images), want)


def naive_flow(matrix: np.ndarray, fusion: Callable[..., float], ratio: float, prefix: int) -> np.ndarray:
    """Fuse (heads, queries, keys) to (queries, keys) and remove the lowest patches of each row."""
    fused = np.array([[fusion(matrix[:, q, k]) for k in range(matrix.shape[2])] for q in range(matrix.shape[1])])
    for row in fused:
        patches = range(prefix, len(row))
        for key in sorted(patches, key=lambda k, row=row: row[k])[: int(ratio * len(patches))]:
            row[key] = 0
    return fused


def naive_rollout(case: Case, fusion: Callable[..., float], ratio: float, start: int) -> np.ndarray:
    maps = []
    for image in range(len(case.images)):
        flow = np.eye(case.config.num_tokens)
        for weights in case.attention[start:]:
            step = 0.5 * naive_flow(weights[image], fusion, ratio, case.prefix) + 0.5 * np.eye(len(flow))
            flow = np.array([row / sum(row) for row in step]) @ flow
        if case.probe is None:
            row = np.mean([flow[token] for token in pooled_tokens(case.config)], axis=0)
        else:
            probe = naive_flow(case.probe[image][:, None], fusion, ratio, 0)[0]
            row = sum(share * flow[case.prefix + patch] for patch, share in enumerate(probe))
        patches = row[case.prefix :]
        maps.append((patches / sum(patches)).reshape(case.config.grid))
    return np.array(maps)


def test_attention_rollout(case: Case) -> None:
    last = case.config.num_layers - 1
    for fusion, function, ratio, start in (("mean", np.mean, 0.0, 0), ("max", max, 0.5, 0), ("min", min, 0.3, last)):
        options = {"head_fusion": fusion, "discard_ratio": ratio, "start_layer": start}
        got = visualize.attention_rollout(case.model, case.images, **options)
        equal(got, naive_rollout(case, function, ratio, start))
        np.testing.assert_allclose(got.sum(axis=(1, 2)), 1, atol=1e-5)


def test_class_attention(case: Case) -> None:
    rows = pooled_tokens(case.config)
    want = [sum(weights[:, :, row, case.prefix :] for row in rows) / len(rows) for weights in case.attention]
    if case.probe is not None:
        want.append(case.probe)
        np.testing.assert_allclose(case.probe.sum(axis=-1), 1)
    got = visualize.class_attention(case.model, case.images)
    equal(got, np.reshape(want, (len(want), len(case.images), case.config.num_heads, *case.config.grid)))


def test_token_norms_and_effective_rank(case: Case) -> None:
    norms = [[[math.sqrt(sum(token**2)) for token in image] for image in block] for block in case.tokens]
    equal(visualize.token_norms(case.model, case.images), norms)
    want = []
    for block in case.tokens:
        ranks = []
        for image in block:
            singular = np.linalg.svd(image, compute_uv=False)
            shares = [value / sum(singular) for value in singular if value > 0]
            ranks.append(math.exp(-sum(share * math.log(share) for share in shares)))
        want.append(sum(ranks) / len(ranks))
    equal(visualize.effective_rank(case.model, case.images), want)


def test_logit_lens(case: Case) -> None:
    got = visualize.logit_lens(case.model, case.images)
    weights = {weight.path: np.array(weight) for weight in case.model.weights}
    want = []
    for layers in range(1, case.config.num_layers + 1):  # a model that ends after so many blocks
        model = VisionTransformer(case.config.replace(num_layers=layers))
        model.set_weights([weights[weight.path] for weight in model.weights])
        logits = np.array(model(case.images))
        want.append(logits[:, pooled_tokens(case.config)].mean(axis=1) if logits.ndim == 3 else logits)
    equal(got, np.stack(want))


def naive_kernel(case: Case) -> np.ndarray:
    """Return the first kernel (height, width, channels, filters); a hybrid's is standardised."""
    if case.config.resnet is None:
        return values(case.model)["embedding/kernel"].astype(np.float64)
    kernel = values(case.model)["root/conv/kernel"].astype(np.float64)
    for i in range(kernel.shape[-1]):
        one = kernel[..., i] - kernel[..., i].mean()
        kernel[..., i] = one / (np.sqrt((one**2).mean()) + case.config.resnet.conv_epsilon)
    return kernel


def test_embedding_filters(case: Case) -> None:
    kernel = naive_kernel(case)
    samples = kernel.reshape(-1, kernel.shape[-1]).T
    _, vectors = np.linalg.eigh(np.cov(samples, rowvar=False))
    want = []
    for i in range(1, min(28, len(samples) - 1) + 1):
        component = vectors[:, -i]
        if max(component) < -min(component):
            component = -component
        want.append((component - min(component)) / (max(component) - min(component)))
    equal(visualize.embedding_filters(case.model), np.reshape(want, (-1, *kernel.shape[:3])))


def naive_positions(case: Case, block: int) -> np.ndarray:
    """Return the position embedding of every patch, added at the stem or at a block."""
    c, weights = case.config, values(case.model)
    if c.position == "sincos2d":
        return position.sincos2d(c.grid, c.hidden_size)[0].astype(np.float64)
    if c.position == "learned":
        return weights["position/embedding"][0, c.position_prefix_tokens :].astype(np.float64)
    x, y = (weights[f"position_{block}/{axis}_embedding"][0, c.position_prefix_tokens :] for axis in "xy")
    rows, columns = c.grid
    return np.array([np.concatenate([x[column], y[row]]) for row in range(rows) for column in range(columns)])


def test_position_similarity(case: Case) -> None:
    c = case.config
    if c.position == "relative":
        return
    for block in range(c.num_layers if c.position_place == "blocks" else 1):
        patches = naive_positions(case, block)
        want = [[a @ b / math.sqrt(sum(a * a) * sum(b * b)) for b in patches] for a in patches]
        got = visualize.position_similarity(case.model, block=block)
        equal(got, np.reshape(want, (*c.grid, *c.grid)))
        assert np.abs(got).max() <= 1


# Results known in advance


def test_attention_that_is_the_same_everywhere_is_measured_as_the_mean_of_all_distances() -> None:
    model = built(image_size=(24, 40), num_registers=1)
    for i in range(2):
        for weight in model.get_layer(f"block_{i}").attention.query.weights:
            weight.assign(np.zeros(weight.shape))
    places = [(y * 8, x * 8) for y in range(3) for x in range(5)]
    mean = np.mean([math.dist(a, b) for a in places for b in places])
    images = prepared(model.config)
    np.testing.assert_allclose(visualize.attention_distance(model, images), np.full((2, 4), mean), rtol=1e-5)
    np.testing.assert_allclose(visualize.attention_rollout(model, images), np.full((2, 3, 5), 1 / 15), rtol=1e-5)
    np.testing.assert_allclose(visualize.class_attention(model, images), np.full((2, 2, 4, 3, 5), 1 / 17), rtol=1e-5)


def test_there_are_as_many_filters_as_asked_for_or_as_there_are() -> None:
    for asked, given in ((3, 3), (28, 28), (1000, 31)):  # 32 filters minus their mean
        filters = visualize.embedding_filters(built(), num_filters=asked)
        assert filters.shape == (given, 8, 8, 3)
        np.testing.assert_array_equal(filters.reshape(given, -1).min(axis=1), np.zeros(given))
        np.testing.assert_array_equal(filters.reshape(given, -1).max(axis=1), np.ones(given))


def test_filters_of_one_number_are_grey() -> None:
    model = built(image_size=2, patch_size=1, num_channels=1)
    np.testing.assert_array_equal(visualize.embedding_filters(model), np.full((1, 1, 1, 1), 0.5, np.float32))


def test_of_a_row_the_lowest_patches_go_the_first_of_equals_first_and_no_other_token() -> None:
    row = np.array([[0.0, 0.4, 0.1, 0.3, 0.1, 0.1]])
    np.testing.assert_array_equal(attention._discard_lowest(row.copy(), 1, 0.4), [[0.0, 0.4, 0, 0.3, 0, 0.1]])
    np.testing.assert_array_equal(attention._discard_lowest(row.copy(), 1, 0.0), row)
    hundred = attention._discard_lowest(np.ones((1, 100)), 0, 0.29)  # 28.999999999999996 in floating point
    assert hundred.sum() == 71


def test_rows_without_weight_and_the_rank_of_a_matrix() -> None:
    np.testing.assert_array_equal(attention._normalize_rows(np.array([[0.0, 0.0], [1.0, 3.0]])), [[0, 0], [0.25, 0.75]])
    for matrix, rank in ((np.ones((4, 3)), 1), (np.eye(5), 5), (np.full((2, 2), np.nan), np.nan)):
        assert tokens._rank(matrix) == pytest.approx(rank, nan_ok=True)


def test_an_embedding_of_zeros_is_like_no_other() -> None:
    model = VisionTransformer(tiny())
    embedding = np.ones((1, 17, 32))
    embedding[0, 1] = 0
    model.get_layer("position").embedding.assign(embedding)
    similarity = visualize.position_similarity(model)
    assert not similarity[0, 0].any()
    np.testing.assert_allclose(similarity[3, 3].ravel()[1:], 1, atol=1e-6)


# Models of users


ARRAYS: dict[str, Callable[..., np.ndarray]] = {
    "attention_maps": visualize.attention_maps,
    "attention_distance": visualize.attention_distance,
    "attention_rollout": visualize.attention_rollout,
    "class_attention": visualize.class_attention,
    "token_norms": visualize.token_norms,
    "effective_rank": visualize.effective_rank,
    "logit_lens": visualize.logit_lens,
}


def all_arrays(model: Any, images: np.ndarray) -> dict[str, np.ndarray]:
    of_weights = (visualize.embedding_filters, visualize.position_similarity)
    arrays = {function.__name__: function(model) for function in of_weights}
    return arrays | {name: function(model, images) for name, function in ARRAYS.items()}


@pytest.mark.full
def test_models_saved_and_wrapped_give_the_same_arrays(tmp_path: Path) -> None:
    model = built(**VARIANTS["map"])
    images = prepared(model.config)
    graph = [(layer.name, len(layer._inbound_nodes)) for layer in model.layers]
    want = all_arrays(model, images)
    assert [(layer.name, len(layer._inbound_nodes)) for layer in model.layers] == graph  # looking changes nothing
    inside = keras.Sequential([keras.Input(model.input_shape[1:]), keras.layers.RandomFlip("horizontal"), model])
    pixels = keras.Input((40, 40, 3))
    augmented = keras.layers.RandomCrop(32, 32)(keras.layers.Rescaling(1 / 127.5, offset=-1)(pixels))
    outer = keras.Model(pixels, keras.layers.Dense(3)(inside(augmented)))
    outer.save(tmp_path / "outer.keras")
    loaded = keras.saving.load_model(tmp_path / "outer.keras")
    for each in (outer, model, loaded):  # a call inside another model has changed nothing
        for name, got in all_arrays(each, images).items():
            np.testing.assert_array_equal(got, want[name], err_msg=name)


@pytest.mark.full
def test_images_one_by_one_give_what_all_at_once_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(**VARIANTS["map"])
    images = prepared(model.config, batch=3)
    want = all_arrays(model, images)
    assert len(_models.split_batch(model.config, images)) == 1
    monkeypatch.setattr(_models, "MAX_BYTES", 1)
    assert [len(part) for part in _models.split_batch(model.config, images)] == [1, 1, 1]
    for array, got in all_arrays(model, images).items():
        np.testing.assert_allclose(got, want[array], rtol=1e-5, atol=1e-6, err_msg=array)  # float32's noise


def test_a_model_fine_tuned_at_another_size_is_seen_as_it_now_is() -> None:
    model = built(num_registers=2).resized((48, 40))
    images = prepared(model.config)
    before = visualize.attention_maps(model, images)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
    model.train_on_batch(images, np.array([1, 3]))
    after = case_of(model.with_config(model.config), images)  # a new model with the same weights
    got = visualize.attention_maps(model, images)
    assert np.abs(got - before).max() > 1e-3
    equal(got, after.attention)
    equal(visualize.attention_rollout(model, images), naive_rollout(after, np.mean, 0.0, 0))
    assert visualize.position_similarity(model).shape == (6, 5, 6, 5)


class Subclassed(keras.Model):
    """Return a user's own model around ours."""

    def __init__(self, parts: list[Any]) -> None:
        super().__init__()
        self.parts = parts


def test_the_one_vision_transformer_of_a_model_is_found_and_others_are_refused() -> None:
    model = VisionTransformer(tiny(), name="student")
    assert _models.vision_transformer(Subclassed([keras.layers.Dense(2), model, model])) is model
    two = Subclassed([model, VisionTransformer(tiny(), name="teacher")])
    one_other = keras.Sequential([keras.layers.Dense(2)])
    for received, said in (
        (one_other, "Sequential"),
        (two, r"\['student', 'teacher'\]"),
        ("ViT-B/16", "Received: str"),
    ):
        with pytest.raises(ValueError, match=said):
            visualize.embedding_filters(received)


@pytest.mark.full
def test_bfloat16_and_float64_models_give_float32_arrays() -> None:
    model = built(**VARIANTS["map"])
    low = model.with_config(model.config, dtype="mixed_bfloat16")
    images = prepared(model.config)
    want = all_arrays(model, images)
    for array, got in all_arrays(low, images).items():
        assert got.dtype == np.float32
        # 8 bits of mantissa through two blocks; a wrong axis or a missing norm gives errors as large as the values.
        assert np.abs(got - want[array]).mean() < 0.05 * np.abs(want[array]).max(), array
    # The exponential, the sum of up to 21 terms and the quotient may each be rounded to 8 bits.
    np.testing.assert_allclose(visualize.attention_maps(low, images).sum(axis=-1), 1, atol=2e-2)
    np.testing.assert_allclose(visualize.attention_rollout(low, images).sum(axis=(1, 2)), 1, atol=1e-5)

    exact = model.with_config(model.config, dtype="float64")
    arrays = all_arrays(exact, images.astype(np.float64))
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}


# Invalid input


@pytest.fixture(scope="module")
def plain() -> VisionTransformer:
    return VisionTransformer(tiny())


def test_images_may_be_tensors_and_lists_and_others_are_refused_with_the_way_to_prepare_them(
    plain: VisionTransformer,
) -> None:
    images = prepared(plain.config)
    want = visualize.attention_distance(plain, images)
    for given in (keras.ops.convert_to_tensor(images), list(images)):
        np.testing.assert_array_equal(visualize.attention_distance(plain, given), want)
    shapes = ((32, 32, 3), (1, 48, 32, 3), (1, 32, 32, 1), (0, 32, 32, 3))
    wrong: list[Any] = [np.zeros(shape, np.float32) for shape in shapes]
    wrong += [np.zeros((1, 32, 32, 3), np.uint8), [np.zeros((32, 32, 3)), np.zeros((16, 16, 3))], "cat.jpg", None]
    for function in ARRAYS.values():
        for given in wrong:
            with pytest.raises(ValueError, match=r"\(batch, 32, 32, 3\): `model\.preprocess"):
                function(plain, given)


ROLLOUT: dict[str, tuple[Any, ...]] = {
    "head_fusion": ("median",),
    "discard_ratio": (1.0, -0.1, math.nan, "half"),
    "start_layer": (2, -1, 0.5),
}


def test_options_outside_their_range_are_refused(plain: VisionTransformer) -> None:
    for option, wrong in ROLLOUT.items():
        for value in wrong:
            with pytest.raises(ValueError, match=f"{option} .*Received: {value!r}"):
                visualize.attention_rollout(plain, prepared(plain.config), **{option: value})
    for number in (0, -1, 2.5, None):
        with pytest.raises(ValueError, match=f"num_filters .*Received: {number}"):
            visualize.embedding_filters(plain, num_filters=number)  # type: ignore[arg-type]
    for block in (2, -1, "0"):
        with pytest.raises(ValueError, match=f"block .*Received: {block!r}"):
            visualize.position_similarity(plain, block=block)  # type: ignore[arg-type]


def test_a_model_without_the_part_that_is_asked_for_is_refused() -> None:
    for kind, place in (("none", "stem"), ("relative", "shared")):
        with pytest.raises(ValueError, match=f"position='{kind}'"):
            visualize.position_similarity(VisionTransformer(tiny(position=kind, position_place=place)))
    headless = VisionTransformer(tiny(num_classes=0))
    with pytest.raises(ValueError, match="num_classes=0"):
        visualize.logit_lens(headless, prepared(headless.config))


def test_the_arrays_need_no_matplotlib() -> None:
    for module in ("_models", "weights", "attention", "tokens"):
        assert not imported_packages(f"visualize.{module}") & {"matplotlib", "PIL"}, module


def test_a_probe_of_all_tokens_with_heads_of_its_own_is_shown_as_their_mean() -> None:
    model = built(classifier="map", num_registers=2, pool_heads=2, pool_prefix=True)
    images = prepared(model.config)
    weights, x = values(model), np.asarray(model.features(images, ["encoder_norm"])["encoder_norm"])
    query, keys = (
        np.einsum("...d,dhk->...hk", inputs, weights[f"pool/attention/{name}/kernel"])
        + weights[f"pool/attention/{name}/bias"]
        for name, inputs in (("query", weights["pool/probe"][0, 0]), ("key", x))
    )
    want = scipy.special.softmax(np.einsum("hk,nthk->nht", query, keys) / 4, axis=-1)  # heads of 16
    got = visualize.class_attention(model, images)[-1]
    assert got.shape == (2, 4, 4, 4)
    for head in range(4):
        np.testing.assert_allclose(got[:, head].reshape(2, 16), want[..., 2:].mean(axis=1), rtol=1e-4)
    rows = visualize.attention_rollout(model, images)
    np.testing.assert_allclose(rows.sum(axis=(1, 2)), 1, rtol=1e-5)
