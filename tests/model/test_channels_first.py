"""Every kind of model is the same network where keras.json says that images have their channels first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dense_cases
import text_cases
from keras_vit import VisionTransformer, dense, digits, zoo
from marks import full_except
from tiny_models import FAMILIES, OTHERS, VARIANTS, prepared, randomised, tiny

QUERIES = {"kind": "queries", "output": "segments", "framing": "fit", "num_queries": 3, "query_blocks": 1}
QUERIES |= {"blocks": (1,), "num_classes": 5, "upsample": 4}


def _plain(**changes: Any) -> VisionTransformer:
    return VisionTransformer(tiny(**changes))


def _deep() -> VisionTransformer:
    return _plain(num_layers=4)


BUILDERS: dict[str, Callable[[], keras.Model]] = {
    **{name: lambda changes=changes: _plain(**changes) for name, changes in {**VARIANTS, **FAMILIES, **OTHERS}.items()},
    **{
        f"segmenter, {head}": lambda head=head: dense.segmenter(_deep(), 3, head=head)
        for head in ("linear", "multiscale", "dpt")
    },
    **{
        f"depth, {head}": lambda head=head: dense.depth(_deep(), head=head, max_depth=10)
        for head in ("linear", "multiscale", "dpt")
    },
    "relative depth, dpt": lambda: dense.depth(_deep()),
    "queries": lambda: dense.DenseModel(_plain(), dense.MapConfig(**QUERIES)),
    **{f"official, {name}": lambda name=name: dense_cases.load(name) for name in dense_cases.MAPS},
    "text": text_cases.small_encoder,
    "text of SigLIP": lambda: text_cases.small_encoder("tok_siglip", causal=False, pooling="last"),
}


@pytest.fixture
def channels_first() -> Iterator[Callable[[], None]]:
    """Return the function that changes Keras' setting, which is restored."""
    setting = keras.config.image_data_format()
    yield lambda: keras.config.set_image_data_format("channels_first")
    keras.config.set_image_data_format(setting)


def _filled(name: str) -> Any:
    """Build a model with the same random weights at every call, if they have the same shapes."""
    model: Any = randomised(BUILDERS[name]())
    for weight in model.weights:
        if "variance" in weight.path:
            weight.assign(np.abs(weight))
    return model


def _outputs(model: Any) -> list[np.ndarray]:
    if hasattr(model, "config") and hasattr(model.config, "num_channels"):
        inputs = prepared(model.config)
    else:
        inputs = np.arange(1, 33, dtype=np.int32).reshape(2, 16)
    return [np.asarray(tensor) for tensor in keras.tree.flatten(model(inputs))]


QUICK = ["hybrid", "map", "mixer", "BiT", "segmenter, linear", "segmenter, dpt", "depth, dpt", "queries", "text"]


@pytest.mark.parametrize("name", full_except(QUICK, BUILDERS))
def test_the_setting_changes_no_model(name: str, channels_first: Callable[[], None], tmp_path: Path) -> None:
    model = _filled(name)
    wanted = _outputs(model)
    assert all(np.isfinite(output).all() for output in wanted)
    model.save(tmp_path / "last.keras")
    channels_first()
    other = _filled(name)
    # A layer of Keras takes the setting unless it is told: one that is new and forgets it is found here.
    formats = {layer.name: getattr(layer, "data_format", None) for layer in other._flatten_layers()}
    assert set(formats.values()) <= {None, "channels_last"}, formats
    assert [tuple(weight.shape) for weight in other.weights] == [tuple(weight.shape) for weight in model.weights]
    for got, want in zip(_outputs(other), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(_outputs(keras.models.load_model(tmp_path / "last.keras")), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.full
def test_a_depth_model_of_one_setting_is_loaded_under_the_other(
    channels_first: Callable[[], None], tmp_path: Path
) -> None:
    images = digits.load().test_images[:2]
    channels_first()
    model = dense.depth(zoo.load("digits"))
    model.save(tmp_path / "first.keras")
    wanted = model.predict_maps(images)
    keras.config.set_image_data_format("channels_last")
    again: Any = keras.models.load_model(tmp_path / "first.keras")
    np.testing.assert_array_equal(again.predict_maps(images), wanted)
