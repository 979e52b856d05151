"""Presets of Keras Hub load as the same model and convert to every format.

The presets in data/keras_hub are Keras Hub's own (data/make_keras_hub.py).
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scipy import ndimage

from feature_table import FORMATS
from keras_vit import converters
from keras_vit.converters.containers import CheckpointError
from keras_vit.converters.table import load_table
from model_weights import assert_same_bits, values

DATA = Path(__file__).parent / "data" / "keras_hub"
PRESETS = sorted(path.name for path in DATA.iterdir() if path.is_dir())
WRITTEN = [name for name in FORMATS if load_table(name).writable]
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


def changed(path: Path, place: str, value: Any) -> None:
    """Change one value in a JSON file."""
    root = content = json.loads(path.read_text())
    *parents, last = place.split(".")
    for parent in parents:
        content = content[parent]
    content[last] = value
    path.write_text(json.dumps(root))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_keras_hubs_numbers(name: str) -> None:
    want = recorded(name)
    model = converters.load(DATA / name)
    assert converters.detect(DATA / name / "model.weights.h5") == "keras_hub"
    assert distance(model(want["images"]), want["logits"]) < CLOSE
    assert distance(model.features(want["images"], ["encoder_norm"])["encoder_norm"], want["tokens"]) < CLOSE


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_prepares_pixels_as_keras_hubs_image_converter_does(name: str) -> None:
    want = recorded(name)
    pixels = want["pixels"].astype(np.uint8)
    model = converters.load(DATA / name)
    np.testing.assert_allclose(model.preprocess(pixels), want["prepared"], rtol=1e-5, atol=1e-5)


def test_a_preset_tells_what_only_matters_in_training() -> None:
    config = converters.read_config(DATA / "gap")
    assert (config.dropout_rate, config.attention_dropout_rate) == (0.1, 0.2)
    assert (config.norm_epsilon, config.patch_bias, config.class_token) == (1e-3, False, False)


def test_the_weights_file_of_a_preset_may_be_named_instead_of_its_folder() -> None:
    assert_same_bits(
        values(converters.load(DATA / "classifier" / "model.weights.h5")), values(converters.load(DATA / "classifier"))
    )


def test_a_backbone_alone_gives_the_class_token(preset: Path) -> None:
    for file in preset.glob("task.*"):
        file.unlink()
    want = recorded("classifier")
    model = converters.load(preset)
    assert model.config.num_classes == 0
    assert distance(model(want["images"]), want["tokens"][:, 0]) < CLOSE


def test_a_preset_goes_to_another_resolution() -> None:
    model = converters.load(DATA / "classifier", image_size=32)
    with h5py.File(DATA / "classifier" / "model.weights.h5") as file:
        table = file["layers/vi_t_patching_and_embedding/position_embedding/vars/0"][()]
    grid = ndimage.zoom(table[1:].reshape(2, 2, -1), (2, 2, 1), order=1).reshape(16, -1)
    received = values(model)["position/embedding"]
    np.testing.assert_allclose(received[0], np.concatenate([table[:1], grid]), rtol=1e-6, atol=1e-6)
    assert model(np.zeros((1, 32, 32, 3), np.float32)).shape == (1, 5)


@pytest.mark.parametrize(
    ("name", "format"),
    [*(("classifier", format) for format in WRITTEN), ("no_bias", "timm"), ("no_bias", "huggingface")],
)
def test_a_preset_moves_to_every_format_and_keeps_its_bits(name: str, format: str, tmp_path: Path) -> None:
    model = converters.load(DATA / name)
    with warnings.catch_warnings():  # google and big_vision files cannot state GELU by erf
        warnings.filterwarnings("ignore", "keras_vit: .* files do not say activation", UserWarning)
        path = converters.save(model, tmp_path / f"vit.{load_table(format).container}", format=format)
    moved = converters.load(path)
    assert_same_bits(values(moved), values(model))
    assert distance(moved(recorded(name)["images"]), recorded(name)["logits"]) < CLOSE


def test_the_format_is_only_read(preset: Path) -> None:
    with pytest.raises(CheckpointError, match="The keras_hub format is only read"):
        converters.save(converters.load(preset), preset / "again", format="keras_hub")


@pytest.mark.parametrize(
    ("file", "place", "value", "reason"),
    [
        ("task.json", "config.pooling", "gap", "its mean includes the class token"),
        ("task.json", "config.pooling", "max", "classifier|task.config"),
        ("task.json", "config.num_classes", 6, "num_classes 6 where the tensors have 5"),
        ("config.json", "config.num_heads", 4, "num_heads=4"),
        ("config.json", "config.image_shape", [16, 16], "image_shape cannot be"),
        ("config.json", "config.image_shape", [16, 32, 3], "position/embedding"),
        ("config.json", "config.mlp_dim", 13, "mlp_dim 13"),
        ("config.json", "config.layer_norm_epsilon", "small", "norm_epsilon"),
        ("image_converter.json", "config.pad_to_aspect_ratio", True, "images are padded"),
        ("image_converter.json", "config.scale", 0, "image_converter.config cannot be"),
        ("image_converter.json", "config.scale", {"a": 1}, "image_converter.config cannot be"),
        ("image_converter.json", "config.interpolation", "lanczos5", "interpolation"),
    ],
)
def test_a_preset_that_contradicts_itself_or_is_another_model_is_refused(
    preset: Path, file: str, place: str, value: Any, reason: str
) -> None:
    changed(preset / file, place, value)
    with pytest.raises(CheckpointError, match=reason):
        converters.load(preset)


def test_a_preset_without_its_head_is_refused(preset: Path) -> None:
    (preset / "task.weights.h5").unlink()
    with pytest.raises(CheckpointError, match="num_classes 5 where the tensors have 0"):
        converters.load(preset)


def test_tensors_that_stand_in_both_files_are_refused(preset: Path) -> None:
    shutil.copy(preset / "model.weights.h5", preset / "task.weights.h5")
    with pytest.raises(CheckpointError, match=r"task\.weights\.h5: has tensor 'layers/.*, as .*model\.weights\.h5 has"):
        converters.load(preset)
