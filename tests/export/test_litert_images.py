"""A file that prepares its images gives the pixels of `preprocess`, to float32 noise."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit._util.checks import field_rules, pair
from keras_vit.export.litert import images
from keras_vit.export.litert.builder import Builder, Tensor
from keras_vit.export.litert.operators import Operators
from keras_vit.model.config import Preprocessing, ViTConfig
from keras_vit.model.preprocess import prepare
from litert_graph import plan, run, written
from tiny_models import prepared, tiny

sklearn_datasets = pytest.importorskip("sklearn.datasets")
PHOTO = sklearn_datasets.load_sample_images().images[0]

# Error of prepared values, which are in -2..3. TensorFlow's positions are float32: near 500 the last bit is 3e-5 of a
# pixel; measured at most 4e-5. A matrix that is shifted by half a pixel gives 0.1 and more on random pixels.
NOISE = 1e-4
INEXACT = 1e-5  # of 255: TensorFlow's own products are float32; measured 1.4e-6
SIDES = [(480, 224), (37, 64), (53, 48), (5, 33), (1, 16), (640, 384), (225, 224), (448, 224), (672, 224)]
INTERPOLATIONS = field_rules(Preprocessing)["interpolation"].choices


def pixels(height: int, width: int, *, channels: int = 3, batch: int = 1) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (batch, height, width, channels), np.uint8)


def wanted(config: ViTConfig, batch: np.ndarray) -> Any:
    size = pair(config.image_size, "image_size")
    return prepare(batch, image_size=size, num_channels=config.num_channels, preprocessing=config.preprocessing)


def received(config: ViTConfig, pixels: np.ndarray, path: Path, **changes: Any) -> np.ndarray:
    """Return the pixels as the file prepares them, with the scale that the first layer would apply."""
    kept: list[images.ImageInput] = []
    builders: list[Builder] = []

    def layers(ops: Operators) -> tuple[Tensor, Tensor]:
        builders.append(ops.builder)
        kept.append(images.add_image_input(ops, config, plan(**changes)))
        return kept[0].image, kept[0].tensor

    made = run(written(layers, path / "images.tflite"), pixels)
    assert max(len(row.shape) for row in builders[0]._tensors) <= 4
    assert kept[0].tensor.shape == (changes.get("batch", 1), *made.shape[1:]) and len(made) == len(pixels)
    scale = kept[0].scale
    return made if scale is None else made * scale


def test_prepared_images_pass_as_they_are(tmp_path: Path) -> None:
    ops = Operators(Builder())
    given = images.add_image_input(ops, tiny(image_size=(24, 32)), plan(batch=None))
    assert given.image is given.tensor and given.scale is None
    assert (given.image.name, given.image.shape, given.image.dtype) == ("image", (None, 24, 32, 3), "float32")
    shown = prepared(tiny())
    np.testing.assert_array_equal(received(tiny(), shown, tmp_path, batch=None), shown)


def test_pixels_of_the_models_size_are_normalised_and_resized_by_nothing(tmp_path: Path) -> None:
    for channels, batch, size in itertools.product((1, 3), (1, 2, None), (None, (32, 32))):
        mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
        config = tiny(num_channels=channels, preprocessing=Preprocessing(mean=mean, std=std))
        given = pixels(32, 32, channels=channels, batch=batch or 3)
        made = received(config, given, tmp_path, batch=batch, input_dtype="uint8", source_size=size)
        np.testing.assert_allclose(made, wanted(config, given), atol=NOISE, err_msg=f"{channels} {batch} {size}")


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_a_resize_matrix_is_tensorflows(interpolation: str) -> None:
    for (old, new), antialias in itertools.product(SIDES, (False, True)):
        column = np.random.default_rng(old).uniform(0, 255, (old, 1, 3)).astype(np.float32)
        matrix = images.resize_matrix(new, old, Preprocessing(interpolation=interpolation, antialias=antialias))
        want = tf.image.resize(column, (new, 1), method=interpolation, antialias=antialias).numpy()
        case = f"{old} to {new}, antialias {antialias}"
        np.testing.assert_allclose(matrix @ column[:, 0], want[:, 0], atol=255 * INEXACT, err_msg=case)
        # The edges of areas are float32.
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-4, err_msg=case)


@pytest.mark.parametrize("resize", ["squash", "crop"])
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_exactly_resized_pixels_are_those_of_preprocess(tmp_path: Path, interpolation: str, resize: str) -> None:
    for antialias, given in itertools.product((False, True), (PHOTO[None, ::4, ::5], pixels(29, 90, batch=2))):
        preprocessing = Preprocessing(
            resize=resize, interpolation=interpolation, antialias=antialias, crop_fraction=0.9, mean=(0.4,), std=(0.2,)
        )
        config = tiny(image_size=(48, 64), preprocessing=preprocessing)
        changes = {"batch": None, "input_dtype": "uint8", "source_size": given.shape[1:3], "resize": "exact"}
        made = received(config, given, tmp_path, **changes)
        np.testing.assert_allclose(made, wanted(config, given), atol=NOISE, err_msg=f"antialias {antialias}")


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos3"])
def test_rounded_pixels_are_those_of_preprocess_in_either_order(tmp_path: Path, interpolation: str) -> None:
    for resize, source in itertools.product(("squash", "crop"), ((57, 45), (45, 57), (90, 45), (20, 70))):
        preprocessing = Preprocessing(
            resize=resize, interpolation=interpolation, antialias=True, round_pixels=True, mean=(0,), std=(1 / 255,)
        )
        config, given = tiny(image_size=36, preprocessing=preprocessing), pixels(*source, batch=2)
        made = received(config, given, tmp_path, batch=2, input_dtype="uint8", source_size=source)
        error = np.abs(made - wanted(config, given))
        # Sums are float32: one that lies within 1e-5 of a half may be rounded to the other side. Bilinear weights are
        # fractions, whose sums often lie there; measured 2 %.
        assert error.max() < 1.01, (resize, source)
        assert np.mean(error > 0.01) < (0.04 if interpolation == "bilinear" else 1e-3), (resize, source)


def test_the_centre_is_cut_out_where_preprocess_cuts_it(tmp_path: Path) -> None:
    for source, target, fraction, rounding in (
        ((480, 640), (224, 224), 0.875, "nearest"),
        ((640, 480), (384, 384), 1.0, "nearest"),
        ((33, 1000), (48, 64), 0.9, "down"),
        ((7, 7), (9, 8), 0.5, "nearest"),
        ((97, 131), (32, 31), 0.74, "half_even"),  # 11 rows too many: 6 above, and 5 without half_even
    ):
        preprocessing = Preprocessing(resize="crop", crop_fraction=fraction, crop_rounding=rounding)
        config = tiny(image_size=target, patch_size=1, preprocessing=preprocessing)
        given = pixels(*source)
        # The runtime rounds positions differently, by a few ten-thousandths of a pixel.
        for kind, most in (("exact", NOISE), ("builtin", 1e-3)):
            made = received(config, given, tmp_path, input_dtype="uint8", source_size=source, resize=kind)
            np.testing.assert_allclose(made, wanted(config, given), atol=most, err_msg=f"{source} {kind}")


def test_grey_photos_are_resized_too(tmp_path: Path) -> None:
    config = tiny(num_channels=1, preprocessing=Preprocessing(antialias=True))
    given = PHOTO[None, :, :, :1]
    made = received(config, given, tmp_path, input_dtype="uint8", source_size=given.shape[1:3])
    np.testing.assert_allclose(made, wanted(config, given), atol=NOISE)
