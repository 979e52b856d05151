"""RandAugment's operations agree with the official code and with Pillow, and are chosen with the right frequencies."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance

from keras_vit.train.data import randaugment as module
from keras_vit.train.data.randaugment import OPERATIONS, Draws, randaugment

sklearn_datasets = pytest.importorskip("sklearn.datasets")
stats = pytest.importorskip("scipy.stats")
PHOTO = Image.open(sorted(Path(sklearn_datasets.__file__).parent.glob("images/*.jpg"))[0]).convert("RGB")
PHOTO = PHOTO.resize((111, 96))
UNLIKELY = 1e-4  # smallest accepted p-value; samples are seeded, so a test that passes once always passes
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


def sharpened(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(factor)


def from_grey(image: Image.Image, factor: float) -> Image.Image:
    pixels = image.width * image.height // 256  # the official code's "mean"
    return Image.blend(Image.new("RGB", image.size, (pixels,) * 3), image, factor)


# Name, Pillow's function, and how far the image that is blended in may be off. Ours is rounded down, Pillow's to the
# nearest; our grey weights are (2989, 5870, 1140), and Pillow's (299, 587, 114).
ENHANCEMENTS: list[tuple[str, Callable[[Image.Image, float], Image.Image], int]] = [
    ("Brightness", lambda image, factor: ImageEnhance.Brightness(image).enhance(factor), 0),
    ("Contrast", from_grey, 0),
    ("Color", lambda image, factor: ImageEnhance.Color(image).enhance(factor), 1),
    ("Sharpness", sharpened, 1),
]


def test_enhancements_are_pillows() -> None:
    for name, pillow, start_off in ENHANCEMENTS:
        for magnitude in (0, 3, 15, 20):
            factor = magnitude / 10 * 1.8 + 0.1
            difference = np.abs(applied(name, PHOTO, magnitude).astype(int) - np.asarray(pillow(PHOTO, factor)))
            # One level for rounding the blend, a float32 product here; if nothing else differs, at most one value of a
            # hundred.
            assert difference.max() <= 1 + start_off * np.ceil(abs(1 - factor)), (name, magnitude)
            assert start_off or np.mean(difference > 0) < 0.01, (name, magnitude)


@pytest.mark.parametrize("name", ["Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"])
def test_operations_on_places_are_pillows(name: str) -> None:
    width, height = PHOTO.size
    for magnitude, sign in itertools.product((0.0, 3.17, 18.3), SIGNS):
        level = sign * magnitude / 10
        angle, moved = np.radians(30 * level), sign * round(magnitude * 10)
        sin, cos = np.sin(angle), np.cos(angle)
        right, bottom = (width - 1) / 2, (height - 1) / 2
        a, b, c, d, e, f = {
            "Rotate": (cos, -sin, right - cos * right + sin * bottom, sin, cos, bottom - sin * right - cos * bottom),
            "ShearX": (1, 0.3 * level, 0, 0, 1, 0),
            "ShearY": (1, 0, 0, 0.3 * level, 1, 0),
            "TranslateX": (1, 0, moved, 0, 1, 0),
            "TranslateY": (1, 0, 0, 0, 1, moved),
        }[name]
        # Pillow's pixels have their centres at halves, and it rounds down.
        halves = (a, b, c + 0.5 - (a + b) / 2, d, e, f + 0.5 - (d + e) / 2)
        want = PHOTO.transform(
            PHOTO.size, Image.Transform.AFFINE, halves, Image.Resampling.NEAREST, fillcolor=(module.FILL,) * 3
        )
        different = (applied(name, PHOTO, magnitude, SIGNS[sign]) != np.asarray(want)).any(axis=-1)
        # Pillow computes in 1/65536 of a pixel, which adds up to 1/600 over 111 pixels: this share of pixels, in two
        # directions, may come from the neighbour; none if whole pixels are moved.
        allowed = 0 if name.startswith("T") or not magnitude else 2 / 600
        assert np.mean(different) <= allowed, (magnitude, sign)


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
