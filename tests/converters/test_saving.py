"""The files that `converters.save` writes beside the weights, and those it refuses to overwrite."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from feature_table import FORMATS
from keras_vit import Preprocessing, converters
from keras_vit.converters.table import load_table
from keras_vit.errors import CheckpointError
from model_weights import assert_same_bits, values
from places import DATA
from tiny_models import VARIANTS, built

IMAGENET = Preprocessing(interpolation="bicubic", antialias=True, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def test_two_files_in_one_folder_keep_their_own_config(tmp_path: Path) -> None:
    first = built(activation="gelu_erf")
    second = built(activation="gelu_quick", mlp_dim=40)
    converters.save(first, tmp_path / "a.safetensors", format="huggingface")
    with pytest.warns(UserWarning, match=r"config.json described a.safetensors and now describes b.safetensors"):
        converters.save(second, tmp_path / "b.safetensors", format="huggingface")
    for name, model in (("a", first), ("b", second)):
        again = converters.load(tmp_path / f"{name}.safetensors")
        assert again.config.activation == model.config.activation
        assert_same_bits(values(again), values(model))


def test_a_config_that_somebody_else_wrote_is_not_written_over(tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text('{"mine": 1}')
        with pytest.raises(converters.CheckpointError, match="belongs to another checkpoint"):
            converters.save(built(), tmp_path, format="huggingface")
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert json.loads((tmp_path / name).read_text()) == {"mine": 1}
        (tmp_path / name).unlink()


def test_the_preprocessing_beside_a_hugging_face_file_is_obeyed_or_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):  # written by transformers 5
        shutil.copy(DATA / "reference" / "hf_cls_v5" / name, tmp_path)
    stated = {"image_mean": IMAGENET.mean, "image_std": IMAGENET.std, "resample": 3, "size": {"height": 32}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
    found = converters.load(tmp_path).config.preprocessing
    # The official processor rounds the resized pixels, and the corner of a crop down.
    assert found == dataclasses.replace(IMAGENET, round_pixels=True, crop_rounding="down")
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": false}')
    with pytest.raises(converters.CheckpointError, match="do_normalize"):
        converters.load(tmp_path)


@pytest.mark.filterwarnings("ignore:keras_vit")  # digits of other readers
@pytest.mark.parametrize("format", [name for name in FORMATS if load_table(name).writable])
def test_a_name_that_says_another_container_or_no_file_in_a_folder_is_refused(tmp_path: Path, format: str) -> None:
    model = built(num_layers=1)
    own = f".{load_table(format).container}"
    suffixes = {".npz", ".safetensors", ".pth", ".PT", ".bin", ".h5", ".keras", ".ckpt", ".onnx", ".tflite"} - {own}
    for suffix in suffixes:
        with pytest.raises(CheckpointError, match=rf"{format} files are {own} files"):
            converters.save(model, tmp_path / f"x{suffix}", format=format)
    if own == ".npz":
        for name in ("nowhere/x.npz", ""):
            with pytest.raises(CheckpointError, match="written into a folder that exists"):
                converters.save(model, tmp_path / name, format=format)
    assert not list(tmp_path.iterdir())
    for name in (f"x{own}", f"x{own.upper()}", "vit.v2"):
        assert converters.save(model, tmp_path / name, format=format) == tmp_path / name


def test_frozen_parts_stay_frozen_resized_and_reloaded(tmp_path: Path) -> None:
    model = built()
    model.get_layer("block_0").attention.trainable = False
    model.get_layer("embedding").trainable = False
    trained = [weight.path for weight in model.trainable_weights]
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    for other in (again, model.resized(48)):
        assert [weight.path for weight in other.trainable_weights] == trained
    assert dataclasses.asdict(again.config) == dataclasses.asdict(model.config)
    assert 0 < len(trained) < len(built().trainable_weights)


# ---- .keras files


def test_converters_open_keras_files_too(tmp_path: Path) -> None:
    model = built()
    model.save(tmp_path / "vit.keras")
    shutil.copy(tmp_path / "vit.keras", tmp_path / "C.KERAS")
    for wanted, grid, classes in (
        ({}, (4, 4), 5),
        ({"image_size": 48}, (6, 6), 5),
        ({"num_classes": 3}, (4, 4), 3),
        ({"num_classes": 0}, (4, 4), 0),
    ):
        loaded = converters.load(tmp_path / "C.KERAS", **wanted)
        assert (loaded.config.grid, loaded.config.num_classes) == (grid, classes)
        last = "block_1/mlp/dense1/kernel"
        np.testing.assert_array_equal(values(loaded)[last], values(model)[last])
    (tmp_path / "cut.keras").write_bytes((tmp_path / "vit.keras").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"cut.keras: cannot be read \(BadZipFile: .*download it again"):
        converters.load(tmp_path / "cut.keras")
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        converters.load(tmp_path / "none.keras")
    with pytest.raises(ValueError, match="states everything itself"):
        converters.load(tmp_path / "vit.keras", format="google")


@pytest.mark.parametrize(("dtype", "changes"), [(None, {}), (None, VARIANTS["map"]), ("bfloat16", {})], ids=str)
def test_a_keras_file_is_loaded_as_keras_loads_it(tmp_path: Path, dtype: str | None, changes: dict[str, Any]) -> None:
    model = built(dtype, dropout_rate=0.1, **changes)
    model.get_layer("block_0").trainable = False
    if dtype is None and not changes:  # a file with an optimizer's state
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "vit.keras")
    loaded, want = converters.load(tmp_path / "vit.keras"), keras.saving.load_model(tmp_path / "vit.keras")
    assert loaded.get_config() == want.get_config() == model.get_config()
    for ours, theirs in zip(loaded.weights, want.weights, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours, "float64"), np.asarray(theirs, "float64"))
