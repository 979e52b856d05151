"""Preparing images agrees with the official formula, with Pillow, and for all kinds of input."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from keras_vit.model.config import Preprocessing
from keras_vit.model.preprocess import _resize, decode, is_height_first, prepare, preprocessing_function

sklearn_datasets = pytest.importorskip("sklearn.datasets")
PHOTOS = sorted(Path(sklearn_datasets.__file__).parent.glob("images/*.jpg"))
PLAIN = Preprocessing(mean=(0,), std=(1 / 255,))  # the resized pixels themselves, 0..255


def prepared(images: Any, size: Any = (48, 64), channels: int = 3, preprocessing: Preprocessing | None = None) -> Any:
    return prepare(images, image_size=size, num_channels=channels, preprocessing=preprocessing or Preprocessing())


def pixels(height: int = 40, width: int = 50, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


@pytest.fixture(scope="module")
def photo() -> np.ndarray:
    return np.asarray(Image.open(PHOTOS[0]))


# Against other code


def test_the_default_is_the_official_evaluation_to_the_bit(photo: np.ndarray) -> None:
    for size in ((384, 384), (224, 224), (500, 700)):
        # vit_jax/input_pipeline.py: tf.image.resize of the uint8 image, then (x - 127.5) / 127.5.
        want = (tf.image.resize(photo, size) - 127.5) / 127.5
        got = prepared(photo, size)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got[0], want)
        assert got.min() >= -1 and got.max() <= 1


FILTERS = {"bilinear": "BILINEAR", "bicubic": "BICUBIC", "lanczos3": "LANCZOS"}
# Source and new sides, whether the height is resized first (close to the rule, on both sides of it), interpolation.
TURNS = [
    ((57, 45), (36, 36), True, "bilinear"),
    ((56, 46), (36, 36), False, "lanczos3"),
    ((40, 60), (20, 50), False, "bicubic"),
    ((41, 60), (20, 50), True, "bicubic"),
    ((30, 20), (29, 40), True, "lanczos3"),
    ((30, 20), (31, 40), False, "bilinear"),
]


def of_pillow(interpolation: str) -> Preprocessing:
    return dataclasses.replace(PLAIN, interpolation=interpolation, antialias=True, round_pixels=True)


def by_pillow(image: np.ndarray, size: tuple[int, ...], interpolation: str) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling[FILTERS[interpolation]]))


@pytest.mark.full
def test_rounded_pixels_are_pillows_in_either_order(photo: np.ndarray) -> None:
    for source, size, height_first, interpolation in TURNS:
        assert is_height_first(source, size) == height_first
        given = np.stack([pixels(*source, seed=seed) for seed in range(2)])
        want = np.stack([by_pillow(image, size, interpolation) for image in given])
        preprocessing = of_pillow(interpolation)
        np.testing.assert_array_equal(prepared(given, size, preprocessing=preprocessing), want)
        function = preprocessing_function(image_size=size, num_channels=3, preprocessing=preprocessing)
        graph = tf.function(function, input_signature=[tf.TensorSpec((None, None, None, 3), tf.uint8)])
        np.testing.assert_allclose(graph(given), want, rtol=0, atol=1e-4)  # the compiler may multiply by 1 / std
    for interpolation in FILTERS:
        got = prepared(photo, (97, 301), preprocessing=of_pillow(interpolation))[0]
        np.testing.assert_array_equal(got, by_pillow(photo, (97, 301), interpolation))


@pytest.mark.full
def test_random_sides_give_pillows_bytes() -> None:
    random, orders = np.random.default_rng(0), set()
    signature = [tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((2,), tf.int32)]
    graphs = {
        name: tf.function(functools.partial(_resize, preprocessing=of_pillow(name)), input_signature=signature)
        for name in FILTERS
    }
    for case in range(100):
        height, width, *size = (int(side) for side in np.exp(random.uniform(0, np.log(200), 4)))
        interpolation, image = random.choice(list(FILTERS)), pixels(height, width, seed=case)
        want = by_pillow(image, tuple(size), interpolation)
        received = prepared(image, tuple(size), preprocessing=of_pillow(interpolation))[0]
        np.testing.assert_array_equal(received, want, f"{height} x {width} to {size}, {interpolation}")
        np.testing.assert_array_equal(graphs[interpolation](image, size), want)
        orders.add(is_height_first((height, width), size))
    assert orders == {True, False}


def test_pixels_that_are_not_rounded_are_resized_along_the_width_first() -> None:
    for interpolation in ("bilinear", "bicubic"):
        plain = dataclasses.replace(PLAIN, interpolation=interpolation, antialias=True)
        want = pixels(57, 45)
        for sides in ((57, 36), (36, 36)):
            want = np.clip(tf.image.resize(want, sides, method=interpolation, antialias=True), 0, 255)
        np.testing.assert_allclose(prepared(pixels(57, 45), (36, 36), preprocessing=plain)[0], want, atol=1e-4)


def test_a_crop_rounds_as_stated() -> None:
    for margin in (2, 3, 4, 5):
        image = pixels(10 + margin, 10 + margin)
        for rounding, corner in (("nearest", margin // 2), ("down", margin // 2), ("half_even", round(margin / 2))):
            cropped = dataclasses.replace(PLAIN, crop_fraction=10 / (10 + margin), crop_rounding=rounding)
            got = prepared(image, (10, 10), preprocessing=cropped)[0]  # squash resizes to the image's own size
            want = image[corner : corner + 10, corner : corner + 10]
            np.testing.assert_array_equal(got, want, err_msg=f"{margin}, {rounding}")
            in_graph = preprocessing_function(image_size=(10, 10), num_channels=3, preprocessing=cropped)(image[None])
            np.testing.assert_array_equal(in_graph[0], want, err_msg=f"{margin}, {rounding}, in a graph")


def test_the_longer_side_rounds_as_stated() -> None:
    image = pixels(20, 39)
    for rounding, width in (("nearest", 20), ("down", 19)):  # 39 / 2
        halved = dataclasses.replace(PLAIN, resize="crop", crop_rounding=rounding)
        want = tf.image.resize(image, (10, width)).numpy()
        corner = (width - 10) // 2
        in_graph = preprocessing_function(image_size=(10, 10), num_channels=3, preprocessing=halved)
        for got in (prepared(image, (10, 10), preprocessing=halved), in_graph(image[None])):
            np.testing.assert_allclose(got[0], want[:, corner : corner + 10], atol=1e-3)


def test_every_interpolation_is_tensorflows() -> None:
    grey = pixels() // 2 + 64  # far from 0 and 255, where results are clipped
    for interpolation in ("bilinear", "bicubic", "area", "nearest", "lanczos3"):
        for antialias in (False, True):
            plain = dataclasses.replace(PLAIN, interpolation=interpolation, antialias=antialias)
            want = tf.image.resize(grey, (48, 64), method=interpolation, antialias=antialias)
            got = prepared(grey, preprocessing=plain)[0]
            np.testing.assert_allclose(got, tf.cast(want, tf.float32), rtol=1e-5, atol=1e-3, err_msg=interpolation)


def test_mean_and_deviation_are_per_channel_on_a_scale_of_one() -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    want = (pixels(48, 64) / 255 - mean) / std
    got = prepared(pixels(48, 64), preprocessing=Preprocessing(mean=mean, std=std))[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_jpeg_is_decoded_as_pillow_does_to_the_bit(photo: np.ndarray, tmp_path: Path) -> None:
    paths = list(PHOTOS)
    for number, options in enumerate(
        ({"subsampling": 2, "quality": 60}, {"progressive": True, "quality": 85}, {"subsampling": 0, "quality": 95})
    ):
        paths.append(tmp_path / f"{number}.jpg")
        Image.fromarray(photo[:101, :77]).save(paths[-1], **options)  # odd sides: chroma is padded
    for path in paths:
        got = decode(path)
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got, np.asarray(Image.open(path).convert("RGB")), err_msg=str(path))


# Every kind of input


def test_paths_strings_pil_images_and_arrays_are_the_same(photo: np.ndarray) -> None:
    want = prepared(photo)
    for given in (
        PHOTOS[0],
        str(PHOTOS[0]),
        Image.open(PHOTOS[0]),
        photo.astype(np.float32),
        tf.constant(photo),
        [photo],
        photo[None],
    ):
        np.testing.assert_array_equal(prepared(given), want)


def test_images_of_different_sizes_and_kinds_make_one_batch() -> None:
    given = [PHOTOS[0], pixels(10, 20), Image.fromarray(pixels(64, 48)), str(PHOTOS[1]), np.stack([pixels()] * 2)]
    batch = prepared(given)
    assert batch.shape == (6, 48, 64, 3)
    for row, image in zip([0, 1, 2, 3, 5], given, strict=True):
        np.testing.assert_array_equal(batch[row], prepared(image)[-1])


def test_a_batch_is_its_images_and_values_from_0_to_255_count_in_any_dtype() -> None:
    batch = np.stack([pixels(seed=seed) for seed in range(3)])
    want = np.concatenate([prepared(image) for image in batch])
    for dtype in ("uint8", "float16", "float32", "float64", "int32", "int64", "uint16"):
        np.testing.assert_array_equal(prepared(batch.astype(dtype)), want, err_msg=dtype)


def test_grey_is_repeated_and_transparent_pixels_are_put_on_white(tmp_path: Path) -> None:
    grey, colour = pixels(channels=1), pixels(channels=3)
    want = prepared(np.repeat(grey, 3, axis=-1))
    for given in (grey, grey[..., 0], Image.fromarray(grey[..., 0])):
        np.testing.assert_array_equal(prepared(given), want)
    rgba = np.concatenate([colour, pixels(channels=1, seed=3)], axis=-1)
    page = Image.new("RGBA", rgba.shape[1::-1], "white")
    page.alpha_composite(Image.fromarray(rgba))
    white = np.asarray(page.convert("RGB"))
    Image.fromarray(rgba).save(tmp_path / "a.png")
    Image.fromarray(rgba).save(tmp_path / "a.webp", lossless=True, exact=True)
    for given in (rgba, Image.fromarray(rgba), tmp_path / "a.png", tmp_path / "a.webp"):
        np.testing.assert_array_equal(prepared(given), prepared(white))
    np.testing.assert_allclose(prepared(rgba.astype(np.float32)), prepared(white), atol=0.5 / 127.5 + 1e-6)
    opaque = np.concatenate([colour, np.full_like(colour[..., :1], 255)], axis=-1)
    np.testing.assert_array_equal(prepared(opaque), prepared(colour))


def test_a_grey_model_takes_grey_and_coloured_pictures() -> None:
    for given in (PHOTOS[0], Image.open(PHOTOS[0]), pixels(channels=1), pixels()[..., 0]):
        assert prepared(given, channels=1).shape == (1, 48, 64, 1)
    from_file, from_pil = (prepared(given, channels=1) for given in (PHOTOS[0], Image.open(PHOTOS[0])))
    assert np.abs(from_file - from_pil).max() <= 1.01 / 127.5


@pytest.mark.parametrize(("resize", "batched"), [("squash", False), ("crop", True)])
def test_inside_tf_data_it_is_the_same(resize: str, batched: bool) -> None:
    images = [pixels(40, 50), pixels(70, 33)]
    preprocessing = Preprocessing(resize=resize, crop_fraction=0.9, antialias=True)
    given = [np.stack([image] * 2) if batched else image for image in images]
    signature = tf.TensorSpec((None,) * (3 + batched - 1) + (3,), tf.uint8)
    dataset = tf.data.Dataset.from_generator(lambda: iter(given), output_signature=signature)
    mapped = dataset.map(lambda image: prepared(image, preprocessing=preprocessing))
    assert mapped.element_spec.shape.as_list() == [None] * batched + [48, 64, 3]
    for got, image in zip(mapped, images, strict=True):
        want = prepared(image, preprocessing=preprocessing)
        # The graph may fuse a multiplication and an addition: one rounding of a value up to 1.
        np.testing.assert_allclose(got, np.repeat(want, 2, 0) if batched else want[0], atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("resize", ["squash", "crop"])
def test_under_another_back_end_it_is_the_same_without_tensorflow(resize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = itertools.product(
        *(("bilinear", "bicubic", "area", "nearest", "lanczos3"), (False, True), (False, True)),
        ("nearest", "down", "half_even"),
    )
    given = [pixels(57, 45), pixels(20, 90, 4), pixels(200, 3, 1), pixels(48, 64).astype(np.float32)]
    for interpolation, antialias, round_pixels, crop_rounding in choices:
        options = {"interpolation": interpolation, "antialias": antialias, "round_pixels": round_pixels}
        plain = dataclasses.replace(PLAIN, resize=resize, crop_rounding=crop_rounding, crop_fraction=0.9, **options)
        want = prepared(given, preprocessing=plain)
        with monkeypatch.context() as patch:
            patch.setattr(keras.config, "backend", lambda: "jax")
            patch.setattr(tf.image, "resize", None)
            got = prepared(given, preprocessing=plain)
        assert got.dtype == want.dtype == np.float32
        if plain.matches_pillow:
            np.testing.assert_array_equal(got, want)
        elif round_pixels:  # TensorFlow's float32 may fall on the other side of a half
            assert np.abs(got - want).max() <= 1.001 and (got != want).mean() < 0.05, plain
        else:
            atol = 0.05 if interpolation == "area" else 0.01  # three pixels enlarged to 960: edges are float32
            np.testing.assert_allclose(got, want, atol=atol, err_msg=str(plain))


# Cropping


CROPS: list[Any] = [
    # height and width, size, fraction, size before the crop
    ((300, 400), (224, 224), 0.875, (256, 341)),  # big_vision: resize_small(256) | central_crop(224)
    ((400, 300), (224, 224), 0.875, (341, 256)),
    ((100, 100), (224, 224), 1.0, (224, 224)),
    ((427, 640), (384, 384), 384 / 448, (448, 671)),  # resize_small(448) | central_crop(384)
    ((50, 500), (32, 64), 1.0, (32, 320)),
    ((500, 50), (32, 64), 1.0, (640, 64)),
]


def test_crop_scales_the_shorter_side_and_cuts_the_centre_out() -> None:
    for sides, size, fraction, resized in CROPS:
        image = pixels(*sides)
        cropping = dataclasses.replace(PLAIN, resize="crop", crop_fraction=fraction)
        whole = tf.image.resize(image, resized).numpy()
        top, left = (resized[0] - size[0]) // 2, (resized[1] - size[1]) // 2
        want = whole[top : top + size[0], left : left + size[1]]
        got = prepared(image, size, preprocessing=cropping)[0]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3, err_msg=str(sides))
    cropping = Preprocessing(resize="crop", crop_fraction=0.9)
    for sides in ((1, 1), (1, 1000), (31, 33), (57, 1), (223, 224), (225, 33)):
        assert prepared(pixels(*sides), (30, 31), preprocessing=cropping).shape == (1, 30, 31, 3)


# Invalid input

NO_IMAGES: dict[str, list[Any]] = {  # a part of the message, and what is wrong
    "at least one image": [[]],
    "multiply by 255": [pixels() / 255],
    "0 to 255, not prepared": [
        *(pixels() / 127.5 - 1, pixels().astype(np.float32) * 2, pixels().astype(np.int16) - 300),
        *(np.full((4, 4, 3), np.nan), np.full((4, 4, 3), np.inf)),
    ],
    "3 channels": [pixels(channels=2), pixels(channels=5), pixels().transpose(2, 0, 1)],
    "uint8 or floats": [pixels() > 3, np.zeros((4, 4, 3), complex)],
    "height, width": [
        *(np.array("cat.jpg"), None, [pixels(), None]),
        *(np.zeros(shape, np.uint8) for shape in ((5,), (1, 1, 4, 4, 3), (0, 4, 3), (0, 4, 4, 3))),
    ],
}


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    for says, images in NO_IMAGES.items():
        for wrong in images:
            with pytest.raises(ValueError, match=says):
                prepared(wrong)
    with pytest.raises(ValueError, match="1 channels"):
        prepared(pixels(), channels=1)
    with pytest.raises(FileNotFoundError, match="no image file.*nothing.jpg"):
        prepared([pixels(), tmp_path / "nothing.jpg"])


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif", ".bmp"])
def test_a_damaged_file_is_refused_by_name(suffix: str, photo: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / f"image{suffix}"
    Image.fromarray(photo[:100, :100]).save(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"no image", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"image{suffix}"):
            prepared(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=f"image{suffix}"):
        prepared(path)
