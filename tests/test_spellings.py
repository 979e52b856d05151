"""Names that people type find the model, and never stand for other weights than the named ones without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from keras_vit import ViTConfig, zoo
from keras_vit.model.sizes import HYBRIDS, SIZES, canonical_name
from keras_vit.zoo import catalogue, pretrained, spellings

TIMM = "hf://timm/{}/model.safetensors"
# Name -> model, and the weights that it stands for in its own package; None for the name of an architecture.
NAMES = {
    "vit_base_patch16_224": ("ViT-B/16", TIMM.format("vit_base_patch16_224.augreg2_in21k_ft_in1k")),
    "VIT_Base_Patch16_224": ("ViT-B/16", TIMM.format("VIT_Base_Patch16_224.augreg2_in21k_ft_in1k")),
    "timm/vit_base_patch16_224.dino": ("ViT-B/16", TIMM.format("vit_base_patch16_224.dino")),
    "vit_base_patch16_224_in21k": ("ViT-B/16", TIMM.format("vit_base_patch16_224.augreg_in21k")),
    "vit_large_patch16_384": ("ViT-L/16", TIMM.format("vit_large_patch16_384.augreg_in21k_ft_in1k")),
    "vit_tiny_patch16_224": ("ViT-Ti/16", TIMM.format("vit_tiny_patch16_224.augreg_in21k_ft_in1k")),
    "vit_small_patch8_224": ("ViT-S/8", TIMM.format("vit_small_patch8_224.dino")),
    "vit_huge_patch14_224": ("ViT-H/14", TIMM.format("vit_huge_patch14_224.orig_in21k")),
    "vit_small_r26_s32_384": ("R26+ViT-S/32", TIMM.format("vit_small_r26_s32_384.augreg_in21k_ft_in1k")),
    "vit_tiny_r_s16_p8_224": ("R+ViT-Ti/16", TIMM.format("vit_tiny_r_s16_p8_224.augreg_in21k_ft_in1k")),
    "google/vit-base-patch16-224": ("ViT-B/16", "hf://google/vit-base-patch16-224/model.safetensors"),
    "vit-large-patch32-384": ("ViT-L/32", "hf://google/vit-large-patch32-384/model.safetensors"),
    "Some/vit-tiny-patch16-224-x": ("ViT-Ti/16", "hf://Some/vit-tiny-patch16-224-x/model.safetensors"),
    **dict.fromkeys(("b16", "vit-b-16", "ViT_B_16", "vitb16", "B/16", "vit_base_16", "base/16"), ("ViT-B/16", None)),
    **dict.fromkeys(("vit_base", "base", "ViT-Base", "vit base"), ("ViT-B/16", None)),
    "vit-large-32": ("ViT-L/32", None),
    "vit_huge": ("ViT-H/14", None),
}
GUESSES = [name for name in NAMES if not any(letter.isdigit() for letter in name)]


@pytest.mark.parametrize("name", sorted(NAMES.keys() - {"vit_small_patch8_224"}))  # an architecture without a card
def test_the_right_card_comes_first(name: str) -> None:
    model, source = NAMES[name]
    assert zoo.card(name).name == model
    assert zoo.names(name)[0] == model
    assert len(zoo.names(name)) == 1 or name in GUESSES
    spelled = spellings.read(name)
    assert (spelled.source if spelled else None) == source


def test_a_size_alone_lists_all_of_that_size() -> None:
    assert zoo.names("vit_base") == ["ViT-B/16", "R26+ViT-B/32", "R50+ViT-B/16", "ViT-B/8", "ViT-B/32"]
    assert zoo.names("r50") == ["R50+ViT-B/16", "R50+ViT-L/32", "BiT-R50x1", "BiT-R50x3"]
    assert zoo.names("nothing") == []


@pytest.mark.parametrize("name", [name for name, (_, source) in NAMES.items() if source])
def test_a_name_of_other_weights_does_not_load_those_of_the_card(name: str) -> None:
    model, source = NAMES[name]
    for call in (zoo.load, pretrained.resolve):
        with pytest.raises(ValueError, match="is a name of ") as caught:
            call(name)
        assert f"Write {model!r} with weights={source!r}" in str(caught.value)
    assert pretrained.resolve(model, source).source == source
    chosen = pretrained.resolve(name, "./mine.npz")  # weights that are named are taken
    assert (chosen.name, chosen.source) == (model, "./mine.npz")


@pytest.mark.parametrize("name", GUESSES)
def test_a_size_without_a_patch_size_loads_nothing(name: str) -> None:
    with pytest.raises(ValueError, match="does not state the patch size: write one of .'ViT-[BH]/1[46]'"):
        zoo.load(name)


def test_random_weights_have_the_size_that_the_name_states() -> None:
    assert pretrained.resolve("vit_large_patch16_384", default=None).expected_config == ViTConfig.from_name(
        "L/16", image_size=384
    )
    assert pretrained.resolve("b16", default=None).expected_config == ViTConfig.from_name("B/16")


def test_a_folder_of_that_name_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("google/vit-base-patch16-224")
    folder.mkdir(parents=True)
    assert pretrained.resolve(str(folder)).source == str(folder)


@pytest.mark.parametrize("name", ["vit_base_patch16_244", "vit_base_patch61_224", "google/vit-bass-patch16-224"])
def test_a_misspelt_name_is_answered_with_the_nearest_model(name: str) -> None:
    with pytest.raises(zoo.UnknownModelError, match="the nearest are .*'ViT-B/16'"):
        zoo.card(name)


def test_every_listed_name_of_weights_is_an_architectures() -> None:
    for name in spellings.known_names():
        spelled = spellings.read(name)
        assert spelled is not None
        assert canonical_name(spelled.architecture) == spelled.architecture


def test_no_rule_changes_a_name_of_the_paper() -> None:
    papers = [f"{prefix}{size}/16" for size in SIZES for prefix in ("ViT-", "")]
    assert not [name for name in [*papers, *HYBRIDS, *catalogue.names()] if spellings.read(name)]
