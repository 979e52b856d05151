"""Biases of attention by offsets in two dimensions: BEiT, Data2Vec and timm's relpos models.

`test_position_variants` compares them with NumPy, `test_timm_variants` with files of timm.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import torch_peers as peers
from keras_vit import converters, export, position
from keras_vit.errors import CheckpointError
from keras_vit.model import cost
from keras_vit.model.config import ViTConfig
from model_weights import assert_same_bits, values
from peer_cases import ARGS, BEIT, CLS, RELPOS, SHARED_BIAS, TOLERANCE
from reference_cases import distance
from tiny_models import FAMILIES, built, prepared

BIASES = FAMILIES["relative biases"]
# A table for 2 x 3 patches and a token in front, of one head: row 5 y + x is 16 y + x * x, the last three 7, 8, 9.
TABLE = np.array([16 * y + x * x for y in range(3) for x in range(5)] + [7, 8, 9], np.float32)[:, None]


def test_a_table_is_resized_as_timm_and_transformers_do() -> None:
    # What `resize_rel_pos_bias_table` of timm 1.0.31 and torch.nn.functional.interpolate give for 3 x 3 patches.
    for method, y, x in (
        ("bicubic-antialias", [0, 0, 16, 32, 32], [0.0099019157, 1, 4, 9, 15.930686]),
        ("bicubic", [0, 6.4, 16, 25.6, 32], [0, 1, 4, 9, 16]),
    ):
        resized = position.resize_bias(TABLE, 3, (2, 3), method=method)
        np.testing.assert_allclose(resized[:-3, 0].reshape(5, 5), np.add.outer(y, x), rtol=1e-6)
        np.testing.assert_array_equal(resized[-3:], TABLE[-3:])
    np.testing.assert_array_equal(position.resize_bias(TABLE, (2, 3), (2, 3), method="official"), TABLE)


def test_what_cannot_be_combined_is_refused() -> None:
    for fields, error in (
        ({"position": "relative", "position_place": "shared", "relative_bias": "shared"}, "relative_bias='none'"),
        ({"relative_bias_mlp_dim": 8}, "relative_bias='none' needs relative_bias_mlp_dim=None"),
        ({"relative_bias": "blocks", "tokens_mlp_dim": 8}, "relative_bias needs attention"),
    ):
        with pytest.raises(ValueError, match=error):
            ViTConfig(**fields)


def test_formats_without_a_place_for_biases_name_them(tmp_path: Path) -> None:
    for format in ("timm", "google", "big_vision", "huggingface", "huggingface_dinov2"):
        with pytest.raises(CheckpointError, match="biases of attention by offsets in two dimensions"):
            converters.save(built(**BIASES), tmp_path / "model", format=format)
    for format, fields, error in (
        ("timm_beit", {**BIASES, "relative_bias_mlp_dim": 8}, "biases of attention"),
        ("timm_beit", {**BIASES, "position_place": "blocks", "position": "learned"}, "positions at every block"),
        ("timm_relpos", {**BIASES, "key_bias": True, "num_registers": 1}, "registers"),
        ("huggingface_beit", {**BIASES, "final_norm": "none"}, "final_norm='none'"),
        ("huggingface_beit", {**BIASES, "final_norm": "tokens", "image_size": (16, 48)}, "square images alone"),
    ):
        with pytest.raises(CheckpointError, match=error):
            converters.save(built(**fields), tmp_path / "model", format=format)


@pytest.mark.parametrize("format", ["timm_beit", "huggingface_beit"])
def test_buffers_of_rows_are_not_read_and_both_tables_are_refused(format: str, tmp_path: Path) -> None:
    model = built(**BIASES, activation="gelu_erf")
    path = converters.save(model, tmp_path / "model", format=format)
    tensors = load_file(path)
    tables = [name for name in tensors if name.endswith("bias_table")]
    index = {name.removesuffix("bias_table") + "index": np.zeros((17, 17), np.int64) for name in tables}
    save_file(tensors | index, path)
    assert_same_bits(values(converters.load(path)), values(model))
    shared = {"timm_beit": "rel_pos_bias.", "huggingface_beit": "beit.encoder.relative_position_bias."}[format]
    save_file(tensors | {f"{shared}relative_position_bias_table": tensors[tables[0]]}, path)
    with pytest.raises(CheckpointError, match="bias_table is left over"):
        converters.load(path)


def test_a_file_without_config_json_asks_for_the_pooling_and_reads_heads_and_grid(tmp_path: Path) -> None:
    model = built(**BIASES, activation="gelu_erf")
    path = converters.save(model, tmp_path / "theirs", format="timm_beit")
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(path), bare)
    with pytest.raises(CheckpointError, match=r"do not say classifier.*config=\{'classifier'"):
        converters.load(bare)
    with pytest.raises(CheckpointError, match="has 4 attention heads. Received: num_heads=8"):
        converters.load(bare, config={"classifier": "gap", "num_heads": 8})
    with pytest.warns(UserWarning, match="is assumed"):
        assert_same_bits(values(converters.load(bare, config={"classifier": "gap"})), values(model))
    save_file({name: value[:-2] if name.endswith("_table") else value for name, value in load_file(bare).items()}, bare)
    with pytest.raises(CheckpointError, match="47 relative biases does not fill a square grid"):
        converters.load(bare, config={"classifier": "gap"})


def test_a_relpos_file_without_layer_scale_may_be_another_model(tmp_path: Path) -> None:
    fields = {"relative_bias": "shared", "relative_bias_mlp_dim": 8, "position": "none", "classifier": "gap"}
    model = built(**fields, activation="gelu_erf")
    path = converters.save(model, tmp_path / "theirs", format="timm_relpos")
    assert json.loads((path.parent / "config.json").read_text())["model_args"]["init_values"] == 0
    assert_same_bits(values(converters.load(path)), values(model))
    save_file(load_file(path), tmp_path / "bare.safetensors")
    with pytest.raises(CheckpointError, match="may be timm's ResPostRelPosBlock"):
        converters.load(tmp_path / "bare.safetensors", image_size=32)


def test_a_small_file_of_litert_has_one_number_for_each_pair_of_tokens(tmp_path: Path) -> None:
    for name in ("relative biases", "relative biases of one MLP"):
        model = built(**FAMILIES[name], image_size=80)
        images = prepared(model.config)
        export.tflite(model, path := tmp_path / "out.tflite", quantize="none", verify=images)
        expected = cost.count(model.config).file_bytes["float32"]
        assert 0 < path.stat().st_size - expected < 60_000
        assert expected > 4 * (model.count_params() + 4 * 101**2)


# ---- timm and transformers


@pytest.mark.torch
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::UserWarning:timm")
def test_a_model_of_timm_at_another_size_gives_its_numbers(tmp_path: Path) -> None:
    timm = peers.import_timm()
    for architecture, changes in (
        (BEIT, {"img_size": 48}),
        (BEIT, {"img_size": (16, 48), "use_abs_pos_emb": True}),
        (BEIT, {"img_size": 40, **SHARED_BIAS}),
        (RELPOS, {"img_size": 48}),
        (CLS, {"img_size": (16, 48), "rel_pos_type": "bias"}),
    ):
        arguments = {**ARGS, **changes}
        theirs = peers.saved_by_timm(tmp_path, architecture, arguments)
        model = converters.load(tmp_path)
        for size in ((64, 64), (24, 24), (16, 40)):
            other = timm.create_model(architecture, pretrained=False, **arguments)
            other.load_state_dict(theirs.state_dict())
            other.set_input_size(size)
            images = prepared(model.config.replace(image_size=size))
            want = peers.outputs(other.eval(), images)
            assert distance(model.resized(size)(images), want) < TOLERANCE, (architecture, changes, size)
            assert distance(converters.load(tmp_path, image_size=size)(images), want) < TOLERANCE


OPTIONS: dict[str, dict[str, Any]] = {
    "a table a block": {"use_relative_position_bias": True},
    "one table, class token": {"use_shared_relative_position_bias": True, "use_mean_pooling": False},
    "positions too": {"use_relative_position_bias": True, "use_absolute_position_embeddings": True},
    "no LayerScale": {"use_relative_position_bias": True, "layer_scale_init_value": 0.0},
    "no biases": {"use_absolute_position_embeddings": True, "use_mask_token": True},
}


@pytest.mark.torch
@pytest.mark.peers
@pytest.mark.parametrize("kind", ["BeitModel", "BeitForImageClassification", "Data2VecVisionForImageClassification"])
def test_a_beit_of_transformers_is_read_and_comes_back(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name, options in OPTIONS.items():
        config = getattr(transformers, kind.split("Model")[0].split("For")[0] + "Config")
        theirs = peers.randomised(getattr(transformers, kind)(config(**sizes, intermediate_size=64, **options)))
        theirs.save_pretrained(tmp_path / "theirs")
        model = converters.load(tmp_path / "theirs")
        shutil.rmtree(tmp_path / "ours", ignore_errors=True)
        converters.save(model, tmp_path / "ours", format="huggingface_beit")
        again = peers.loaded_by_transformers(tmp_path / "ours", kind.replace("Data2VecVision", "Beit"))
        for size in (32, 40):
            images = prepared(model.config.replace(image_size=size))
            want = peers.outputs(theirs, images)
            assert distance(model.resized(size)(images), want) < TOLERANCE, (name, size)
            assert distance(peers.outputs(again, images), want) < TOLERANCE, (name, size)
