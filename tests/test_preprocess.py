"""Preparing images agrees with the official formula, with Pillow, and for all kinds of input."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("size", [(384, 384), (224, 224), (500, 700)])
def test_the_default_is_the_official_evaluation_to_the_bit(photo: np.ndarray, size: tuple[int, int]) -> None:
    # vit_jax/input_pipeline.py: tf.image.resize of the uint8 image, then (x - 127.5) / 127.5.
    want = (tf.image.resize(photo, size) - 127.5) / 127.5
    got = prepared(photo, size)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got[0], want)
    assert got.min() >= -1 and got.max() <= 1


@pytest.mark.parametrize(
    ("interpolation", "pillow"), [("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)]
)
@pytest.mark.parametrize("size", [(224, 224), (97, 301)])
def test_with_antialias_it_is_pillows(
    photo: np.ndarray, interpolation: str, pillow: Any, size: tuple[int, int]
) -> None:
    plain = Preprocessing(interpolation=interpolation, antialias=True, mean=(0,), std=(1 / 255,))
    want = np.asarray(Image.fromarray(photo).resize(size[::-1], pillow), np.float32)
    # Pillow rounds to whole values after each of its two passes: half a value each, and the cubic's weights, whose
    # absolute values add up to at most 1.25, enlarge the first.
    got = prepared(photo, size, preprocessing=plain)[0]
    assert np.abs(got - want).max() <= (1.01 if interpolation == "bilinear" else 1.2)
    assert np.abs(got - want).mean() < 0.35


FILTERS = {"bilinear": "BILINEAR", "bicubic": "BICUBIC", "lanczos3": "LANCZOS"}
TURNS = [(57, 45, 36, 36), (56, 46, 36, 36), (40, 60, 20, 50), (41, 60, 20, 50), (30, 20, 29, 40), (30, 20, 31, 40)]


def of_pillow(interpolation: str) -> Preprocessing:
    return dataclasses.replace(PLAIN, interpolation=interpolation, antialias=True, round_pixels=True)


def by_pillow(image: np.ndarray, size: tuple[int, ...], interpolation: str) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling[FILTERS[interpolation]]))


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("sides", TURNS)  # on both sides of the rule for the order, close to it
def test_rounded_pixels_are_pillows_in_either_order(sides: tuple[int, ...], interpolation: str) -> None:
    source, size = sides[:2], sides[2:]
    assert is_height_first(source, size) == (sides in (TURNS[0], TURNS[3], TURNS[4]))
    given = np.stack([pixels(*source, seed=seed) for seed in range(2)])
    want = np.stack([by_pillow(image, size, interpolation) for image in given])
    np.testing.assert_array_equal(prepared(given, size, preprocessing=of_pillow(interpolation)), want)
    function = preprocessing_function(image_size=size, num_channels=3, preprocessing=of_pillow(interpolation))
    graph = tf.function(function, input_signature=[tf.TensorSpec((None, None, None, 3), tf.uint8)])
    np.testing.assert_allclose(graph(given), want, rtol=0, atol=1e-4)  # the compiler may multiply by 1 / std


@pytest.mark.parametrize(("seed", "cases"), [(0, 40), pytest.param(1, 2000, marks=pytest.mark.full)])
def test_random_sides_give_pillows_bytes(seed: int, cases: int) -> None:
    random, orders = np.random.default_rng(seed), set()
    signature = [tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((2,), tf.int32)]
    graphs = {
        name: tf.function(functools.partial(_resize, preprocessing=of_pillow(name)), input_signature=signature)
        for name in FILTERS
    }
    for case in range(cases):
        height, width, *size = (int(side) for side in np.exp(random.uniform(0, np.log(200), 4)))
        interpolation, image = random.choice(list(FILTERS)), pixels(height, width, seed=case)
        want = by_pillow(image, tuple(size), interpolation)
        received = prepared(image, tuple(size), preprocessing=of_pillow(interpolation))[0]
        np.testing.assert_array_equal(received, want, f"{height} x {width} to {size}, {interpolation}")
        np.testing.assert_array_equal(graphs[interpolation](image, size), want)
        orders.add(is_height_first((height, width), size))
    assert orders == {True, False}


@pytest.mark.parametrize("size", [(224, 224), (97, 301)])
@pytest.mark.parametrize("interpolation", FILTERS)
def test_a_photo_is_resized_as_pillow_resizes_it(photo: np.ndarray, interpolation: str, size: tuple[int, int]) -> None:
    want = by_pillow(photo, size, interpolation)
    np.testing.assert_array_equal(prepared(photo, size, preprocessing=of_pillow(interpolation))[0], want)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pixels_that_are_not_rounded_are_resized_along_the_width_first(interpolation: str) -> None:
    plain = Preprocessing(interpolation=interpolation, antialias=True, mean=(0,), std=(1 / 255,))
    want = pixels(57, 45)
    for sides in ((57, 36), (36, 36)):
        want = np.clip(tf.image.resize(want, sides, method=interpolation, antialias=True), 0, 255)
    np.testing.assert_allclose(prepared(pixels(57, 45), (36, 36), preprocessing=plain)[0], want, atol=1e-4)


@pytest.mark.parametrize("margin", [2, 3, 4, 5])
def test_a_crop_rounds_as_stated(margin: int) -> None:
    image = pixels(10 + margin, 10 + margin)
    for rounding, corner in (("nearest", margin // 2), ("down", margin // 2), ("half_even", round(margin / 2))):
        fraction = 10 / (10 + margin)
        cropped = Preprocessing(crop_fraction=fraction, crop_rounding=rounding, mean=(0,), std=(1 / 255,))
        got = prepared(image, (10, 10), preprocessing=cropped)[0]  # squash resizes to the image's own size
        np.testing.assert_array_equal(got, image[corner : corner + 10, corner : corner + 10])


def test_the_longer_side_rounds_as_stated() -> None:
    image = pixels(20, 39)
    for rounding, width in (("nearest", 20), ("down", 19)):  # 39 / 2
        halved = Preprocessing(resize="crop", crop_rounding=rounding, mean=(0,), std=(1 / 255,))
        want = tf.image.resize(image, (10, width)).numpy()
        corner = (width - 10) // 2
        got = prepared(image, (10, 10), preprocessing=halved)[0]
        np.testing.assert_allclose(got, want[:, corner : corner + 10], atol=1e-3)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "area", "nearest", "lanczos3"])
@pytest.mark.parametrize("antialias", [False, True])
def test_every_interpolation_is_tensorflows(interpolation: str, antialias: bool) -> None:
    plain = Preprocessing(interpolation=interpolation, antialias=antialias, mean=(0,), std=(1 / 255,))
    grey = pixels() // 2 + 64  # far from 0 and 255, where results are clipped
    want = tf.cast(tf.image.resize(grey, (48, 64), method=interpolation, antialias=antialias), tf.float32)
    np.testing.assert_allclose(prepared(grey, preprocessing=plain)[0], want, rtol=1e-5, atol=1e-3)


def test_mean_and_deviation_are_per_channel_on_a_scale_of_one() -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    want = (pixels(48, 64) / 255 - mean) / std
    got = prepared(pixels(48, 64), preprocessing=Preprocessing(mean=mean, std=std))[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", PHOTOS, ids=lambda path: path.stem)
def test_a_jpeg_is_decoded_as_pillow_does_to_the_bit(path: Path) -> None:
    np.testing.assert_array_equal(decode(path), np.asarray(Image.open(path).convert("RGB")))


@pytest.mark.parametrize(
    ("mode", "suffix", "options"),
    [
        ("RGB", ".jpg", {"subsampling": 2, "quality": 60}),
        ("RGB", ".jpg", {"progressive": True, "quality": 85}),
        ("RGB", ".jpg", {"subsampling": 0, "quality": 95}),
        ("L", ".jpg", {}),
        ("CMYK", ".jpg", {}),
        *((mode, ".png", {}) for mode in ("RGB", "L", "P", "RGBA", "LA", "1")),
        *((mode, suffix, {}) for mode, suffix in (("P", ".gif"), ("RGB", ".bmp"), ("RGB", ".webp"), ("RGB", ".tiff"))),
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [3, 1])
def test_every_kind_of_file_is_read_as_pillow_reads_it(
    mode: str, suffix: str, options: dict[str, Any], channels: int, photo: np.ndarray, tmp_path: Path
) -> None:
    path = tmp_path / f"image{suffix}"
    Image.fromarray(photo[:101, :77]).convert(mode).save(path, **options)  # odd sides: chroma is padded
    with Image.open(path) as image:
        want = np.asarray(image.convert("RGB" if channels == 3 else "L")).reshape(101, 77, channels)
    got = decode(path, channels)
    assert got.dtype == np.uint8
    # Colour is equal to the bit; for grey Pillow rounds its weights (299, 587, 114) / 1000 differently.
    assert np.abs(got.astype(int) - want).max() <= (0 if channels == 3 else 1)


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


def test_a_batch_is_its_images() -> None:
    batch = np.stack([pixels(seed=seed) for seed in range(3)])
    np.testing.assert_array_equal(prepared(batch), np.concatenate([prepared(image) for image in batch]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "uint16"])
def test_values_from_0_to_255_count_in_any_dtype(dtype: str) -> None:
    np.testing.assert_array_equal(prepared(pixels().astype(dtype)), prepared(pixels()))


def test_grey_is_repeated_and_alpha_dropped() -> None:
    grey, colour = pixels(channels=1), pixels(channels=3)
    want = prepared(np.repeat(grey, 3, axis=-1))
    for given in (grey, grey[..., 0], Image.fromarray(grey[..., 0])):
        np.testing.assert_array_equal(prepared(given), want)
    rgba = np.concatenate([colour, pixels(channels=1, seed=3)], axis=-1)
    for given in (rgba, Image.fromarray(rgba)):
        np.testing.assert_array_equal(prepared(given), prepared(colour))


def test_a_grey_model_takes_grey_and_coloured_pictures() -> None:
    for given in (PHOTOS[0], Image.open(PHOTOS[0]), pixels(channels=1), pixels()[..., 0]):
        assert prepared(given, channels=1).shape == (1, 48, 64, 1)
    from_file, from_pil = (prepared(given, channels=1) for given in (PHOTOS[0], Image.open(PHOTOS[0])))
    assert np.abs(from_file - from_pil).max() <= 1.01 / 127.5


@pytest.mark.parametrize("resize", ["squash", "crop"])
@pytest.mark.parametrize("batched", [False, True])
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


def test_in_graph_is_the_same_as_a_compiled_function(photo: np.ndarray) -> None:
    step = tf.function(preprocessing_function(image_size=(48, 64), num_channels=3, preprocessing=Preprocessing()))
    np.testing.assert_allclose(step(photo), prepared(photo)[0], atol=1e-6)


# Cropping


@pytest.mark.parametrize(
    ("height", "width", "size", "fraction", "resized"),
    [
        (300, 400, (224, 224), 0.875, (256, 341)),  # big_vision: resize_small(256) | central_crop(224)
        (400, 300, (224, 224), 0.875, (341, 256)),
        (100, 100, (224, 224), 1.0, (224, 224)),
        (427, 640, (384, 384), 384 / 448, (448, 671)),  # resize_small(448) | central_crop(384)
        (50, 500, (32, 64), 1.0, (32, 320)),
        (500, 50, (32, 64), 1.0, (640, 64)),
    ],
)
def test_crop_scales_the_shorter_side_and_cuts_the_centre_out(
    height: int, width: int, size: tuple[int, int], fraction: float, resized: tuple[int, int]
) -> None:
    image = pixels(height, width)
    cropping = Preprocessing(resize="crop", crop_fraction=fraction, mean=(0,), std=(1 / 255,))
    whole = tf.image.resize(image, resized).numpy()
    top, left = (resized[0] - size[0]) // 2, (resized[1] - size[1]) // 2
    want = whole[top : top + size[0], left : left + size[1]]
    np.testing.assert_allclose(prepared(image, size, preprocessing=cropping)[0], want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("height", [1, 31, 57, 223, 225])
@pytest.mark.parametrize("width", [1, 33, 224, 1000])
def test_a_crop_has_the_size_whatever_the_image(height: int, width: int) -> None:
    cropping = Preprocessing(resize="crop", crop_fraction=0.9)
    assert prepared(pixels(height, width), (30, 31), preprocessing=cropping).shape == (1, 30, 31, 3)


# Invalid input


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([], "at least one image"),
        (pixels() / 255, "multiply by 255"),
        (pixels() / 127.5 - 1, "0 to 255, not prepared"),
        (pixels().astype(np.float32) * 2, "0 to 255, not prepared"),
        (np.full((4, 4, 3), np.nan), "0 to 255, not prepared"),
        (np.full((4, 4, 3), np.inf), "0 to 255, not prepared"),
        (pixels().astype(np.int16) - 300, "0 to 255, not prepared"),
        (pixels(channels=2), "3 channels. Received: 2"),
        (pixels(channels=5), "3 channels. Received: 5"),
        (pixels().transpose(2, 0, 1), "3 channels. Received: 50"),
        (pixels() > 3, "uint8 or floats"),
        (np.zeros((4, 4, 3), complex), "uint8 or floats"),
        (np.array("cat.jpg"), "height, width"),
        (np.zeros(5, np.uint8), "height, width"),
        (np.zeros((1, 1, 4, 4, 3), np.uint8), "height, width"),
        (np.zeros((0, 4, 3), np.uint8), "height, width"),
        (np.zeros((0, 4, 4, 3), np.uint8), "height, width"),
        (None, "height, width"),
        ([pixels(), None], "height, width"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_image_is_refused(wrong: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        prepared(wrong)


def test_a_coloured_array_is_no_input_of_a_grey_model() -> None:
    with pytest.raises(ValueError, match="1 channels. Received: 3"):
        prepared(pixels(), channels=1)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no image file.*nothing.jpg"):
        prepared([pixels(), tmp_path / "nothing.jpg"])


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif", ".bmp"])
@pytest.mark.parametrize("damage", ["text", "empty", "truncated", "folder"])
def test_a_damaged_file_is_refused_by_name(suffix: str, damage: str, photo: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / f"image{suffix}"
    if damage == "folder":
        path.mkdir()
    else:
        Image.fromarray(photo).save(path)
        whole = path.read_bytes()
        path.write_bytes({"text": b"no image", "empty": b"", "truncated": whole[: len(whole) // 2]}[damage])
    with pytest.raises(ValueError, match=f"image{suffix}"):
        prepared(path)
