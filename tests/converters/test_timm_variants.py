"""timm's files are read as timm does; its outputs for tiny models are in tests/data/timm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import peer_cases as cases
from keras_vit import converters
from keras_vit.converters import json_timm
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ViTConfig
from model_weights import assert_same_bits, values
from places import DATA
from reference_cases import arrays, distance
from tiny_models import built, prepared, tiny

FOLDER = DATA / "timm"
OUTPUTS = arrays(FOLDER / "outputs.npz")


@pytest.mark.parametrize("name", OUTPUTS)
def test_timms_own_files_give_timms_numbers_and_are_written_with_the_same_config(tmp_path: Path, name: str) -> None:
    model = converters.load(FOLDER / name)
    assert distance(model(prepared(model.config)), OUTPUTS[name]) < cases.TOLERANCE
    path = converters.save(model, tmp_path / "ours", format=converters.detect(FOLDER / name))
    assert converters.load(path.parent).config == model.config
    assert_same_bits(values(converters.load(path.parent)), values(model))
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (path.parent, FOLDER / name))
    assert (ours["num_classes"], ours["global_pool"]) == (theirs["num_classes"], theirs["global_pool"])
    for key, value in theirs["model_args"].items():
        said = ours["model_args"][key]
        if key == "img_size":  # one side or both
            said, value = np.broadcast_to(said, 2).tolist(), np.broadcast_to(value, 2).tolist()
        assert said == value, key
    for key in ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", "first_conv", "classifier"):
        assert ours["pretrained_cfg"][key] == theirs["pretrained_cfg"][key], key


ROTARY: dict[str, Any] = {"rotary_interleaved": True, "rotary_axes": "xy"}
ROPE_VIT = {**ROTARY, "rotary_theta": 100.0, "rotary_grid": 0}
PERCEPTION = {**ROTARY, "rotary_theta": 10000.0, "rotary_grid": 32, "rotary_offset": 1.0, "norm_epsilon": 1e-5}
# What the name of an entry point tells that its tensors do not.
NAMES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"num_heads": 3},
    "vit_base_patch16_224.augreg2_in21k_ft_in1k": {"num_heads": 12},
    "vit_base_patch16_gap_224": {"num_heads": 16},
    "vit_base_patch16_plus_clip_240": {"num_heads": 14, "norm_epsilon": 1e-5},
    "vit_large_patch14_clip_quickgelu_224": {"num_heads": 16, "norm_epsilon": 1e-5, "activation": "gelu_quick"},
    "vit_base_patch16_siglip_224": {"num_heads": 12},
    "vit_base_patch32_siglip_256": {"num_heads": 12, "activation": "gelu_tanh"},
    "vit_so400m_patch16_siglip_384": {"num_heads": 16, "activation": "gelu_tanh"},
    "vit_small_r26_s32_224": {"num_heads": 6},
    "vit_tiny_r_s16_p8_224": {"num_heads": 3},
    "deit_tiny_distilled_patch16_224": {"num_heads": 3},
    "vit_pe_core_small_patch16_384": PERCEPTION | {"num_heads": 6, "rotary_grid": 24, "pool_heads": 8},
    "vit_pe_core_gigantic_patch14_448": PERCEPTION | {"num_heads": 16, "rotary_offset": 0.0, "pool_heads": 8},
    "vit_pe_lang_gigantic_patch14_448": PERCEPTION | {"num_heads": 16, "rotary_offset": 0.0, "final_norm": "none"},
    "eva_giant_patch14_clip_224": {"num_heads": 16, "norm_epsilon": 1e-6, "rotary_theta": None},
    "vit_base_patch16_rope_ape_224": {"num_heads": 12, **ROPE_VIT},
    "beit3_large_patch16_224": {"num_heads": 16, "norm_epsilon": 1e-5},
    "eva02_large_patch14_clip_336": {
        **{"num_heads": 16, "norm_epsilon": 1e-6},
        **{"rotary_theta": 10000.0, "rotary_grid": 16, "rotary_interleaved": True},
    },
    "aimv2_huge_patch14_448": {"num_heads": 12},
    "aimv2_3b_patch14_224": {"num_heads": 24},
    "vit_nobody_knows": {},
}
# Entry points of timm's vision_transformer.py and deit.py, and the width of their models.
ENTRY_POINTS = {
    "vit_tiny_patch16_224": 192,
    "vit_small_patch16_224": 384,
    "vit_base_patch16_224": 768,
    "vit_large_patch16_224": 1024,
    "vit_huge_patch14_224": 1280,
    "vit_giant_patch14_224": 1408,
    "vit_gigantic_patch14_224": 1664,
    "vit_base_patch16_clip_224": 768,
    "vit_large_patch14_clip_224": 1024,
    "vit_huge_patch14_clip_224": 1280,
    "deit_tiny_distilled_patch16_224": 192,
    "deit_small_distilled_patch16_224": 384,
    "deit_base_distilled_patch16_224": 768,
}
PAPERS = {
    "Ti/16": "vit_tiny_patch16_224",
    "R+Ti/16": "vit_tiny_r_s16_p8_224",
    "R26+S/32": "vit_small_r26_s32_224",
    "R50+B/16": "vit_base_r50_s16_224",
    "R50+L/32": "vit_large_r50_s32_224",
}


def test_the_name_of_an_entry_point_tells_what_its_tensors_do_not() -> None:
    assert {name: json_timm.read({"architecture": name}, {}) for name in NAMES} == NAMES
    for name in cases.NOT_READ:
        with pytest.raises(CheckpointError, match=f"architecture '{name}' is not read"):
            json_timm.read({"architecture": name})


def test_a_type_of_rotary_positions_is_read_where_it_is_all_that_changes() -> None:
    mixed = {"rope_type": "mixed"}
    said = json_timm.read({"architecture": "vit_pe_core_base_patch16_224", "model_args": mixed})
    assert (said["rotary_learned"], said["rotary_grid"], said["rotary_offset"]) == (True, 0, 0.0)
    for name, arguments in (
        ("vit_small_patch16_dinov3", {"rope_type": "cat"}),
        ("eva02_base_patch14_448", mixed),
        ("vit_base_patch16_224", mixed),
        ("vit_base_patch16_rope_224", {**mixed, "rope_rotate_half": True}),
    ):
        with pytest.raises(CheckpointError, match="model_args.rope_"):
            json_timm.read({"architecture": name, "model_args": arguments})


def test_timm_is_told_an_entry_point_and_the_rest_in_arguments() -> None:
    for name, width in ENTRY_POINTS.items():
        epsilon = 1e-5 if "clip" in name else 1e-6
        changes = {"distilled": "distilled" in name, "norm_epsilon": epsilon, "num_layers": 3}
        said = json_timm.write_vit(tiny(hidden_size=width, image_size=48, **changes))
        arguments = {"img_size": 48, "patch_size": 8, "embed_dim": width, "depth": 3, "num_heads": 4}
        assert said["architecture"] == name
        assert said["model_args"].items() >= arguments.items()
        assert int(said["model_args"]["mlp_ratio"] * width) == 64
    configs = {name: ViTConfig.from_name(name, image_size=384) for name in PAPERS}
    assert {name: json_timm.write_vit(config)["architecture"] for name, config in configs.items()} == PAPERS


def changed(tmp_path: Path, name: str, **entries: Any) -> Path:
    """Copy a case and change entries of its config.json; None removes one."""
    folder = tmp_path / "changed"
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    described = json.loads((folder / "config.json").read_text())
    for path, value in entries.items():
        *parents, last = path.split("__")
        place = described
        for parent in parents:
            place = place[parent]
        place[last] = value
        if value is None:
            del place[last]
    (folder / "config.json").write_text(json.dumps(described))
    return folder


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "vit_nobody_knows", "model_args__num_heads": None}, r"pass config=\{'num_heads': ...\}"),
    ({"model_args__qk_norm": True}, r"model_args.qk_norm is read only as"),
    ({"model_args__pool_include_prefix": True}, "model_args.pool_include_prefix is read only with"),
    ({"model_args__use_post_transformer_norm": False}, "use_post_transformer_norm is read only with use_fc_norm"),
    ({"model_args__norm_layer": "rmsnorm"}, "model_args.norm_layer is read only as"),
    ({"model_args__attn_layer": "diff"}, r"model_args has unknown keys \['attn_layer'\]"),
    ({"global_pool": "avgmax"}, "global_pool must be one of .*Received: 'avgmax'"),
    ({"model_args__act_layer": "mish"}, "model_args.act_layer must be one of .*Received: 'mish'"),
    ({"model_args__embed_dim": 32}, "hidden_size 32 where the tensors have 16"),
    ({"architecture": "vit_nobody_knows", "model_args": 3}, "pass config="),
]


def test_what_is_not_known_is_refused_and_never_guessed(tmp_path: Path) -> None:
    for entries, said in WRONG:
        with pytest.raises(CheckpointError, match=said):
            converters.load(changed(tmp_path, "class_token_without_position", **entries))


def test_a_norm_behind_the_pooling_does_not_tell_the_pooling(tmp_path: Path) -> None:
    path = Path(shutil.copy(FOLDER / "mean_beside_a_class_token" / "model.safetensors", tmp_path))
    with pytest.raises(CheckpointError, match=r"pass config=\{'classifier': 'token' or 'gap'\}"):
        converters.load(path, config={"num_heads": 2})
    model = converters.load(path, config={"num_heads": 2, "classifier": "gap"})
    assert distance(model(prepared(model.config)), OUTPUTS["mean_beside_a_class_token"]) < cases.TOLERANCE


@pytest.mark.parametrize("part", [slice(None, None, 3), pytest.param(slice(None), marks=pytest.mark.full, id="all")])
@pytest.mark.parametrize(
    ("format", "refused"), [("timm", cases.REFUSED_BY_TIMM), ("huggingface", cases.REFUSED_BY_TRANSFORMERS)]
)
def test_what_another_package_cannot_be_is_not_written_for_it(
    tmp_path: Path, format: str, refused: dict[str, str], part: slice
) -> None:
    for name, said in [*refused.items()][part]:
        with pytest.raises(CheckpointError, match=said):
            converters.save(built(**{**cases.ERF, **cases.OURS[name]}), tmp_path / "ours", format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", cases.WITHOUT_ENTRY_POINT)
def test_a_hybrid_that_timm_has_no_name_for_is_given_none(tmp_path: Path, name: str) -> None:
    changes = cases.OURS[name]
    model = built(**{**cases.ERF, **changes, "resnet": {**changes["resnet"], **cases.RESNET}})
    path = converters.save(model, tmp_path / "ours", format="timm")
    assert json.loads((path.parent / "config.json").read_text())["architecture"] == "vit_hybrid"
    assert_same_bits(values(converters.load(path.parent)), values(model))


def test_a_model_of_one_channel_is_written_where_others_have_three_means(tmp_path: Path) -> None:
    aimv2 = {"norm": "rms", "patch_norm": True, "dense_bias": False, "qkv_bias": False, "gated_mlp": True}
    aimv2 |= {"activation": "silu", "class_token": False, "classifier": "gap", "norm_epsilon": 1e-5}
    model = built(num_channels=1, **aimv2)
    again = converters.load(converters.save(model, tmp_path / "ours", format="timm_aimv2"))
    assert again.config.preprocessing == model.config.preprocessing
    assert_same_bits(values(again), values(model))
