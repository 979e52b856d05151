"""Names of models: spellings, sizes, cards, AugReg files, names of other packages, and the lists of labels."""

import ast
import json

import pytest

from keras_vit import zoo
from keras_vit._util import files
from keras_vit.errors import UnknownModelError
from keras_vit.model import labels
from keras_vit.model.architectures import SIZES, architecture_fields, canonical_name
from keras_vit.zoo import cards, catalogue, pretrained
from keras_vit.zoo.cards import Accuracy, Weights, families, read_family

EVERY_FILE = [weights for path in files.data_folder("zoo").glob("*.toml") for weights in read_family(path).weights]

# The README of google-research/vision_transformer recommends AugReg wherever there is such a file.
RECOMMENDED = "augreg-imagenet21k+imagenet2012"
OTHERS = {
    "R26+ViT-B/32": "imagenet21k",
    "R50+ViT-B/16": "imagenet21k+imagenet2012",
    "ViT-H/14": "imagenet21k",
    "ViT-L/32": "imagenet21k+imagenet2012",
    "ViT-digits": "digits",
}
VITS = (
    *("R26+ViT-B/32", "R26+ViT-S/32", "R50+ViT-B/16", "R50+ViT-L/32", "R+ViT-Ti/16"),
    *("ViT-B/8", "ViT-B/16", "ViT-B/32", "ViT-H/14", "ViT-L/16", "ViT-L/32", "ViT-S/16", "ViT-S/32", "ViT-Ti/16"),
    "ViT-digits",
)
DEFAULTS = {name: OTHERS.get(name, RECOMMENDED) for name in VITS}
SPELLINGS = {
    "ViT-B/16": "ViT-B/16, ViT-B_16, ViT_B_16, vit-b/16, VIT-B-16, B/16, b/16, B_16, B-16, B16, vitb16, ViTB/16",
    "ViT-Ti/16": "Ti/16, ti_16, TI-16, ViT-Ti_16, vit_ti16",
    "ViT-mu/16": "mu/16, MU_16",
    "ViT-M/16": "M/16, m16",
    "ViT-So400m/14": "So400m/14, so400m_14, SO400M-14, ViT-So400m/14",
    "ViT-g/14": "g/14, ViT-g_14, ViT-g/14",
    "ViT-G/14": "G/14, ViT-G_14",
    "ViT-g-opt/14": "g-opt/14, g_opt_14, ViT-g-opt/14, g-OPT/14",
    "ViT-G-opt/14": "G-opt/14, Gopt14",
    "ViT-e/14": "e/14, E/14, ViT-e_14",
    "R+ViT-Ti/16": "R+ViT-Ti_16, R+ViT-Ti/16, R+Ti/16, R_Ti_16, r_ti_16",
    "R26+ViT-S/32": "R26+ViT-S_32, R26+S/32, R26_S_32, r26+vit-s/32, R26-S-32, R26S32",
    "R50+ViT-B/16": "R50+ViT-B_16, R50_B_16, r50+b16, R50 + ViT-B/16",
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
# vit_jax/configs/models.py: patch, units of the ResNet, dropout.
OFFICIAL = {
    "ViT-B_8": (8, None, 0.0),
    "ViT-L_32": (32, None, 0.0),
    "ViT-L_16": (16, None, 0.1),
    "ViT-H_14": (14, None, 0.1),
    "R+ViT-Ti_16": (8, (), 0.0),
    "R26+ViT-S_32": (1, (2, 2, 2, 2), 0.0),
    "R26+ViT-B_32": (1, (2, 2, 2, 2), 0.0),
    "R50+ViT-B_16": (1, (3, 4, 9), 0.1),
    "R50+ViT-L_32": (1, (3, 4, 6, 3), 0.1),
}
AUGREG = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0"
FINE_TUNED = f"{AUGREG}--imagenet2012-steps_20k-lr_0.03-res_384"


def find(name: str, weights: str = "default") -> Weights:
    return cards.select(cards.card(name), weights)


# ---- architectures


def test_every_spelling_has_one_canonical_name() -> None:
    found = {name: {canonical_name(spelling) for spelling in row.split(", ")} for name, row in SPELLINGS.items()}
    assert found == {name: {name} for name in SPELLINGS}


def test_what_is_no_architecture_is_refused_and_the_nearest_is_offered() -> None:
    nearest = {"ViT-X/16": "ViT-S/16", "R50+ViT-B/32": "R50+ViT-B/16", "ViT-B": "ViT-B/16", "ViT-B/16.npz": "ViT-B/16"}
    for wrong in (*nearest, "", "/", "16", "B/0", "B/", "B/-16", "ViT-", "resnet50", "日本/16", "B/16\n32"):
        with pytest.raises(ValueError, match=r"nearest are \['") as caught:
            canonical_name(wrong)
        assert repr(wrong) in str(caught.value)
        assert wrong not in nearest or repr(nearest[wrong]) in str(caught.value)


def test_an_official_name_stands_for_its_official_sizes() -> None:
    fields = ("hidden_size", "num_layers", "mlp_dim", "num_heads")
    assert {size: tuple(architecture_fields(f"{size}/16")[name] for name in fields) for size in SIZES} == BIG_VISION
    found = {}
    for name in OFFICIAL:
        stated = architecture_fields(name)
        resnet = stated.get("resnet")
        found[name] = (stated["patch_size"], resnet and resnet["num_layers"], stated["dropout_rate"])
    assert found == OFFICIAL


# ---- models with published weights


def test_the_vits_are_in_natural_order_and_their_default_is_the_recommended_file() -> None:
    found = {name: cards.card(name).default for name in catalogue.names() if cards.card(name).family == "ViT"}
    assert found == DEFAULTS
    assert list(found) == list(DEFAULTS)
    assert all(find(name) is find(name, tag) for name, tag in DEFAULTS.items())
    assert all(find(weights.architecture, weights.tag) == weights for weights in EVERY_FILE)


def test_a_pattern_or_part_of_a_name_lists_models() -> None:
    for pattern, expected in {
        "B/*": ["ViT-B/8", "ViT-B/16", "ViT-B/32"],
        "vit-b_16": ["ViT-B/16"],
        "R50*": ["R50+ViT-B/16", "R50+ViT-L/32"],
        "r50_?_32": ["R50+ViT-L/32"],
        "ViT-[SL]/16": ["ViT-L/16", "ViT-S/16"],
        "digits": ["ViT-digits"],
        "*digits": ["ViT-digits"],
        "r50": ["R50+ViT-B/16", "R50+ViT-L/32", "BiT-R50x1", "BiT-R50x3"],
        "nothing*": [],
        "nothing": [],
    }.items():
        assert zoo.names(pattern) == expected
    assert {"ViT-B/16", "DINOv2-B/14", "MAE-B/16"} <= set(zoo.names("vit_base"))
    assert [cards.card(name).name for name in ("b/16", "vit-DIGITS")] == ["ViT-B/16", "ViT-digits"]


def test_an_unknown_name_or_tag_is_answered_with_the_nearest() -> None:
    for name, nearest in {
        "ViT-B/61": "ViT-B/16",
        "digit": "ViT-digits",
        "ViT-L": "ViT-L/16",
        "vit_base_patch61_224": "ViT-B/16",
        "google/vit-bass-patch16-224": "ViT-B/16",
    }.items():
        with pytest.raises(UnknownModelError, match="nearest are") as error:
            cards.card(name)
        assert repr(nearest) in str(error.value)
    with pytest.raises(UnknownModelError, match=r"keras_vit\.zoo\.names\(\) \(keras-vit list\) has all"):
        cards.card("qqqq")
    with pytest.raises(ValueError, match="nearest are .*Received: 'X_16'"):
        cards.card(FINE_TUNED.replace("B_16", "X_16"))
    with pytest.raises(UnknownModelError, match="ViT-g/14 has no published weights"):
        cards.card("g/14")
    with pytest.raises(ValueError, match="'sam', 'gsam'.*Received: weights='imagenet'"):
        find("B/16", "imagenet")


def test_a_name_of_the_augreg_pattern_is_a_file_of_the_bucket() -> None:
    for name in (FINE_TUNED, f"{FINE_TUNED}.npz", FINE_TUNED.lower()):
        assert find(name) == find("ViT-B/16", RECOMMENDED)
        assert find(name).url == f"gs://vit_models/augreg/{FINE_TUNED}.npz"
    for model in ("Ti_16", "S_32", "S_16", "B_32", "B_16", "B_8", "L_16", "R_Ti_16", "R26_S_32", "R50_L_32"):
        stem = f"{model}-i1k-30ep-lr_0.001-aug_strong2-wd_0.03-do_0.1-sd_0.1--oxford_iiit_pet-steps_0k-lr_0.003-res_224"
        for name in (stem, f"{stem}.npz", stem.lower(), stem.upper()):
            found = find(name)
            assert (found.tag, found.url) == (stem, f"gs://vit_models/augreg/{stem}.npz")
            assert (found.architecture, found.image_size) == (canonical_name(model), 224)
            assert (found.num_classes, found.labels) == (None, None)  # only the file states them
    for wrong in (FINE_TUNED.replace("-wd_0.1", ""), f"{FINE_TUNED}-again", f"{AUGREG}-imagenet2012"):
        with pytest.raises(UnknownModelError):
            cards.card(wrong)


def test_an_augreg_name_tells_resolution_and_classes() -> None:
    for old, new, expected in (
        ("", "", (384, "imagenet2012", 1000)),
        ("--imagenet2012-steps_20k-lr_0.03-res_384", "", (224, "imagenet21k", 21843)),
        ("imagenet2012", "cifar100", (384, None, None)),
    ):
        found = find(FINE_TUNED.replace("medium1", "light0").replace(old, new))
        assert (found.image_size, found.labels, found.num_classes) == expected


ALIASES = {
    "facebook/dinov2-base": ("DINOv2-B/14", "lvd142m"),
    "VIT_Base_Patch14_DINOv2.lvd142m": ("DINOv2-B/14", "lvd142m"),
    "facebook/dinov2-large-imagenet1k-1-layer": ("DINOv2-L/14", "lvd142m+imagenet2012"),
    "openai/clip-vit-large-patch14-336": ("CLIP-L/14", "openai-336"),
    "timm/vit_base_patch16_224.mae": ("MAE-B/16", "mae"),
    "vit_base_patch16_224": ("ViT-B/16", "hf://timm/vit_base_patch16_224.augreg2_in21k_ft_in1k/model.safetensors"),
}


def test_a_name_of_another_package_stands_for_its_own_weights() -> None:
    for family in families():
        for name, stated in family.table.get("aliases", {}).items():
            assert cards.alias(name) == (stated["model"], stated["weights"])
            assert stated["weights"] in zoo.card(stated["model"]).weights or stated["weights"].startswith("hf://")
    for name, (model, weights) in ALIASES.items():
        assert zoo.card(name).name == model
        assert zoo.names(name) == [model]
        choice = pretrained.resolve(name)
        known = zoo.card(model).weights.get(weights)
        assert choice.published is known
        assert choice.source == (known.location if known else weights)
        assert pretrained.resolve(name, "mine.npz").source == "mine.npz"
        random = pretrained.resolve(name, default=None).expected_config
        assert random and random.image_size == (known or find(model)).base_config().image_size


# ---- what is shown


def test_the_table_has_a_row_for_every_file_and_says_what_the_cards_say() -> None:
    rows = zoo.table()
    assert {(row["name"], row["weights"]) for row in rows} == {(w.architecture, w.tag) for w in EVERY_FILE}
    assert len(rows) == len(EVERY_FILE)
    assert [row["name"] for row in rows if row["default"]] == catalogue.names()
    assert zoo.table("R50*") == [row for row in rows if row["name"].startswith("R50")]
    assert json.loads(json.dumps(rows)) == rows
    for row in rows:
        weights = find(row["name"], row["weights"])
        same = ("image_size", "num_classes", "file", "url", "license")
        assert {name: row[name] for name in same} == {name: getattr(weights, name) for name in same}
        assert [Accuracy(**stated) for stated in row["accuracy"]] == list(weights.accuracy)
        assert row["paper"] == str(weights.paper)
        [call] = [node for node in ast.walk(ast.parse(row["load"])) if isinstance(node, ast.Call)]
        assert ast.unparse(call.func) == "keras_vit.zoo.load"
        name, *_ = map(ast.literal_eval, call.args)
        chosen = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert chosen.pop("accept_license", False) == (weights.terms is not None)
        assert find(name, **chosen) is weights


# ---- labels


def test_a_list_has_one_row_a_class() -> None:
    for name, classes in {"imagenet2012": 1000, "imagenet21k": 21843, "digits": 10}.items():
        known = labels.names(name, classes)
        assert all(label_id and label for label_id, label in known)
        assert len({label_id for label_id, _ in known}) == len(known) == classes
    # WordNet ids of ILSVRC 2012, in the order that all models use.
    known = labels.names("imagenet2012", 1000)
    assert [label_id for label_id, _ in known] == sorted(label_id for label_id, _ in known)
    assert (known[0][0], known[207][0], known[999][0]) == ("n01440764", "n02099601", "n15075141")
    assert known[207][1].startswith("golden retriever")


def test_a_models_own_names_are_numbered_and_a_wrong_list_is_refused() -> None:
    assert labels.names(("ant", "bee"), 2) == [("0", "ant"), ("1", "bee")]
    assert labels.names(None, 2) == [("0", "class 0"), ("1", "class 1")]
    for given_names, classes in (("imagenet2012", 1001), (("ant",), 2), (("ant", "bee"), 1)):
        with pytest.raises(ValueError, match=rf"for {classes} classes.*Received"):
            labels.names(given_names, classes)
    for name in ("imagenet", "", "../labels/digits", "digits.txt"):
        with pytest.raises(ValueError, match="imagenet2012.*Received"):
            labels.names(name, 10)
