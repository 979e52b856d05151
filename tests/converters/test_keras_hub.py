"""Presets of Keras Hub load as the same model and convert to every format.

The presets in data/keras_hub are Keras Hub's own (data/make_keras_hub.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feature_table import FORMATS
from keras_vit import converters
from keras_vit.converters.containers import CheckpointError
from keras_vit.converters.table import load_table
from model_weights import assert_same_bits, values
from places import DATA

DATA = DATA / "keras_hub"
PRESETS = sorted(path.name for path in DATA.iterdir() if path.is_dir())
# float32 on both sides, sums in another order: the errors seen are 1e-7 of the largest value.
CLOSE = 1e-6


def recorded(name: str) -> dict[str, np.ndarray]:
    """Return the input and outputs of Keras Hub."""
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


def distance(received: Any, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(received) - expected).max() / np.abs(expected).max())


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "classifier", tmp_path / "preset"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_keras_hubs_pixels_and_numbers(name: str) -> None:
    want = recorded(name)
    model = converters.load(DATA / name)
    assert converters.detect(DATA / name / "model.weights.h5") == "keras_hub"
    assert distance(model(want["images"]), want["logits"]) < CLOSE
    assert distance(model.features(want["images"], ["encoder_norm"])["encoder_norm"], want["tokens"]) < CLOSE
    prepared = model.preprocess(want["pixels"].astype(np.uint8))
    np.testing.assert_allclose(prepared, want["prepared"], rtol=1e-5, atol=1e-5)
    by_file = converters.load(DATA / name / "model.weights.h5")  # instead of its folder
    assert_same_bits(values(by_file), values(model))


def test_a_preset_tells_what_only_matters_in_training() -> None:
    config = converters.read_config(DATA / "gap")
    assert (config.dropout_rate, config.attention_dropout_rate) == (0.1, 0.2)
    assert (config.norm_epsilon, config.patch_bias, config.class_token) == (1e-3, False, False)


def test_a_backbone_alone_gives_the_class_token(preset: Path) -> None:
    for file in preset.glob("task.*"):
        file.unlink()
    want = recorded("classifier")
    model = converters.load(preset)
    assert model.config.num_classes == 0
    assert distance(model(want["images"]), want["tokens"][:, 0]) < CLOSE


@pytest.mark.filterwarnings("ignore:keras_vit. .* files do not say activation")  # google, big_vision: GELU by erf
def test_a_preset_moves_to_every_format_and_keeps_its_bits(tmp_path: Path) -> None:
    formats = {"classifier": [name for name in FORMATS if load_table(name).writable], "no_bias": ["timm"]}
    for name, targets in formats.items():
        model = converters.load(DATA / name)
        for format in targets:
            folder = tmp_path / name / format
            folder.mkdir(parents=True)
            path = converters.save(model, folder / f"vit.{load_table(format).container}", format=format)
            moved = converters.load(path)
            assert_same_bits(values(moved), values(model))
            assert distance(moved(recorded(name)["images"]), recorded(name)["logits"]) < CLOSE


def test_the_format_is_only_read(preset: Path) -> None:
    with pytest.raises(CheckpointError, match="The keras_hub format is only read"):
        converters.save(converters.load(preset), preset / "again", format="keras_hub")


WRONG: list[tuple[str, str, Any, str]] = [
    ("task.json", "pooling", "gap", "its mean includes the class token"),
    ("task.json", "num_classes", 6, "num_classes 6 where the tensors have 5"),
    ("config.json", "num_heads", 4, "num_heads=4"),
    ("config.json", "image_shape", [16, 32, 3], r"5 positions, but its config.json says image_size \(16, 32\), of 8"),
    ("config.json", "mlp_dim", 13, "mlp_dim 13"),
    ("image_converter.json", "pad_to_aspect_ratio", True, "images are padded"),
    ("image_converter.json", "scale", 0, "image_converter.config cannot be"),
    ("image_converter.json", "interpolation", "lanczos5", "interpolation"),
]


def test_a_preset_that_contradicts_itself_or_is_another_model_is_refused(preset: Path) -> None:
    for file, key, value, reason in WRONG:
        good = (preset / file).read_text()
        content = json.loads(good)
        content["config"][key] = value
        (preset / file).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=reason):
            converters.load(preset)
        (preset / file).write_text(good)


def test_a_preset_with_no_head_or_the_same_tensors_twice_is_refused(preset: Path) -> None:
    (preset / "task.weights.h5").unlink()
    with pytest.raises(CheckpointError, match="num_classes 5 where the tensors have 0"):
        converters.load(preset)
    shutil.copy(preset / "model.weights.h5", preset / "task.weights.h5")
    with pytest.raises(CheckpointError, match=r"task\.weights\.h5: has tensor 'layers/.*, as .*model\.weights\.h5 has"):
        converters.load(preset)
