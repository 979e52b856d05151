"""Random crops, flips, shifts, mixup and RandAugment: the right distributions, and the official pixels."""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance

from keras_vit.model import preprocess
from keras_vit.model.images import decode_image
from keras_vit.train.data import augment, pipeline
from keras_vit.train.data import augment as module
from keras_vit.train.data.augment import OPERATIONS, Draws, randaugment

sklearn_datasets = pytest.importorskip("sklearn.datasets")
stats = pytest.importorskip("scipy.stats")
PHOTO = Image.open(sorted(Path(sklearn_datasets.__file__).parent.glob("images/*.jpg"))[0]).convert("RGB")
# Samples are seeded, so a test that passes once always passes. This is the smallest p-value that a test accepts.
UNLIKELY = 1e-4


def encoded(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()


def drawn(draw: Callable[[Any], Any], count: int) -> np.ndarray:
    """Return the results of a function for the seeds 0 .. count - 1."""
    seeds = tf.data.Dataset.range(count).map(lambda number: draw(tf.stack([np.int64(7), number])))
    return np.array(list(seeds.batch(count).as_numpy_iterator())[0])


# Decoding and crops


def test_training_decodes_as_predicting_does(tmp_path: Path) -> None:
    kinds = [("jpeg", mode) for mode in ("RGB", "L", "CMYK")]
    for kind, mode in [*kinds, *(("png", mode) for mode in ("RGB", "L", "P", "RGBA", "LA", "1"))]:
        path = tmp_path / f"{mode}.{kind}"
        path.write_bytes(encoded(PHOTO.resize((77, 51)).convert(mode), format=kind))
        np.testing.assert_array_equal(
            pipeline.decode(tf.constant(path.read_bytes())), preprocess.decode(path), err_msg=path.name
        )


def test_a_crop_of_a_file_is_that_of_its_pixels() -> None:
    for options in ({"quality": 50, "subsampling": 0}, {"quality": 90, "subsampling": 2}):
        jpeg = encoded(PHOTO, format="jpeg", **options)
        whole = decode_image(jpeg)
        for number in range(8):
            of_file, of_array = (
                augment.inception_crop(image, (3, number), min_area=0.05).numpy()
                for image in (tf.constant(jpeg), whole)
            )
            assert of_file.shape == of_array.shape
            # Chroma upsampling has no neighbours at the edge of the part, so only the border may differ.
            np.testing.assert_array_equal(of_file[2:-2, 2:-2], of_array[2:-2, 2:-2])
    png, pixels = tf.constant(encoded(PHOTO, format="png")), tf.constant(np.asarray(PHOTO))
    want = augment.inception_crop(pixels, (5, 1), min_area=0.3)
    np.testing.assert_array_equal(augment.inception_crop(png, (5, 1), min_area=0.3), want)


def test_an_inception_crop_has_the_official_areas_and_aspects() -> None:
    height, width = 300, 400
    for min_area in (0.05, 0.5):

        def box(seed: Any, least: float = min_area) -> Any:
            return augment._sample_window((height, width, 3), seed, least)

        top, left, rows, columns = drawn(box, 2000).T
        assert (top >= 0).all() and (left >= 0).all()
        assert (top + rows <= height).all() and (left + columns <= width).all()
        # Sides are whole pixels: half a pixel of the shortest side, 58, is 1 % of a ratio and 2 % of an area.
        aspects, areas = columns / rows, rows * columns / (height * width)
        assert 0.75 * 0.98 < aspects.min() < 0.8 and 1.28 < aspects.max() < 1.33 * 1.02
        assert min_area * 0.97 < areas.min() < min_area + 0.05 and 0.9 < areas.max() <= 1


def test_every_place_is_as_likely_as_the_others() -> None:
    image = tf.reshape(tf.range(30), (5, 6, 1))  # a 3x4 part fits at 3 x 3 places
    corners = drawn(
        lambda seed: augment.random_crop(image, tf.random.stateless_uniform((2,), seed), (3, 4))[0, 0, 0], 1800
    )
    places, counts = np.unique(corners, return_counts=True)
    assert places.tolist() == [0, 1, 2, 6, 7, 8, 12, 13, 14]
    assert stats.chisquare(counts).pvalue > UNLIKELY


# Flip and shift


def test_half_of_the_images_are_mirrored() -> None:
    image = tf.reshape(tf.range(6), (1, 3, 2))
    flipped = drawn(lambda seed: augment.random_flip(image, tf.random.stateless_uniform((), seed)), 1000)
    mirrored = (flipped == np.asarray(image)[:, ::-1]).all(axis=(1, 2, 3))
    assert (mirrored ^ (flipped == np.asarray(image)).all(axis=(1, 2, 3))).all()
    assert stats.binomtest(int(mirrored.sum()), 1000).pvalue > UNLIKELY


def test_a_shift_moves_by_whole_pixels_and_lets_black_in() -> None:
    image = np.arange(1, 129, dtype=np.uint8).reshape(8, 16, 1)
    for share, most in ((0.125, (1, 2)), (0.25, (2, 4)), (0.01, (0, 0))):

        def shift(seed: Any, share: float = share) -> Any:
            return augment.random_shift(image, tf.random.stateless_uniform((2,), seed), max_share=share)

        padded = np.pad(image, [*((side, side) for side in most), (0, 0)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, image.shape).reshape(-1, *image.shape)
        assert {one.tobytes() for one in drawn(shift, 400)} == {window.tobytes() for window in windows}


# Mixup


def test_the_share_is_the_larger_of_a_beta_and_its_rest() -> None:
    for parameter in (0.2, 0.8, 5.0):
        shares = drawn(lambda seed, of=parameter: augment.sample_mixup_weight(seed, parameter=of), 3000)
        assert shares.dtype == np.float32 and shares.min() >= 0.5 and shares.max() <= 1
        cdf = stats.beta(parameter, parameter).cdf
        # The larger of a and 1 - a lies below x when a lies in (1 - x, x), which is twice as likely as in (1/2, x).
        assert stats.kstest(shares, lambda x, cdf=cdf: 2 * cdf(x) - 1).pvalue > UNLIKELY, parameter
    assert drawn(lambda seed: augment.sample_mixup_weight(seed, parameter=1e-4), 200).min() > 0.99


def test_each_row_is_mixed_with_the_one_before_it() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)
    mixed = augment.mixup(tf.constant(rows), tf.constant(0.75))
    # One rounding each of two products and a sum.
    np.testing.assert_allclose(mixed, 0.75 * rows + 0.25 * np.roll(rows, 1, axis=0), rtol=1e-6, atol=1e-6)


# ---- RandAugment


SMALL_PHOTO = PHOTO.resize((111, 96))
SIGNS = {1: Draws(sign=0.1), -1: Draws(sign=0.9)}

# CRC-32 of what big_vision's pp/autoaugment.py (commit 538b8a8) makes of `formula()` at the magnitudes 0, 5, 10, 15
# and 20, run with the libraries of its time: TensorFlow 2.12, TensorFlow Addons 0.20, NumPy 1.23. Where a direction is
# drawn, the second row is the negative one.
SAME = "c59a4059"  # the image as it was
GREY = "3877d4b0"  # 128 everywhere: the image has 61 x 83 pixels, and 100 are moved or cut out
OFFICIAL = {
    "AutoContrast": ["11cba381 11cba381 11cba381 11cba381 11cba381"],
    "Equalize": ["9112a4ab 9112a4ab 9112a4ab 9112a4ab 9112a4ab"],
    "Invert": ["4d074696 4d074696 4d074696 4d074696 4d074696"],
    "Posterize": [f"23d35d01 ba3d8f6d 33787d5f a34ecf07 {SAME}"],
    "Solarize": ["4d074696 3eb97095 4d074696 3eb97095 4d074696"],
    "SolarizeAdd": [f"{SAME} 59bf7196 3cb6f14a 624f94e0 63594cf4"],
    "Contrast": [f"c242d503 {SAME} 14fa79a9 f605a588 3231fb24"],
    "Brightness": [f"03443c66 {SAME} 6670a0ef bc7feacf 4adde236"],
    "ShearX": [f"{SAME} ca618dbb 9c02716b 196948bb 3ec91eba", f"{SAME} 1e8f694e e9b87fb3 6a46664c 7ac1db95"],
    "ShearY": [f"{SAME} 7bba253e b7f0b05e f6e3b33e 706bb949", f"{SAME} a8933d51 16ae5b7d 704f8766 4f5dfd9a"],
    "TranslateX": [f"{SAME} 8f0ba293 {GREY} {GREY} {GREY}", f"{SAME} 37d65fa2 {GREY} {GREY} {GREY}"],
    "TranslateY": [f"{SAME} 9743903c {GREY} {GREY} {GREY}", f"{SAME} a314f86c {GREY} {GREY} {GREY}"],
    "Cutout": [f"{SAME} d874d4fe 3b101ca1 {GREY} {GREY}"],
}


def formula() -> np.ndarray:
    y, x, channel = np.mgrid[:61, :83, :3]
    return (((x * 3 + y * 2 + channel * 40) % 200 + 30) ^ (x * y // 40 % 16)).astype(np.uint8)


def applied(name: str, image: Any, magnitude: float, draws: Draws = SIGNS[1]) -> np.ndarray:
    return OPERATIONS[name](tf.constant(np.asarray(image)), magnitude, draws).numpy()


def test_every_magnitude_is_the_official_one_to_the_bit() -> None:
    found = {}
    for name, rows in OFFICIAL.items():
        images = [[applied(name, formula(), m, SIGNS[sign]) for m in (0, 5, 10, 15, 20)] for sign in SIGNS]
        digests = [" ".join(f"{zlib.crc32(image.tobytes()):08x}" for image in row) for row in images]
        found[name] = digests[: len(rows)]
    assert found == OFFICIAL


# Against Pillow


def test_colour_sharpness_and_rotation_are_pillows() -> None:
    for magnitude in (0, 3, 15, 20):
        factor = magnitude / 10 * 1.8 + 0.1
        for name, enhancement in (("Color", ImageEnhance.Color), ("Sharpness", ImageEnhance.Sharpness)):
            difference = np.abs(
                applied(name, SMALL_PHOTO, magnitude) - np.int32(enhancement(SMALL_PHOTO).enhance(factor))
            )
            # The image that is blended in may be off by one: ours is rounded down, Pillow's to the nearest; our grey
            # weights are (2989, 5870, 1140), and Pillow's (299, 587, 114). One level more for rounding the blend.
            assert difference.max() <= 1 + np.ceil(abs(1 - factor)), (name, magnitude)
    width, height = SMALL_PHOTO.size
    right, bottom = (width - 1) / 2, (height - 1) / 2
    for magnitude, sign in itertools.product((0.0, 3.17, 18.3), SIGNS):
        angle = np.radians(3 * sign * magnitude)
        sin, cos = np.sin(angle), np.cos(angle)
        a, b, c = cos, -sin, right - cos * right + sin * bottom
        d, e, f = sin, cos, bottom - sin * right - cos * bottom
        # Pillow's pixels have their centres at halves, and it rounds down.
        halves = (a, b, c + 0.5 - (a + b) / 2, d, e, f + 0.5 - (d + e) / 2)
        way, nearest = Image.Transform.AFFINE, Image.Resampling.NEAREST
        want = SMALL_PHOTO.transform(SMALL_PHOTO.size, way, halves, nearest, fillcolor=(module.FILL,) * 3)
        different = (applied("Rotate", SMALL_PHOTO, magnitude, SIGNS[sign]) != np.asarray(want)).any(axis=-1)
        # Pillow computes in 1/65536 of a pixel, which adds up to 1/600 over 111 pixels: this share of pixels, in two
        # directions, may come from the neighbour.
        assert np.mean(different) <= (2 / 600 if magnitude else 0), (magnitude, sign)


def test_color_blends_with_tensorflows_grey() -> None:
    # All colours in steps of 5, rounded in the official code's order. At magnitude 0 a tenth of the image is left, and
    # the grey may differ by one where it is a whole number.
    image = np.stack(np.meshgrid(*[np.arange(0, 256, 5)] * 3), axis=-1).reshape(52, -1, 3).astype(np.uint8)
    grey = tf.image.rgb_to_grayscale(image).numpy().astype(np.float32)
    want = (grey + np.float32(0.1) * (image - grey)).astype(np.uint8)
    assert np.mean(applied("Color", image, 0) != want) < 1e-3


def test_cutout_is_cut_off_at_the_border() -> None:
    image = np.zeros((100, 120, 3), np.uint8)
    got = applied("Cutout", image, 5, Draws(y=0.1, x=0.95))  # 40 by 40 around (10, 114)
    want = image.copy()
    want[:30, 94:] = module.FILL
    np.testing.assert_array_equal(got, want)


# Any image


def test_small_grey_and_flat_images_are_taken() -> None:
    random, grey = np.random.default_rng(0), formula()[..., :1]
    for name in OPERATIONS:
        for size in ((1, 1), (2, 3), (7, 300)):
            image = random.integers(0, 256, (*size, 3), np.uint8)
            assert applied(name, image, 20).shape == (*size, 3), name
        # A grey image becomes what three equal channels become, and it has no colour to change.
        want = grey if name == "Color" else applied(name, np.repeat(grey, 3, axis=-1), 15)[..., :1]
        np.testing.assert_array_equal(applied(name, grey, 15), want, err_msg=name)
    flat = np.full((9, 9, 3), (0, 7, 255), np.uint8)
    for name in ("AutoContrast", "Equalize"):
        np.testing.assert_array_equal(applied(name, flat, 10), flat)


# The random choice


def test_operations_and_directions_are_equally_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(number: int) -> Callable[[Any, float, Draws], Any]:
        return lambda image, magnitude, draws: tf.fill((1, 1, 1), tf.cast(2 * number + 2 * draws.sign, tf.uint8))

    monkeypatch.setattr(module, "OPERATIONS", {name: told(number) for number, name in enumerate(OPERATIONS)})
    image = tf.zeros((1, 1, 1), tf.uint8)
    stream = tf.data.Dataset.range(3200).map(lambda i: randaugment(image, layers=1, magnitude=0, seed=(i, 0)))
    seen = np.array(list(stream.as_numpy_iterator())).ravel()
    assert stats.chisquare(np.bincount(seen, minlength=32)).pvalue > UNLIKELY


def test_layers_follow_one_another_with_draws_of_their_own() -> None:
    image, seed = tf.constant(formula()), (4, 2)
    want, names = image, list(OPERATIONS)
    for which, *draws in tf.random.stateless_uniform((3, 4), seed).numpy():
        want = OPERATIONS[names[int(which * 16)]](want, 9, Draws(*draws))
    np.testing.assert_array_equal(randaugment(image, layers=3, magnitude=9, seed=seed), want)
