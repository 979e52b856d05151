"""The spellings of an architecture's name, and the configs that they stand for."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_vit.model.config import ViTConfig
from keras_vit.model.sizes import HYBRIDS, SIZES, architecture, canonical_name, name_of

PURE = [f"ViT-{size}/{patch}" for size in SIZES for patch in (8, 14, 16, 32)]
SPELLINGS = {
    "ViT-B/16": [
        "ViT-B/16",
        "ViT-B_16",
        "ViT_B_16",
        "vit-b/16",
        "VIT-B-16",
        "B/16",
        "b/16",
        "B_16",
        "B-16",
        "B16",
        "vitb16",
        "ViTB/16",
    ],
    "ViT-Ti/16": ["Ti/16", "ti_16", "TI-16", "ViT-Ti_16", "vit_ti16"],
    "ViT-S/32": ["S/32", "ViT-S_32", "s32"],
    "ViT-L/16": ["ViT-L_16", "L/16"],
    "ViT-H/14": ["ViT-H_14", "H/14", "vit-h-14"],
    "ViT-mu/16": ["mu/16", "MU_16"],
    "ViT-M/16": ["M/16", "m16"],
    "ViT-So400m/14": ["So400m/14", "so400m_14", "SO400M-14", "ViT-So400m/14"],
    "ViT-g/14": ["g/14", "ViT-g_14", "ViT-g/14"],
    "ViT-G/14": ["G/14", "ViT-G_14"],
    "ViT-g-opt/14": ["g-opt/14", "g_opt_14", "ViT-g-opt/14", "g-OPT/14"],
    "ViT-G-opt/14": ["G-opt/14", "Gopt14"],
    "ViT-e/14": ["e/14", "E/14", "ViT-e_14"],
    "R+ViT-Ti/16": ["R+ViT-Ti_16", "R+ViT-Ti/16", "R+Ti/16", "R_Ti_16", "r_ti_16"],
    "R26+ViT-S/32": ["R26+ViT-S_32", "R26+S/32", "R26_S_32", "r26+vit-s/32", "R26-S-32", "R26S32"],
    "R26+ViT-B/32": ["R26+ViT-B_32", "R26_B_32", "R26+B/32"],
    "R50+ViT-B/16": ["R50+ViT-B_16", "R50+ViT-B/16", "R50_B_16", " r50+b16 ", "R50 + ViT-B/16"],
    "R50+ViT-L/32": ["R50+ViT-L_32", "R50_L_32", "R50+L/32"],
}
# big_vision models/vit.py, decode_variant: width, depth, mlp_dim, num_heads.
BIG_VISION = {
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "g-opt": (1536, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "G-opt": (1536, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),
}


@pytest.mark.parametrize(
    ("spelling", "canonical"), [(spelling, name) for name, row in SPELLINGS.items() for spelling in row]
)
def test_every_spelling_has_one_canonical_name(spelling: str, canonical: str) -> None:
    assert canonical_name(spelling) == canonical


@pytest.mark.parametrize("size", BIG_VISION)
def test_sizes_are_big_visions(size: str) -> None:
    fields = architecture(f"{size}/16")
    names = ("hidden_size", "num_layers", "mlp_dim", "num_heads")
    assert tuple(fields[name] for name in names) == BIG_VISION[size]
    assert fields["hidden_size"] % fields["num_heads"] == 0
    assert SIZES.keys() == BIG_VISION.keys()


@pytest.mark.parametrize(
    ("name", "patch", "units", "dropout"),
    [  # vit_jax/configs/models.py
        ("ViT-B_8", 8, None, 0.0),
        ("ViT-L_32", 32, None, 0.0),
        ("ViT-L_16", 16, None, 0.1),
        ("ViT-H_14", 14, None, 0.1),
        ("R+ViT-Ti_16", 8, (), 0.0),
        ("R26+ViT-S_32", 1, (2, 2, 2, 2), 0.0),
        ("R26+ViT-B_32", 1, (2, 2, 2, 2), 0.0),
        ("R50+ViT-B_16", 1, (3, 4, 9), 0.1),
        ("R50+ViT-L_32", 1, (3, 4, 6, 3), 0.1),
    ],
)
def test_an_official_name_stands_for_its_official_config(
    name: str, patch: int, units: tuple[int, ...] | None, dropout: float
) -> None:
    fields = architecture(name)
    assert (fields["patch_size"], fields["dropout_rate"]) == (patch, dropout)
    assert fields.get("resnet") == (None if units is None else {"num_layers": units})


@given(
    st.sampled_from(PURE + list(HYBRIDS)),
    st.sampled_from(["_", "-", "/"]),
    st.sampled_from(["+", "_", "-"]),
    st.booleans(),
)
def test_canonical_name_is_idempotent_under_any_separators(
    name: str, before_patch: str, after_stem: str, vit: bool
) -> None:
    spelled = name if vit else name.replace("ViT-", "")
    spelled = after_stem.join(spelled.rsplit("+", 1))
    spelled = before_patch.join(spelled.rsplit("/", 1))
    assert canonical_name(spelled) == name
    assert canonical_name(canonical_name(spelled)) == name


@given(st.text(max_size=20))
def test_any_text_is_a_name_or_one_clear_error(text: str) -> None:
    try:
        canonical = canonical_name(text)
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert canonical_name(canonical) == canonical


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("ViT-X/16", "ViT-S/16"),
        ("R50+ViT-B/32", "R50+ViT-B/16"),
        ("R+ViT-B/16", "R50+ViT-B/16"),
        ("ViT-B", "ViT-B/16"),
        ("BB/16", "ViT-B/16"),
        ("ViT-B/16-384", "ViT-B/16"),
        ("ViT-B/16.npz", "ViT-B/16"),
    ],
)
def test_an_unknown_name_is_an_error_that_offers_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(wrong))) as caught:
        canonical_name(wrong)
    assert repr(near) in str(caught.value)


@pytest.mark.parametrize("wrong", ["", "/", "16", "B/0", "B/", "B/-16", "ViT-", "resnet50", "日本/16", "B/16\n32"])
def test_what_is_no_architecture_is_refused_and_something_is_offered(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"nearest are \['"):
        canonical_name(wrong)


@pytest.mark.parametrize("name", [*(f"ViT-{size}/16" for size in SIZES), "ViT-B/32", *HYBRIDS])
def test_a_config_says_its_name(name: str) -> None:
    assert name_of(ViTConfig.from_name(name, image_size=64, num_classes=3)) == name
    other = ViTConfig.from_name(name, num_layers=5)
    assert name_of(other) == f"Vision Transformer, 5 blocks of width {other.hidden_size}"
