"""Every model in every format has the same bits after writing and reading, or gives an error that names the cause."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import feature_table
import reference_cases as reference
from format_cases import load
from keras_vit import converters
from keras_vit.converters.containers import open_container
from keras_vit.converters.saving import plan_file
from keras_vit.converters.table import load_table
from keras_vit.errors import CheckpointError
from keras_vit.model.config import ResNetConfig, ViTConfig
from keras_vit.model.cost import symbolic_model
from marks import full_except
from model_weights import assert_same_bits, values
from tiny_models import FAMILIES, OTHERS, VARIANTS, built, prepared, tiny

FORMATS = ("big_vision", "google", "huggingface", "timm")
# "yes": unchanged; "told": with a warning that other readers' last digits differ; else a part of the error.
CASES = {
    # case: big_vision | google | huggingface | timm
    "vit_token": "yes | yes | yes | yes",
    "vit_prelogits": "yes | yes | pre_logits | pre_logits",
    "vit_gap": "yes | yes | class_token=False | yes",
    "vit_headless": "yes | yes | yes | yes",
    "vit_token_smallvar": "yes | yes | yes | yes",
    "vit_unpooled": "yes | yes | class_token=False | yes",
    "vit_token_unpooled": "yes | yes | classifier='token_unpooled' | yes",
    "hybrid_r26": "ResNet | yes | ResNet | told",
    "hybrid_stem_only": "ResNet | yes | ResNet | told",
    "hybrid_eps": "ResNet | yes | ResNet | told",
    "vit_not_multiple": "yes | yes | yes | yes",
    "bv_tok_rep": "yes | yes | pre_logits | pre_logits",
    "bv_gap_sincos": "yes | position='sincos2d' | pre_logits | pre_logits",
    "bv_map": "yes | attention pooling | attention pooling | yes",
    "bv_gap_bf16_scan": "yes | yes | class_token=False | yes",
    "bv_siglip_img": "yes | attention pooling | attention pooling | yes",
    "hf_cls_v5": "told | told | yes | told",
    "hf_model_pooler_v5": "told | told | yes | pre_logits",
    "hf_gelu_new_eps_v5": "qkv_bias=False | qkv_bias=False | yes | yes",
    "timm_token": "told | told | yes | yes",
    "timm_gap_fcnorm": "final_norm='pooled' | final_norm='pooled' | class_token=False | yes",
    "timm_clip_prenorm": "pre_norm | pre_norm | pre_norm | yes",
    "timm_reg": "registers | registers | registers | yes",
    "timm_noqkvbias_ls": "LayerScale | LayerScale | LayerScale | yes",
    "timm_hybrid_r26": "ResNet | told | ResNet | yes",
    "timm_hybrid_stem": "ResNet | told | ResNet | yes",
}
EVERYTHING: dict[str, Any] = {
    "labels": ("a", "a", "c", "d", "e"),
    "dropout_rate": 0.1,
    "attention_dropout_rate": 0.1,
    "stochastic_depth": 0.1,
    "head_bias_init": -10.0,
    "position_method": "bilinear",
    "preprocessing": {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.2, 0.3), "resize": "crop", "crop_fraction": 0.875},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # model: big_vision | google | huggingface | timm, and the changes of a tiny config
    "distilled": ("distillation | distillation | distillation | yes", VARIANTS["distilled"]),
    "gap with a class token": (
        "classifier='gap' | classifier='gap' | classifier='gap' | yes",
        {"classifier": "gap", "class_token": True},
    ),
    "map with a class token": (
        "yes | attention pooling | attention pooling | yes",
        {"classifier": "map", "class_token": True},
    ),
    "token outside": ("yes | yes | yes | yes", {"position_prefix": False}),
    "several class tokens": (" | ".join(["several class tokens"] * 4), {"num_class_tokens": 3}),
    "registers with rows": ("registers | registers | registers | yes", {"num_registers": 3}),
    "headless representation": ("yes | yes | yes | pre_logits", {"representation_size": 24, "num_classes": 0}),
    "headless representation of relu": (
        "activation='relu' | activation='relu' | yes | pre_logits",
        {"num_classes": 0, "representation_size": 24, "representation_activation": "relu"},
    ),
    "no positions": ("position='none' | position='none' | position='none' | yes", {"position": "none"}),
    "sincos with class token": (
        "yes | position='sincos2d' | position='sincos2d' | position='sincos2d'",
        {"position": "sincos2d"},
    ),
    "2-D positions": ("learned2d | learned2d | learned2d | learned2d", VARIANTS["2-D positions"]),
    "positions at every block": ("'blocks' | 'blocks' | 'blocks' | 'blocks'", VARIANTS["positions at every block"]),
    "shared positions": ("'shared' | 'shared' | 'shared' | 'shared'", VARIANTS["shared positions"]),
    "relative positions": ("'relative' | 'relative' | 'relative' | 'relative'", VARIANTS["relative positions"]),
    "shared relative positions": (
        "'relative' | 'relative' | 'relative' | 'relative'",
        VARIANTS["shared relative positions"],
    ),
    "wide image": ("yes | yes | yes | yes", {"image_size": (16, 48)}),
    "erf": ("told | told | yes | yes", {"activation": "gelu_erf"}),
    "quick": ("told | told | yes | yes", {"activation": "gelu_quick"}),
    "relu": ("activation='relu' | activation='relu' | yes | yes", {"activation": "relu"}),
    "erf, epsilon 1e-12": ("told | told | yes | told", {"activation": "gelu_erf", "norm_epsilon": 1e-12}),
    "token, norm pooled": (
        "final_norm='pooled' | final_norm='pooled' | final_norm='pooled' | yes",
        {"final_norm": "pooled"},
    ),
    "everything else": ("yes | yes | yes | yes", EVERYTHING),
    "no patch bias": ("patch_bias=False | patch_bias=False | patch_bias=False | pre_norm", {"patch_bias": False}),
    "gated MLP": ("gated MLP | gated MLP | gated MLP | yes", {"gated_mlp": True, "activation": "silu"}),
}

pytestmark = pytest.mark.filterwarnings("ignore:keras_vit. images of 35x38:UserWarning")


def saved(model: Any, path: Path, format: str) -> tuple[Path | None, str]:
    """Save a model; return the file and the outcome in the words of the tables above."""
    path.mkdir()
    name = path / f"file.{load_table(format).container}"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            converters.save(model, name, format=format)
        except converters.CheckpointError as error:
            assert not list(path.iterdir())
            return None, str(error)
    told = [str(one.message) for one in seen if str(one.message).startswith(f"keras_vit: {format} files do not say")]
    assert len(told) <= 1
    return name, "told" if told else "yes"


def check(model: Any, cells: str, folder: Path) -> None:
    """Save in each format and load again: the same bits and config, or an error with the text of the cell."""
    want = values(model)
    for format, cell in zip(FORMATS, cells.split(" | "), strict=True):
        path, outcome = saved(model, folder / format, format)
        if path is None:
            assert cell in outcome, format
            assert format in outcome or "config.json" in outcome
            continue
        assert outcome == cell, format
        assert converters.detect(path) == format
        assert converters.read_config(path) == model.config, format
        alone = shutil.move(path, folder / f"{format}.anything")  # without config.json: the file's note has the rest
        again = converters.load(alone)
        assert again.config == model.config, format
        assert_same_bits(values(again), want)


def test_the_tables_have_every_case_and_every_format_that_is_written() -> None:
    assert CASES.keys() <= reference.CASES.keys()
    assert [name for name in feature_table.FORMATS if load_table(name).writable] == list(FORMATS)


QUICK = ("vit_token", "hybrid_r26", "bv_map", "hf_cls_v5", "timm_token", "timm_reg")


@pytest.mark.parametrize("name", full_except(QUICK, CASES))
def test_every_case_goes_into_every_format_and_back_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    check(load(name, tmp_path), CASES[name], tmp_path)


@pytest.mark.parametrize("name", full_except([*MODELS][::2], MODELS))
def test_every_kind_of_model_goes_into_every_format_and_back_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    cells, changes = MODELS[name]
    check(built(**changes), cells, tmp_path)


# ---- what no format knows


@dataclass(frozen=True, kw_only=True)
class NextConfig(ViTConfig):
    """A config with a field that no format knows."""

    post_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class NextResNet(ResNetConfig):
    """A ResNet with a field that no format knows."""

    activation: str = "relu"


DINO = {"layer_scale": 1.0, "mlp_dim": 128, "position_prefix": False, "num_classes": 0}
HELD: dict[str, dict[str, Any]] = {  # by each format
    **dict.fromkeys(("google", "huggingface", "timm"), {}),
    "big_vision": {"position_prefix": False},
    "huggingface_clip": {"pre_norm": True, "patch_bias": False, "num_classes": 0},
    "huggingface_siglip": {"classifier": "gap"},
    "huggingface_deit": {"distilled": True},
    "huggingface_ijepa": {"class_token": False, "classifier": "gap"},
    "huggingface_pixio": {"num_class_tokens": 3, "num_classes": 0},
    **dict.fromkeys(("huggingface_dinov2", "meta_dinov2"), {**DINO, "position_prefix": True}),
    "huggingface_dinov2_registers": {**DINO, "num_registers": 2},
    **dict.fromkeys(("huggingface_dinov3", "timm_eva"), {**DINO, **FAMILIES["rotary"], "activation": "gelu_erf"}),
    "huggingface_aimv2": {**FAMILIES["AIMv2"], "num_classes": 0},
    "timm_aimv2": {**FAMILIES["AIMv2"], "classifier": "gap"},
    "timm_rope": FAMILIES["RoPE-ViT"],
    **dict.fromkeys(("huggingface_beit", "timm_beit"), {**FAMILIES["relative biases"], "activation": "gelu_erf"}),
    "timm_relpos": {"relative_bias": "blocks", "position": "none", "activation": "gelu_erf", "layer_scale": 0.1},
    **dict.fromkeys(("mixer", "timm_mixer"), OTHERS["mixer"]),
    **dict.fromkeys(("bit", "timm_bit"), OTHERS["BiT"]),
    "big_vision_bit": {**OTHERS["BiT"], "resnet": {**OTHERS["BiT"]["resnet"], "version": 1}},
}


def planned(config: ViTConfig, format: str) -> Any:
    """Plan the file of a model that is not built."""
    plain = ViTConfig(**{name: getattr(config, name) for name in ViTConfig.__dataclass_fields__})
    shapes = {v.path: tuple(v.shape) for v in symbolic_model(plain).variables if "seed_generator" not in v.path}
    return plan_file(config, shapes, load_table(format))


@pytest.mark.full
def test_a_field_that_no_format_knows_is_refused_by_name_and_value() -> None:
    assert set(HELD) == {name for name in converters.formats() if load_table(name).writable}
    for format, changes in HELD.items():
        fields = tiny(**changes).to_dict()
        assert planned(NextConfig(**fields), format).sources == planned(tiny(**changes), format).sources
        with pytest.raises(CheckpointError, match=f"{format} format cannot express post_norm=True"):
            planned(NextConfig(**fields, post_norm=True), format)


def test_a_field_of_a_resnet_that_no_format_knows_is_refused() -> None:
    for format in ("google", "timm", "bit", "timm_bit", "big_vision_bit"):
        config = tiny(**(HELD[format] or VARIANTS["hybrid"]))
        assert config.resnet
        known = {name: getattr(config.resnet, name) for name in ResNetConfig.__dataclass_fields__}
        assert planned(config, format)
        with pytest.raises(CheckpointError, match=f"{format} format cannot express resnet=.*'activation': 'silu'"):
            planned(config.replace(resnet=NextResNet(**known, activation="silu")), format)


# ---- other readers


def plain(path: Path) -> Path:
    """Remove from a file what only keras_vit reads."""
    if path.suffix == ".npz":
        kept = {name: value for name, value in reference.arrays(path).items() if "keras_vit" not in name}
        np.savez(path, **kept)  # type: ignore[arg-type]
    else:
        save_file(load_file(path), path, metadata={"format": "pt"})
    return path


OTHER_READERS = [  # case, target, whether prefix tokens have positions
    ("vit_prelogits", "big_vision", False),
    ("vit_token_unpooled", "big_vision", False),
    ("bv_tok_rep", "google", True),
    ("vit_token", "huggingface", True),
    ("vit_token", "timm", True),
    ("vit_token_smallvar", "huggingface", True),
    ("bv_map", "timm", False),
    ("hf_gelu_new_eps_v5", "timm", True),
    ("timm_token", "huggingface", True),
    ("hybrid_r26", "google", True),
    ("timm_hybrid_r26", "timm", True),
]


@pytest.mark.full
def test_the_formats_own_code_would_compute_the_same(tmp_path: Path) -> None:
    for number, (name, target, prefix_rows) in enumerate(OTHER_READERS):
        (tmp_path / str(number)).mkdir()
        model = load(name, tmp_path / str(number))
        path, _ = saved(model, tmp_path / str(number) / "saved", target)
        assert path
        told = {"classifier": "token_unpooled"} if name == "vit_token_unpooled" else None
        again = converters.load(plain(path), config=told)
        assert again.config.position_prefix == prefix_rows or not again.config.num_prefix_tokens
        images = prepared(model.config)
        # Adding the class token's row to the token is one rounding of float32.
        assert reference.distance(again(images), np.asarray(model(images))) <= 1e-6, (name, target)


def test_a_class_token_in_a_format_without_its_position_row_has_it_added(tmp_path: Path) -> None:
    own = values(model := built())
    with np.load(converters.save(model, tmp_path / "out.npz", format="big_vision")) as file:
        assert np.array_equal(file["params/cls"], own["prefix/cls"] + own["position/embedding"][:, :1])
        assert np.array_equal(file["params/pos_embedding"], own["position/embedding"][:, 1:])


def test_a_class_token_without_a_position_row_has_an_empty_one_for_transformers(tmp_path: Path) -> None:
    model = built(position_prefix=False, num_classes=0)
    path = converters.save(model, tmp_path / "out", format="huggingface")
    table = load_file(path)["embeddings.position_embeddings"]
    assert table.shape == (1, 17, 32)
    assert not table[:, 0].any()
    assert np.array_equal(table[:, 1:], values(model)["position/embedding"])
    larger = converters.load(path, image_size=(24, 40))  # the zero rows are removed after interpolation
    assert_same_bits(values(larger), values(model.resized((24, 40), method=larger.config.position_method)))


def test_rows_that_are_noted_as_empty_and_are_not_are_refused(tmp_path: Path) -> None:
    path = converters.save(built(position_prefix=False), tmp_path / "out", format="huggingface")
    with open_container(path) as container:
        note = container.metadata
    tensors = load_file(path)
    tensors["vit.embeddings.position_embeddings"][0, 0, 5] = 1
    save_file(tensors, path, metadata=note)
    with pytest.raises(CheckpointError, match="are zero, and they are not"):
        converters.load(path)
