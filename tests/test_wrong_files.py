"""A file of another model is refused in every mode, and honest files of models with few classes are accepted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import VisionTransformer, digits, export, zoo
from keras_vit.export.litert.emit import build_file
from keras_vit.export.litert.operators import STORAGES
from keras_vit.export.litert.options import Options
from keras_vit.export.modes import load_mode
from marks import full_except
from outlier_models import standardise
from tiny_models import randomised, tiny

WRITTEN = {"none": "float32", "float16": "float16", "dynamic": "int8"}  # modes that need no calibration
MODES = (*WRITTEN, "int8", "int4", "int16x8")


def copy_of(model: VisionTransformer) -> VisionTransformer:
    other = VisionTransformer(model.config)
    other.set_weights(model.get_weights())
    return other


def without_last_mlp(model: VisionTransformer) -> VisionTransformer:
    """Return a copy whose last block adds nothing by its MLP."""
    other = copy_of(model)
    for weight in other.get_layer("block_1").mlp.weights:
        weight.assign(np.zeros(weight.shape))
    return other


def written(model: VisionTransformer, mode: str, path: Path) -> Path:
    build_file(model, Options(storage=STORAGES[WRITTEN[mode]])).write(path)
    return path


def random_models(seed: int) -> list[VisionTransformer]:
    """Return models of five classes: with random weights, and with weights that keep the variance of activations."""
    first, second = (VisionTransformer(tiny()) for _ in range(2))
    return [randomised(first, seed), standardise(second, np.random.default_rng(seed))]


@pytest.mark.parametrize(
    ("seed", "mode"),
    full_except(
        [*((seed, "none") for seed in range(12)), (0, "float16"), (4, "dynamic"), (8, "dynamic")],
        itertools.product(range(12), WRITTEN),
    ),
)
def test_a_file_without_an_mlp_is_refused_with_and_without_its_mode(seed: int, mode: str, tmp_path: Path) -> None:
    shown = np.random.default_rng(seed + 100).uniform(-1, 1, (20, 32, 32, 3)).astype(np.float32)
    for model in random_models(seed):
        path = written(without_last_mlp(model), mode, tmp_path / "wrong.tflite")
        for given in (mode, None):
            with pytest.raises(export.VerificationError, match="differs from the model"):
                export.verify(model, path, shown, mode=given)
        assert export.verify(model, written(model, mode, tmp_path / "own.tflite"), shown).mode == mode


def few_digits(count: int) -> tuple[VisionTransformer, np.ndarray, np.ndarray]:
    """Return the digits model with a head of the first classes, and prepared images of these for training and test."""
    model = zoo.load("digits")
    head = model.get_layer("head").get_weights()
    few = zoo.load("digits", num_classes=count)
    few.get_layer("head").set_weights([weight[..., :count] for weight in head])
    data = digits.load()
    calibration = data.train_images[data.train_labels < count][:64]
    shown = data.test_images[data.test_labels < count][:40]
    return few, few.preprocess(calibration), few.preprocess(shown)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", full_except([2, 4], [2, 3, 4]))
def test_honest_files_of_few_classes_are_accepted_in_every_mode(count: int, mode: str, tmp_path: Path) -> None:
    model, calibration, shown = few_digits(count)
    given: dict[str, Any] = {"calibration": calibration} if load_mode(mode).needs_calibration else {}
    path = tmp_path / "few.tflite"
    assert export.tflite(model, path, quantize=mode, verify=shown, **given).agreement == 1.0
    assert export.verify(model, path, shown).mode == mode
