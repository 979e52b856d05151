"""Masked patch prediction: colours and corruption against NumPy, the model against the encoder that it wraps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import digits
from keras_vit.model.config import ViTConfig
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train import masked_patch
from keras_vit.train.masked_patch import Corruption, MaskedPatchModel
from tiny_models import VARIANTS, built, prepared, randomised, tiny

SEED = tf.constant([3, 4], tf.int32)
# float32 holds 6e-8 of a value; sums of some hundred products of size 1 stay far below this.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
IMAGENET = {"preprocessing": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}}
CONFIGS: dict[str, dict[str, Any]] = {
    "square": {},
    "ImageNet's mean": IMAGENET,
    "oblong patches": {"patch_size": (4, 8)},
    "oblong images": {"image_size": (32, 16), **IMAGENET},
    "grey": {"num_channels": 1},
    "a rest that fills no patch": {"image_size": (37, 34)},
    "hybrid": VARIANTS["hybrid"],
}
# A corruption without masks and swaps, for two images of 16 patches.
OWN = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 16))
NOTHING = np.zeros((2, 16), bool)


def wrapped(dtype: str | None = None, **changes: Any) -> MaskedPatchModel:
    """Return a masked patch model around a tiny encoder, with random weights."""
    return randomised(MaskedPatchModel(VisionTransformer(tiny(**changes), dtype=dtype)))


def uint8_images(config: ViTConfig, seed: int = 0) -> np.ndarray:
    """Return images whose regions of 8 pixels differ in colour, so that every class of brightness occurs."""
    random = np.random.default_rng(seed)
    height, width = np.broadcast_to(config.image_size, 2)
    base = random.integers(0, 256, (4, -(-height // 8), -(-width // 8), config.num_channels))
    pixels = base.repeat(8, axis=1).repeat(8, axis=2)[:, :height, :width] + random.integers(
        -40, 40, (4, height, width, 1)
    )
    return np.clip(pixels, 0, 255).astype(np.uint8)


def numpy_classes(images: np.ndarray, grid: tuple[int, int], stride: tuple[int, int]) -> np.ndarray:
    """Compute the three high bits of each patch's mean colour, from the original pixels."""
    found = np.zeros((len(images), *grid), np.int32)
    for image, row, column in np.ndindex(found.shape):
        top, left = row * stride[0], column * stride[1]
        patch = images[image, top : top + stride[0], left : left + stride[1]].astype(np.float64)
        for mean in patch.mean(axis=(0, 1)):
            found[image, row, column] = found[image, row, column] * 8 + (int(np.rint(mean)) >> 5)
    return found.reshape(len(images), -1)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:keras_vit. images of")
def test_classes_are_the_high_bits_of_mean_colours() -> None:
    for name, changes in CONFIGS.items():
        config = tiny(**changes)
        images = uint8_images(config)
        found = masked_patch.colour_classes(VisionTransformer(config).preprocess(images), config)
        assert found.dtype == tf.int32
        np.testing.assert_array_equal(found, numpy_classes(images, config.grid, config.stride), err_msg=name)


def test_where_a_stem_pads_the_image_its_pixels_alone_count() -> None:
    # 28 pixels are two tokens of 16: TensorFlow's SAME adds two zero pixels on either side.
    config = tiny(**VARIANTS["hybrid"] | {"image_size": 28, "resnet": {"num_layers": (1, 1, 1), "width_factor": 0.5}})
    assert config.grid == (2, 2) and config.stride == (16, 16)
    images = np.zeros((1, 28, 28, 3), np.uint8)
    images[:, :14, :14] = 255
    found = masked_patch.colour_classes(VisionTransformer(config).preprocess(images), config)
    np.testing.assert_array_equal(found, [[511, 0, 0, 0]])


def test_every_plain_colour_has_its_own_high_bits_whatever_float32_made_of_it() -> None:
    values = np.arange(256).repeat(8 * 8 * 3).reshape(256, 8, 8, 3).astype(np.uint8)
    for changes in ({}, IMAGENET):
        config = tiny(image_size=8, patch_size=4, **changes)
        found = masked_patch.colour_classes(VisionTransformer(config).preprocess(values), config)
        np.testing.assert_array_equal(found, (np.arange(256) // 32 * 73)[:, None].repeat(4, axis=1))
    beyond = np.stack([np.full((32, 32, 3), value, np.float32) for value in (-1.2, 1.3)])
    np.testing.assert_array_equal(masked_patch.colour_classes(beyond, tiny())[:, 0], [0, 511])


def test_exactly_half_of_every_image_is_corrupted_as_the_seed_says() -> None:
    for patches, corrupted in ((2, 1), (3, 2), (49, 24), (196, 98)):
        drawn = masked_patch.corruption(SEED, batch=50, patches=patches)
        np.testing.assert_array_equal(np.sum(drawn.corrupted, axis=1), np.full(50, corrupted))
    drawn, again, other = (masked_patch.corruption(seed, batch=4, patches=16) for seed in (SEED, SEED, SEED + 1))
    for field, same, different in zip(drawn, again, other, strict=True):
        assert np.array_equal(field, same) and not np.array_equal(field, different)


def test_the_shares_are_those_of_the_paper() -> None:
    batch, patches = 8000, 4  # few patches: a patch that replaces itself would be seen
    corrupted, masked, source = (
        np.asarray(field) for field in masked_patch.corruption(SEED, batch=batch, patches=patches)
    )
    swapped = source != np.arange(patches)
    assert not (masked & ~corrupted).any() and not (swapped & ~corrupted).any() and not (swapped & masked).any()
    assert source.min() >= 0 and source.max() < patches
    kept = corrupted & ~masked & ~swapped
    for share, happened in ((0.8, masked), (0.1, swapped), (0.1, kept)):
        # Five deviations of a binomial of 16,000: once in two million seeds.
        bound = 5 * (share * (1 - share) / corrupted.sum()) ** 0.5
        assert abs(happened.sum() / corrupted.sum() - share) < bound
    # Every position is corrupted in half of the images, and all other patches replace it equally often.
    assert np.abs(corrupted.mean(axis=0) - 0.5).max() < 5 * (0.25 / batch) ** 0.5
    distances = np.bincount(((source - np.arange(patches)) % patches)[swapped], minlength=patches)[1:]
    expected = swapped.sum() / (patches - 1)
    assert distances.min() > 0 and np.abs(distances - expected).max() < 5 * expected**0.5


@pytest.mark.parametrize("variant", ["pure", "hybrid", "norm after the mean", "registers", "grey"])
def test_uncorrupted_it_is_the_encoder_with_a_head_on_every_patch(variant: str) -> None:
    model = wrapped(**VARIANTS[variant])
    config = model.encoder.config
    images = prepared(config)
    patches = config.grid[0] * config.grid[1]
    own = np.broadcast_to(np.arange(patches, dtype=np.int32), (2, patches))
    found = model(images, corruption=Corruption(own >= 0, own < 0, own))
    assert found.shape == (2, patches, 8**config.num_channels) and found.dtype == tf.float32
    last = "block_1" if config.final_norm == "pooled" else "encoder_norm"
    tokens = model.encoder.features(images, last)[last]
    if config.final_norm == "pooled":
        tokens = model.encoder.get_layer("encoder_norm")(tokens)
    expected = tokens[:, config.num_prefix_tokens :] @ model.colours.kernel + model.colours.bias
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_a_swapped_embedding_is_that_of_the_other_patch() -> None:
    model = wrapped()
    images = prepared(model.encoder.config)
    source = np.stack([np.random.default_rng(seed).permutation(16) for seed in range(2)]).astype(np.int32)
    cells = images.reshape(2, 4, 8, 4, 8, 3).swapaxes(2, 3).reshape(2, 16, 8, 8, 3)
    moved = np.take_along_axis(cells, source[..., None, None, None], axis=1)
    moved = moved.reshape(2, 4, 4, 8, 8, 3).swapaxes(2, 3).reshape(images.shape)
    found = model(images, corruption=Corruption(~NOTHING, NOTHING, source))
    np.testing.assert_allclose(found, model(moved, corruption=Corruption(NOTHING, NOTHING, OWN)), **CLOSE)


@pytest.mark.full
def test_of_a_masked_patch_nothing_is_seen_and_all_others_are() -> None:
    model = wrapped()
    images = prepared(model.encoder.config)
    masked = NOTHING.copy()
    masked[:, 5] = True
    corruption = Corruption(masked, masked, OWN)
    plain = model(images, corruption=corruption).numpy()
    for patch in range(16):
        row, column = divmod(patch, 4)
        other = images.copy()
        other[:, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] *= -1
        assert np.array_equal(model(other, corruption=corruption).numpy(), plain) == (patch == 5)
    model.mask_embedding.assign(model.mask_embedding + 1)
    assert not np.allclose(model(images, corruption=corruption), plain)


def test_the_loss_is_the_mean_over_the_corrupted_patches_of_each_image() -> None:
    model = wrapped()
    images = prepared(model.encoder.config, batch=3)
    seen: list[Corruption] = []

    def spy(images: Any, corruption: Corruption, training: bool) -> Any:
        seen.append(corruption)
        assert training
        return model(images, corruption=corruption, training=training)

    spy.encoder = model.encoder  # type: ignore[attr-defined]
    losses, figures = masked_patch.objective(model.encoder).losses(spy, {"image": images}, SEED)
    logits = np.asarray(model(images, corruption=seen[0]), np.float64)
    classes = np.asarray(masked_patch.colour_classes(images, model.encoder.config))
    logarithms = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for image in range(3):
        places = np.flatnonzero(seen[0].corrupted[image])
        expected = -np.mean([logarithms[image, place, classes[image, place]] for place in places])
        np.testing.assert_allclose(losses[image], expected, rtol=1e-5)
        right = np.mean([logits[image, place].argmax() == classes[image, place] for place in places])
        np.testing.assert_allclose(figures["accuracy"][image], right, rtol=1e-6)


@pytest.mark.full
def test_it_learns_the_colours_of_digits_and_the_encoder_goes_on_to_classes() -> None:
    config = tiny(image_size=16, patch_size=4, num_classes=0, num_layers=1)
    objective = masked_patch.objective(VisionTransformer(config))
    model = objective.network
    before = {variable.path: variable.numpy() for variable in model.trainable_variables}
    images = tf.constant(model.encoder.preprocess(digits.load().train_images[:64]))
    optimizer = keras.optimizers.Adam(3e-3)
    optimizer.build(model.trainable_variables)

    @tf.function
    def learn(seed: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(objective.losses(model, {"image": images}, seed)[0])
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = [float(learn(tf.constant([0, number], tf.int32))) for number in range(30)]
    # ln 512 = 6.24 at first: all colours are equally likely. Digits have eight greys: predicting their frequencies
    # alone gives less than ln 8.
    assert losses[0] == pytest.approx(np.log(512), rel=1e-5) and losses[-1] < np.log(8)
    assert all(np.any(variable.numpy() != before[variable.path]) for variable in model.trainable_variables)
    classifier = model.encoder.with_config(config.replace(num_classes=10))
    np.testing.assert_array_equal(
        classifier.features(images[:2])["pre_logits"], model.encoder.features(images[:2])["pre_logits"]
    )


def test_frozen_layers_stay_frozen_and_what_cannot_be_predicted_is_refused() -> None:
    encoder = built()
    encoder.get_layer("block_0").trainable = False
    paths = {variable.path for variable in MaskedPatchModel(encoder).trainable_variables}
    assert "block_1/mlp/dense1/kernel" in paths and not {path for path in paths if path.startswith("block_0")}
    for changes, message in (({"image_size": 8}, "two or more"), ({"num_channels": 12}, "up to 4 channels")):
        with pytest.raises(ValueError, match=message):
            MaskedPatchModel(VisionTransformer(tiny(**changes)))
