"""Images of other channels than red, green and blue: models adapted by timm's rule, training, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_vit import converters, dense, digits, export, train, zoo
from keras_vit.model.vit import adapt_channels, image_kernel
from marks import full_except
from places import DATA
from tiny_models import OTHERS, VARIANTS, built, prepared

# Kernels and what timm 1.0.31 made of them: timm.models._manipulate.adapt_input_conv.
TIMM = np.load(DATA / "timm_channels.npz")
BANDS = (1, 2, 4, 10, 13)


@pytest.mark.parametrize("channels", BANDS)
def test_a_kernel_is_adapted_as_timm_does_bit_for_bit(channels: int) -> None:
    kernel = TIMM["kernel"].transpose(2, 3, 1, 0)
    want = TIMM[f"to_{channels}"].transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(adapt_channels(kernel, channels), want)


def test_a_model_of_other_channels_is_adapted_too() -> None:
    kernel = TIMM["kernel_of_4"].transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(adapt_channels(kernel, 3), TIMM["4_to_3"].transpose(2, 3, 1, 0))
    assert adapt_channels(kernel, 4) is kernel


MODELS: dict[str, dict[str, Any]] = {"pure": {}, "hybrid": VARIANTS["hybrid"], **OTHERS}
FORMATS = {"pure": "timm", "hybrid": "timm", "BiT": "timm_bit", "mixer": "timm_mixer"}


@pytest.mark.parametrize("name", FORMATS)
def test_every_way_to_a_model_of_other_channels_is_the_same(name: str, tmp_path: Path) -> None:
    model = built(**MODELS[name])
    model.save(tmp_path / "model.keras")
    paths = [tmp_path / "model.keras", converters.save(model, tmp_path / "model", format=FORMATS[name])]
    for channels in BANDS:
        config = model.config.replace(num_channels=channels)
        found = [model.with_config(config), *(zoo.load(path, num_channels=channels) for path in paths)]
        for weights in zip(model.weights, *(each.weights for each in found), strict=True):
            source, *adapted = map(np.asarray, weights)
            is_first = weights[0].path.endswith(image_kernel(config))
            for weight in adapted:
                np.testing.assert_array_equal(weight, adapt_channels(source, channels) if is_first else source)


def test_equal_channels_give_what_they_gave() -> None:
    model = built()
    grey = prepared(model.config)[..., :1]
    want = model(np.repeat(grey, 3, axis=-1))
    for channels in (1, 6, 12):  # of other numbers, one of the three channels counts more often
        got = model.with_config(model.config.replace(num_channels=channels))(np.repeat(grey, channels, axis=-1))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)  # of logits of about 5, in another order of sums


def test_mean_and_deviation_are_asked_for_where_channels_differ() -> None:
    preprocessing = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    model = built(preprocessing=preprocessing)
    with pytest.raises(ValueError, match='num_channels=4: state preprocessing={"mean"'):
        model.config.replace(num_channels=4)
    stated = {"mean": (0.4, 0.4, 0.4, 0.3), "std": 4 * (0.2,)}
    assert model.config.replace(num_channels=4, preprocessing=stated).preprocessing.mean == stated["mean"]
    same = built(preprocessing={"mean": 3 * (0.5,), "std": 3 * (0.25,)}).config.replace(num_channels=13)
    assert (same.preprocessing.mean, same.preprocessing.std) == ((0.5,), (0.25,))


def test_a_head_for_maps_goes_with_its_backbone() -> None:
    model = dense.segmenter(built(), 3)
    other = model.with_config(model.config.replace(num_channels=4))
    assert other(prepared(other.config)).shape == model(prepared(model.config)).shape


def _bands(channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return digits as reflectances, uint16 from 0 to 10,000, of which each band is a little darker than the last."""
    data = digits.load()
    shares = data.test_images[:64, ..., :1] / 255 * np.linspace(1, 0.5, channels)
    return np.rint(10_000 * shares).astype(np.uint16), data.test_labels[:64]


@pytest.mark.parametrize("channels", full_except([13], [2, 4, 13]))
def test_other_bands_are_trained_and_exported(channels: int, tmp_path: Path) -> None:
    images, labels = _bands(channels)
    model = zoo.load("digits", num_channels=channels, preprocessing={"range": (0, 10_000)})
    recipe = train.recipe("finetune-digits", steps=2, batch_size=16, xla=False)
    data = {"train": (images, labels), "evaluation": (images, labels)}
    result = train.run(recipe, model=model, data=data, out=str(tmp_path / "run"), progress=False)
    again: Any = keras.models.load_model(tmp_path / "run" / "model.keras")
    assert again.config.preprocessing.range == (0, 10_000) and again.input_shape[-1] == channels
    classes = [row[0].label_id for row in again.classify(images, top=1)]
    assert np.mean(np.array(classes, int) == labels) == pytest.approx(result.metrics["accuracy"], abs=1 / 64)
    assert export.tflite(again, tmp_path / "model.tflite", verify=images).cosine > 0.99
    assert export.saved_model(again, tmp_path / "1", warmup=(), verify=images).cosine > 0.9999


@pytest.mark.full
def test_a_recipe_adapts_a_model_that_is_given_by_its_name() -> None:
    images, labels = _bands(4)
    recipe = train.recipe("finetune-digits", steps=1, batch_size=16, xla=False)
    config = {"num_channels": 4, "preprocessing": {"range": [0, 10_000]}}
    data = {"train": (images, labels)}
    result = train.run(recipe.replace(config=config), model="digits", data=data, progress=False)
    assert result.model.input_shape[-1] == 4
    with pytest.raises(ValueError, match=r"takes images of 3 channels.*num_channels=4.*uint16 \(64, 8, 8, 4\)"):
        train.run(recipe, model="digits", data=data, progress=False)  # the fourth is no opacity


def test_randaugment_knows_colours_alone() -> None:
    images, labels = _bands(4)
    model = zoo.load("digits", num_channels=4, preprocessing={"range": [0, 10_000]})
    recipe = train.recipe("finetune-digits", steps=1, batch_size=16, xla=False, randaugment_layers=2)
    with pytest.raises(ValueError, match="set randaugment_layers=0. Received: 4 channels"):
        train.run(recipe, model=model, data={"train": (images, labels)}, progress=False)


def test_a_file_for_a_model_of_other_channels_says_what_to_pass(tmp_path: Path) -> None:
    (tmp_path / "bands.tif").write_bytes(b"II*")
    with pytest.raises(ValueError, match="takes 13 channels: pass arrays"):
        built(num_channels=13).preprocess(tmp_path / "bands.tif")
