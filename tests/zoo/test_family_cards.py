"""The cards of further families: sizes, files, and terms that must be accepted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import family_table
from command_line import fails, run
from keras_vit import VisionTransformer, converters, zoo
from keras_vit._util import downloads
from keras_vit.errors import FileUnavailableError, LicenseError
from keras_vit.model.cost import count
from keras_vit.zoo import cards, pretrained
from keras_vit.zoo.catalogue import details
from model_weights import assert_same_bits, values
from places import DATA
from tiny_models import randomised

pytest_plugins = ["download_fixtures"]

# Millions of parameters that timm prints (results/*.csv, aa4b585), and those of models_test.py in vision_transformer.
# FlexiViT has 86.59 there, with patches of 16 pixels at 240.
OFFICIAL = {
    ("DINOv2-S/14", "lvd142m"): 22.06,
    ("DINOv2-reg-B/14", "lvd142m"): 86.58,
    ("DINOv3-S+/16", "lvd1689m"): 28.69,
    ("DINOv3-B/16", "lvd1689m"): 85.66,
    ("DINOv3-B/16", "timm-lvd1689m"): 85.64,
    ("SigLIP-B/16", "webli-224"): 92.88,
    ("SigLIP2-B/32", "webli-256"): 94.55,
    ("CLIP-B/16", "openai"): 86.19,
    ("DeiT-Ti/16", "fb_in1k-224"): 5.72,
    ("DeiT-distilled-B/16", "fb_in1k-224"): 87.34,
    ("DeiT3-M/16", "fb_in1k-224"): 38.85,
    ("FlexiViT-B", "1200ep_in1k"): 86.59,
    ("EVA02-Ti/14", "mim_in22k_ft_in1k"): 5.76,
    ("EVA02-B/14", "mim_in22k_ft_in1k"): 87.12,
    ("Mixer-B/16", "imagenet2012"): 59.88,
    ("BiT-R50x1", "imagenet2012"): 25.55,
    ("BEiT-L/16", "in22k_ft_in22k_in1k-512"): 305.67,
    ("BEiTv2-B/16", "in1k_ft_in22k_in1k"): 86.53,
    ("RoPEViT-L/16", "ape-naver_in1k"): 304.37,
    ("Pixio-B/16", "metaclip2b"): 85.86,
    ("AIMv2-L/14", "apple_pt-224"): 309.2,
    ("BEiT3-B/16", "in22k_ft_in1k"): 86.66,
    ("EVA02-CLIP-L/14", "merged2b-336"): 304.43,
}
# A file of the official code -> the model and tag with the same options.
CASES = {
    "families/hf_dinov2": ("DINOv2-B/14", "lvd142m"),
    "families/hf_dinov2_swiglu": ("DINOv2-g/14", "lvd142m"),
    "families/hf_dinov2_reg_cls": ("DINOv2-reg-B/14", "lvd142m"),
    "families/hf_dinov3_gated": ("DINOv3-S+/16", "lvd1689m"),
    "families/timm_dinov3_swiglu": ("DINOv3-S+/16", "timm-lvd1689m"),
    "families/timm_eva02": ("EVA02-B/14", "mim_in22k_ft_in1k"),
    "families/timm_eva02_fused": ("EVA02-S/14", "mim_in22k_ft_in1k"),
    "families/hf_pixio": ("Pixio-B/16", "metaclip2b"),
    "timm/AIMv2": ("AIMv2-L/14", "apple_pt-224"),
    "timm/BEiT-3": ("BEiT3-B/16", "in22k_ft_in1k"),
    "families/hf_siglip_vision": ("SigLIP-B/16", "webli-224"),
    "google_families/bv_siglip2": ("SigLIP2-B/16", "webli-224"),
    "google_families/bv_flexivit": ("FlexiViT-B", "1200ep_in1k"),
    "google_families/vit_mixer": ("Mixer-B/16", "imagenet2012"),
    "google_families/timm_mixer": ("Mixer-B/16", "goog_in21k_ft_in1k"),
}
SIZES = (
    *("hidden_size", "mlp_dim", "num_heads", "num_layers", "patch_size", "image_size", "num_classes", "tokens_mlp_dim"),
    *("preprocessing", "labels", "layer_scale", "position_method", "num_class_tokens"),
    "num_channels",
)


@pytest.mark.full
def test_a_model_has_the_official_number_of_parameters() -> None:
    found = {}
    for name, tag in OFFICIAL:
        config = zoo.card(name).weights[tag].whole_config()
        if tag == zoo.card(name).default and not name.startswith(("FlexiViT", "Mixer", "BiT")):
            assert pretrained.resolve(name, default=None).expected_config == config, name  # random weights
        if name.startswith("FlexiViT"):
            config = config.replace(patch_size=16, image_size=240)
        found[name, tag] = round(count(config).parameters / 1e6, 2)
    assert found == OFFICIAL


def test_a_card_states_the_options_that_its_kind_of_file_has() -> None:
    for case, (name, tag) in CASES.items():
        stated = zoo.card(name).weights[tag].whole_config().to_dict()
        read = converters.read_config(DATA / case).to_dict()
        read["classifier"] = "token" if read["classifier"] == "token_gap" else read["classifier"]
        stated, read = (
            {key: value for key, value in fields.items() if key not in SIZES}
            | {"layer_scale": fields["layer_scale"] is None}
            for fields in (stated, read)
        )
        assert stated == read, case


def test_families_follow_each_other_and_the_vits_come_first() -> None:
    families = [zoo.card(name).family for name in zoo.names()]
    assert list(dict.fromkeys(families)) == sorted(set(families), key=lambda name: (name != "ViT", name.casefold()))
    assert sum(one != two for one, two in zip(families, families[1:], strict=False)) == len(set(families)) - 1
    assert {"BiT", "CLIP", "DeiT", "DINOv2", "DINOv3", "FlexiViT", "MAE", "Mixer", "MSN", "SigLIP2"} <= set(families)


def test_licenses_are_those_of_the_publishers() -> None:
    rows = {zoo.card(name).family: zoo.card(name).weights.values() for name in zoo.names()}
    assert {row.license for row in rows["MAE"]} == {"CC-BY-NC-4.0"}
    assert "does not allow commercial use" in details(zoo.card("MAE-B/16"))
    assert {family for family, weights in rows.items() if any(row.terms for row in weights)} == {
        "DINOv3",
        "EUPE",
        "Franca",
        "Pixio",
        "RADIO",
    }
    assert "--accept-license" in details(zoo.card("DINOv3-B/16"))


# ---- files


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> VisionTransformer:
    """Put a DINOv3-B/16 with small sizes on its card, and its file into a mirror."""
    row = zoo.card("DINOv3-B/16").weights["timm-lvd1689m"]
    sizes: dict[str, Any] = {"hidden_size": 32, "mlp_dim": 64, "num_heads": 2, "num_layers": 1}
    row = dataclasses.replace(row, config={**row.config, **sizes}, image_size=32)
    monkeypatch.setattr(cards, "all_cards", lambda: {row.architecture: cards.Card(row.architecture, {"small": row})})
    model = randomised(VisionTransformer(row.whole_config()))
    folder = tmp_path / "mirror" / Path(row.file).parent
    folder.mkdir(parents=True)
    converters.save(model, folder, format="timm_eva")
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "mirror"))
    return model


def test_a_file_with_terms_is_loaded_only_after_they_are_accepted(small: VisionTransformer, tmp_path: Path) -> None:
    with pytest.raises(LicenseError, match="DINOv3 License.*https://ai.meta.com/.*accept_license=True"):
        zoo.load("DINOv3-B/16")
    model = zoo.load("DINOv3-B/16", accept_license=True)
    assert_same_bits(values(model), values(small))
    assert model.config.preprocessing == small.config.preprocessing
    assert zoo.load("DINOv3-B/16", weights=None, accept_license=False).config.rotary_theta == 100.0  # no download
    (config,) = (tmp_path / "mirror").rglob("config.json")
    config.unlink()
    with pytest.raises(FileUnavailableError, match=r"config\.json"):  # a file of the hub needs it
        zoo.load("DINOv3-B/16", accept_license=True)


def test_a_file_that_nothing_describes_is_prepared_and_resized_as_its_card_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    row = zoo.card("TIPS-B/14").weights["v1-448"]
    sizes: dict[str, Any] = {"hidden_size": 32, "mlp_dim": 64, "num_heads": 2, "num_layers": 1}
    row = dataclasses.replace(row, config={**row.config, **sizes}, image_size=56)
    monkeypatch.setattr(cards, "all_cards", lambda: {row.architecture: cards.Card(row.architecture, {"v1": row})})
    written = converters.save(
        randomised(VisionTransformer(row.whole_config())), tmp_path / "ours", format="meta_dinov2"
    )
    file = tmp_path / "mirror" / row.file
    file.parent.mkdir()
    np.savez(file, **load_file(written))
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "mirror"))
    config = zoo.load("TIPS-B/14", image_size=70).config
    assert config == row.whole_config().replace(image_size=70)
    # For a file of one's own the name is only an architecture.
    own = zoo.load("TIPS-B/14", weights=file).config
    assert own.preprocessing != row.preprocessing and own.position_method == "bicubic-antialias"


def test_a_file_that_was_downloaded_once_needs_no_acceptance(small: VisionTransformer, monkeypatch: Any) -> None:
    monkeypatch.setattr(downloads, "_is_cached", lambda source: True)
    assert_same_bits(values(zoo.load("DINOv3-B/16")), values(small))


def test_the_command_line_asks_likewise(
    small: VisionTransformer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("convert", "DINOv3-B/16", "out", "--to", "timm_eva")
    assert "if you accept them, load it with accept_license=True (--accept-license)" in fails(monkeypatch, *arguments)
    assert not Path("out").exists()
    run(*arguments, "--accept-license")
    assert_same_bits(values(converters.load("out")), values(small))


# ---- the table of families


@pytest.mark.full
def test_the_table_of_families_is_the_cards() -> None:
    page = family_table.PAGE.read_text(encoding="utf-8")
    table = page.split(family_table.START)[1].split(family_table.END)[0]
    assert table == family_table.rendered(), "run python tests/support/family_table.py"


@pytest.mark.full
@pytest.mark.parametrize("family", family_table.configs())
def test_a_row_of_the_table_says_what_the_models_do(family: str, tmp_path: Path) -> None:
    import tensorflow as tf

    row, config = family_table.rows()[family], family_table.configs()[family][0]
    model = randomised(VisionTransformer(config))
    if config.pre_norm and config.num_classes:  # CLIP's projection has no bias
        model.get_layer("head").bias.assign(np.zeros(config.num_classes))
    written = [name for name, exact in family_table.formats_of(config).items() if exact]
    assert set(written) <= set(row["written to"]) <= set(row["read from"])
    for name in written:
        path = tmp_path / (f"{name}.npz" if family_table.load_table(name).container == "npz" else name)
        converters.save(model, path, format=name)
        again = converters.load(path, format=name, image_size=config.image_size if family == "BiT" else None)
        assert_same_bits(values(again), values(model))
    images = np.zeros((1, *config.size, 3), np.float32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(images, training=True) ** 2)
    assert all(gradient is not None for gradient in tape.gradient(loss, model.trainable_variables))
    if family not in ("BiT", "Mixer"):
        assert len(model.attention_maps(images)) == config.num_layers
    else:
        with pytest.raises(ValueError, match="Attention maps need blocks with attention"):
            model.attention_maps(images)
