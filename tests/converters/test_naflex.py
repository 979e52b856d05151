"""NaFlex models at a fixed grid: linear patches, and positions on a grid of their own, whatever the image's size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_vit import converters
from keras_vit.converters.source import open_checkpoint
from keras_vit.errors import CheckpointError
from model_weights import assert_same_bits, values
from places import DATA
from reference_cases import distance
from tiny_models import built

NAFLEX, FIXED = DATA / "text" / "hf_siglip2_naflex", DATA / "families" / "hf_siglip_vision"


def test_a_naflex_tower_is_exact_at_the_grid_of_each_image() -> None:
    reference = np.load(NAFLEX / "reference.npz")
    for i, grid in enumerate(reference["image_input/spatial_shapes"]):
        rows, columns = map(int, grid)
        flat = reference["image_input/pixel_values"][i, : rows * columns].reshape(rows, columns, 8, 8, 3)
        image = flat.swapaxes(1, 2).reshape(1, rows * 8, columns * 8, 3)
        model = converters.load(NAFLEX, image_size=image.shape[1:3])
        assert distance(model(image), reference["image_features"][i : i + 1]) < 1e-5, grid
    assert converters.load(NAFLEX).config.grid == (4, 4)  # that of the positions
    assert converters.load(FIXED).config.position_method == "bicubic"


def test_a_naflex_tower_without_config_json_is_resized_in_the_same_way(tmp_path: Path) -> None:
    shutil.copy(NAFLEX / "model.safetensors", tmp_path)
    bare, model = (converters.load(path, config={"num_heads": 4}, image_size=48) for path in (tmp_path, NAFLEX))
    assert bare.config.position_method == "bilinear-antialias"
    assert_same_bits(values(bare), values(model))


def test_a_naflex_tower_is_written_as_one_of_a_fixed_resolution(tmp_path: Path) -> None:
    model = converters.load(NAFLEX)
    path = converters.save(model, tmp_path / "fixed", format="huggingface_siglip")
    assert_same_bits(values(converters.load(path)), values(model))
    assert json.loads((path.parent / "config.json").read_text())["model_type"] == "siglip_vision_model"


def test_a_naflex_vit_of_timm_has_the_numbers_of_the_fixed_one(tmp_path: Path) -> None:
    model = built(position_prefix=False, num_registers=2, layer_scale=0.1, activation="gelu_erf")
    path = converters.save(model, tmp_path / "fixed", format="timm")
    said = json.loads((path.parent / "config.json").read_text())
    said |= {"architecture": "naflexvit_base_patch16_map", "global_pool": "token"}
    said["model_args"] = {"num_heads": model.config.num_heads}
    said["pretrained_cfg"]["input_size"] = [3, 48, 48]  # not that of the positions
    renamed = {"cls_token": "cls_token", "reg_token": "reg_token", "patch_embed.proj.bias": "proj.bias"}
    tensors = load_file(path)
    kernel, positions = tensors.pop("patch_embed.proj.weight"), tensors.pop("pos_embed")
    tensors |= {f"embeds.{new}": tensors.pop(old) for old, new in renamed.items()}
    tensors["embeds.proj.weight"] = kernel.transpose(0, 2, 3, 1).reshape(len(kernel), -1)
    tensors["embeds.pos_embed"] = positions.reshape(1, 4, 4, -1)
    (tmp_path / "naflex").mkdir()
    save_file(tensors, tmp_path / "naflex" / "model.safetensors")
    with pytest.raises(CheckpointError, match="may be a NaFlexVit whose positions keep the aspect ratio"):
        converters.load(tmp_path / "naflex")
    (tmp_path / "naflex" / "config.json").write_text(json.dumps(said))
    found = converters.load(tmp_path / "naflex")
    assert found.config.position_method == "bicubic-antialias"
    assert found.config.size == (48, 48)  # as timm builds it; its images are resized to that
    assert_same_bits(values(found), values(model.resized(48, method="bicubic-antialias")))
    assert_same_bits(values(converters.load(tmp_path / "naflex", image_size=32)), values(model))
    save_file(
        tensors | {"embeds.pos_embed": positions[:, :8].reshape(1, 2, 4, -1)}, tmp_path / "naflex" / "model.safetensors"
    )
    assert converters.load(tmp_path / "naflex", image_size=(16, 32)).config.grid == (2, 4)
    with open_checkpoint(tmp_path / "naflex" / "model.safetensors") as checkpoint:
        assert checkpoint.config.grid == (2, 4)  # the file has positions on two axes
    with pytest.raises(CheckpointError, match="only read"):
        converters.save(found, tmp_path / "back", format="timm_naflex")
    said["architecture"] = "naflexvit_base_patch16_radio_v3"
    (tmp_path / "naflex" / "config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="keep the aspect ratio"):
        converters.load(tmp_path / "naflex")
