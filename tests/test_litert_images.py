"""A file that prepares its images gives the pixels of `preprocess`, to float32 noise."""

from __future__ import annotations

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
from litert_graph import options, run, written
from tiny_models import prepared, tiny

sklearn_datasets = pytest.importorskip("sklearn.datasets")
PHOTO = sklearn_datasets.load_sample_images().images[0]

# Error of prepared values, which are in -2..3. TensorFlow's positions are float32: near 500 the last bit is 3e-5 of a
# pixel; measured at most 4e-5. A matrix that is shifted by half a pixel gives 0.1 and more on random pixels.
NOISE = 1e-4
INEXACT = 1e-5  # of 255: TensorFlow's own products are float32; measured 1.4e-6
SIDES = [(480, 224), (37, 64), (53, 48), (5, 33), (1, 16), (640, 384), (225, 224), (448, 224), (672, 224)]


def pixels(height: int, width: int, *, channels: int = 3, batch: int = 1) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (batch, height, width, channels), np.uint8)


def wanted(config: ViTConfig, batch: np.ndarray) -> Any:
    size = pair(config.image_size, "image_size")
    return prepare(batch, image_size=size, num_channels=config.num_channels, preprocessing=config.preprocessing)


def received(config: ViTConfig, pixels: np.ndarray, path: Path, **changes: Any) -> np.ndarray:
    """Return the pixels as the file prepares them, with the scale that the first layer would apply."""

    kept: list[images.ImageInput] = []

    def layers(ops: Operators) -> tuple[Tensor, Tensor]:
        kept.append(images.add_image_input(ops, config, options(**changes)))
        return kept[0].image, kept[0].tensor

    made = run(written(layers, path / "images.tflite"), pixels)
    assert made.shape == (len(pixels), *kept[0].tensor.shape[1:])
    scale = kept[0].scale
    return made if scale is None else made * scale


def test_prepared_images_pass_as_they_are() -> None:
    ops = Operators(Builder())
    config = tiny(image_size=(24, 32))
    given = images.add_image_input(ops, config, options(batch=None))
    assert given.image is given.tensor
    assert given.scale is None
    assert (given.image.name, given.image.shape, given.image.dtype) == ("image", (None, 24, 32, 3), "float32")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("batch", [1, 2, None])
def test_pixels_of_the_models_size_are_normalised(tmp_path: Path, channels: int, batch: int | None) -> None:
    mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
    config = tiny(num_channels=channels, preprocessing=Preprocessing(mean=mean, std=std))
    given = pixels(32, 32, channels=channels, batch=batch or 3)
    made = received(config, given, tmp_path, batch=batch, input_dtype="uint8")
    np.testing.assert_allclose(made, wanted(config, given), atol=NOISE)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("interpolation", field_rules(Preprocessing)["interpolation"].choices)
@pytest.mark.parametrize(("old", "new"), SIDES)
def test_a_resize_matrix_is_tensorflows(old: int, new: int, interpolation: str, antialias: bool) -> None:
    column = np.random.default_rng(old).uniform(0, 255, (old, 1, 3)).astype(np.float32)
    matrix = images.resize_matrix(new, old, Preprocessing(interpolation=interpolation, antialias=antialias))
    want = tf.image.resize(column, (new, 1), method=interpolation, antialias=antialias).numpy()
    np.testing.assert_allclose(matrix @ column[:, 0], want[:, 0], atol=255 * INEXACT)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-4)  # the edges of areas are float32


@pytest.mark.parametrize("resize", ["squash", "crop"])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("interpolation", field_rules(Preprocessing)["interpolation"].choices)
def test_exactly_resized_pixels_are_those_of_preprocess(
    tmp_path: Path, interpolation: str, antialias: bool, resize: str
) -> None:
    preprocessing = Preprocessing(
        resize=resize, interpolation=interpolation, antialias=antialias, crop_fraction=0.9, mean=(0.4,), std=(0.2,)
    )
    config = tiny(image_size=(48, 64), preprocessing=preprocessing)
    for given in (PHOTO[None, ::4, ::5], pixels(29, 90, batch=2)):
        changes = {"batch": None, "input_dtype": "uint8", "source_size": given.shape[1:3], "resize": "exact"}
        made = received(config, given, tmp_path, **changes)
        np.testing.assert_allclose(made, wanted(config, given), atol=NOISE)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos3"])
@pytest.mark.parametrize("source", [(57, 45), (45, 57), (90, 45), (20, 70)])
@pytest.mark.parametrize("resize", ["squash", "crop"])
def test_rounded_pixels_are_those_of_preprocess_in_either_order(
    tmp_path: Path, source: tuple[int, int], interpolation: str, resize: str
) -> None:
    preprocessing = Preprocessing(
        resize=resize, interpolation=interpolation, antialias=True, round_pixels=True, mean=(0,), std=(1 / 255,)
    )
    config, given = tiny(image_size=36, preprocessing=preprocessing), pixels(*source, batch=2)
    made = received(config, given, tmp_path, batch=2, input_dtype="uint8", source_size=source)
    error = np.abs(made - wanted(config, given))
    # Sums are float32: one that lies within 1e-5 of a half may be rounded to the other side. Bilinear weights are
    # fractions, whose sums often lie there; measured 2 %.
    assert error.max() < 1.01
    assert np.mean(error > 0.01) < (0.04 if interpolation == "bilinear" else 1e-3)


@pytest.mark.parametrize(
    ("source", "target", "fraction"),
    [
        ((480, 640), (224, 224), 0.875),
        ((640, 480), (384, 384), 1.0),
        ((33, 1000), (48, 64), 0.9),
        ((7, 7), (9, 8), 0.5),
    ],
)
def test_the_centre_is_cut_out_where_preprocess_cuts_it(
    tmp_path: Path, source: tuple[int, int], target: tuple[int, int], fraction: float
) -> None:
    config = tiny(image_size=target, patch_size=1, preprocessing=Preprocessing(resize="crop", crop_fraction=fraction))
    given = pixels(*source)
    made = {
        kind: received(config, given, tmp_path, input_dtype="uint8", source_size=source, resize=kind)
        for kind in ("exact", "builtin")
    }
    np.testing.assert_allclose(made["exact"], wanted(config, given), atol=NOISE)
    # The runtime rounds positions differently, by a few ten-thousandths of a pixel.
    np.testing.assert_allclose(made["builtin"], wanted(config, given), atol=1e-3)


def test_grey_photos_are_resized_too(tmp_path: Path) -> None:
    config = tiny(num_channels=1, preprocessing=Preprocessing(antialias=True))
    given = PHOTO[None, :, :, :1]
    made = received(config, given, tmp_path, input_dtype="uint8", source_size=given.shape[1:3])
    np.testing.assert_allclose(made, wanted(config, given), atol=NOISE)


def test_pixels_of_the_right_size_are_resized_by_nothing(tmp_path: Path) -> None:
    given = pixels(32, 32)
    made = received(tiny(), given, tmp_path, input_dtype="uint8", source_size=(32, 32))
    np.testing.assert_allclose(made, wanted(tiny(), given), atol=NOISE)


@pytest.mark.parametrize("batch", [1, None])
def test_nothing_has_a_fifth_dimension_and_the_batch_stays_open(batch: int | None) -> None:
    builder = Builder()
    changes = {"batch": batch, "input_dtype": "uint8", "source_size": (60, 40)}
    given = images.add_image_input(Operators(builder), tiny(), options(**changes))
    assert given.tensor.shape == (batch, 32, 32, 3)
    assert max(len(row.shape) for row in builder._tensors) <= 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_dtype": "int8"}, "input_dtype must be one of .*'int8'"),
        ({"resize": "bicubic"}, "resize must be one of .*'bicubic'"),
        ({"source_size": (40, 40)}, "needs input_dtype='uint8'.*'float32'"),
        ({"input_dtype": "uint8", "source_size": (0, 40)}, r"source_size.*\(0, 40\)"),
        ({"input_dtype": "uint8", "source_size": (40, 40, 3)}, r"source_size.*\(40, 40, 3\)"),
        ({"input_dtype": "uint8", "source_size": 40.5}, r"source_size.*40\.5"),
    ],
)
def test_what_makes_no_input_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        images.add_image_input(Operators(Builder()), tiny(), options(**changes))


def test_prepared_images_run(tmp_path: Path) -> None:
    given = prepared(tiny())
    np.testing.assert_array_equal(received(tiny(), given, tmp_path, batch=None), given)
