"""The training augmentations sample from the right distributions and change nothing else."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from keras_vit.model import preprocess
from keras_vit.model.images import jpeg_png
from keras_vit.train.data import augment, pipeline

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
        whole = jpeg_png.decode(jpeg)
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
