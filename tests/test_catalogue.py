import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keras_vit import zoo
from keras_vit._util import files
from keras_vit.errors import UnknownModelError
from keras_vit.model.sizes import canonical_name
from keras_vit.zoo import catalogue, pretrained
from keras_vit.zoo.cards import Accuracy, Weights, families, read_family

EVERY_FILE = [weights for path in files.data_folder("zoo").glob("*.toml") for weights in read_family(path).weights]

# The README of google-research/vision_transformer recommends AugReg wherever there is such a file.
RECOMMENDED = "augreg-imagenet21k+imagenet2012"
DEFAULTS = {
    "R26+ViT-B/32": "imagenet21k",
    "R26+ViT-S/32": RECOMMENDED,
    "R50+ViT-B/16": "imagenet21k+imagenet2012",
    "R50+ViT-L/32": RECOMMENDED,
    "R+ViT-Ti/16": RECOMMENDED,
    "ViT-B/8": RECOMMENDED,
    "ViT-B/16": RECOMMENDED,
    "ViT-B/32": RECOMMENDED,
    "ViT-H/14": "imagenet21k",
    "ViT-L/16": RECOMMENDED,
    "ViT-L/32": "imagenet21k+imagenet2012",
    "ViT-S/16": RECOMMENDED,
    "ViT-S/32": RECOMMENDED,
    "ViT-Ti/16": RECOMMENDED,
    "ViT-digits": "digits",
}

MODELS = ["Ti_16", "S_32", "S_16", "B_32", "B_16", "B_8", "L_16", "R_Ti_16", "R26_S_32", "R50_L_32"]
AUGREG = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0"
FINE_TUNED = f"{AUGREG}--imagenet2012-steps_20k-lr_0.03-res_384"


def find(name: str, weights: str = "default") -> Weights:
    return catalogue.select(catalogue.card(name), weights)


def test_the_vits_with_published_weights_are_these_in_natural_order() -> None:
    assert [name for name in catalogue.names() if catalogue.card(name).family == "ViT"] == list(DEFAULTS)


@pytest.mark.parametrize(("name", "tag"), DEFAULTS.items())
def test_the_default_is_the_recommended_file(name: str, tag: str) -> None:
    assert catalogue.card(name).default == tag
    assert find(name) is find(name, tag)


@pytest.mark.parametrize("weights", EVERY_FILE, ids=lambda weights: f"{weights.architecture} {weights.tag}")
def test_every_file_is_found_by_its_model_and_tag(weights: Weights) -> None:
    assert find(weights.architecture, weights.tag) == weights


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("B/*", ["ViT-B/8", "ViT-B/16", "ViT-B/32"]),
        ("vit-b_16", ["ViT-B/16"]),
        ("R50*", ["R50+ViT-B/16", "R50+ViT-L/32"]),
        ("r50_?_32", ["R50+ViT-L/32"]),
        ("ViT-[SL]/16", ["ViT-L/16", "ViT-S/16"]),
        ("digits", ["ViT-digits"]),
        ("*digits", ["ViT-digits"]),
        ("nothing*", []),
    ],
)
def test_a_pattern_matches_any_spelling(pattern: str, expected: list[str]) -> None:
    assert catalogue.names(pattern) == expected


@pytest.mark.parametrize(
    ("spelling", "name"), [("b/16", "ViT-B/16"), ("r26+s/32", "R26+ViT-S/32"), ("vit-DIGITS", "ViT-digits")]
)
def test_any_spelling_finds_the_card(spelling: str, name: str) -> None:  # test_names.py has the spellings
    assert catalogue.card(spelling).name == name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("ViT-B/61", "ViT-B/16"),
        ("R50+ViT-L/16", "R50+ViT-L/32"),
        ("digit", "ViT-digits"),
        ("ViT-L", "ViT-L/16"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownModelError, match="nearest are") as error:
        catalogue.card(name)
    assert repr(nearest) in str(error.value)
    assert repr(name) in str(error.value)


def test_a_name_like_no_other_is_answered_with_all_of_them() -> None:
    with pytest.raises(UnknownModelError) as error:
        catalogue.card("qqqq")
    assert all(repr(name) in str(error.value) for name in DEFAULTS)


def test_an_architecture_without_weights_is_told_apart_from_no_architecture() -> None:
    with pytest.raises(UnknownModelError, match="ViT-g/14 has no published weights"):
        catalogue.card("g/14")


def test_an_unknown_tag_is_answered_with_the_tags_there_are() -> None:
    with pytest.raises(ValueError, match="'sam', 'gsam'.*Received: weights='imagenet'"):
        find("B/16", "imagenet")


# ---- names of AugReg files


@pytest.mark.parametrize("name", [FINE_TUNED, f"{FINE_TUNED}.npz", FINE_TUNED.lower()])
def test_a_recommended_file_is_found_by_its_name(name: str) -> None:
    assert find(name) == find("ViT-B/16", RECOMMENDED)
    assert find(name).url == f"gs://vit_models/augreg/{FINE_TUNED}.npz"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("suffix", ["", ".npz"])
def test_any_other_name_of_that_pattern_is_a_file_of_the_bucket(model: str, suffix: str) -> None:
    stem = f"{model}-i1k-30ep-lr_0.001-aug_strong2-wd_0.03-do_0.1-sd_0.1--oxford_iiit_pet-steps_0k-lr_0.003-res_224"
    for name in (stem, stem.lower(), stem.upper()):
        found = find(name + suffix)
        assert (found.tag, found.url) == (stem, f"gs://vit_models/augreg/{stem}.npz")
        assert (found.architecture, found.image_size) == (canonical_name(model), 224)
        assert (found.num_classes, found.labels) == (None, None)  # only the file states them


@pytest.mark.parametrize(
    ("change", "size", "labels", "classes"),
    [
        (("", ""), 384, "imagenet2012", 1000),
        (("--imagenet2012-steps_20k-lr_0.03-res_384", ""), 224, "imagenet21k", 21843),
        (("i21k", "i1k"), 384, "imagenet2012", 1000),
        (("imagenet2012", "cifar100"), 384, None, None),
    ],
)
def test_a_name_tells_resolution_and_classes(
    change: tuple[str, str], size: int, labels: str | None, classes: int | None
) -> None:
    found = find(FINE_TUNED.replace("medium1", "light0").replace(*change))
    assert (found.image_size, found.labels, found.num_classes) == (size, labels, classes)


def test_a_name_that_is_almost_one_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="No architecture has this name; the nearest are .*Received: 'X_16'"):
        catalogue.card(FINE_TUNED.replace("B_16", "X_16"))
    for wrong in (FINE_TUNED.replace("-wd_0.1", ""), f"{FINE_TUNED}-again", f"{AUGREG}-imagenet2012"):
        with pytest.raises(UnknownModelError):
            catalogue.card(wrong)


# ---- names of other packages


@pytest.mark.parametrize(
    ("name", "model", "weights"),
    [
        ("facebook/dinov2-base", "DINOv2-B/14", "lvd142m"),
        ("timm/vit_base_patch14_dinov2.lvd142m", "DINOv2-B/14", "lvd142m"),
        ("VIT_Base_Patch14_DINOv2.lvd142m", "DINOv2-B/14", "lvd142m"),
        ("facebook/dinov2-large-imagenet1k-1-layer", "DINOv2-L/14", "lvd142m+imagenet2012"),
        ("facebook/dinov3-vitb16-pretrain-lvd1689m", "DINOv3-B/16", "lvd1689m"),
        ("openai/clip-vit-large-patch14-336", "CLIP-L/14", "openai-336"),
        ("google/siglip-so400m-patch14-384", "SigLIP-So400m/14", "webli-384"),
        ("deit_base_patch16_224", "DeiT-B/16", "fb_in1k-224"),
        ("timm/vit_base_patch16_224.mae", "MAE-B/16", "mae"),
        ("eva02_base_patch14_448.mim_in22k_ft_in1k", "EVA02-B/14", "mim_in22k_ft_in1k"),
        ("mixer_b16_224.goog_in21k_ft_in1k", "Mixer-B/16", "goog_in21k_ft_in1k"),
        ("vit_base_patch16_224", "ViT-B/16", "hf://timm/vit_base_patch16_224.augreg2_in21k_ft_in1k/model.safetensors"),
        ("google/vit-base-patch16-224", "ViT-B/16", "hf://google/vit-base-patch16-224/model.safetensors"),
    ],
)
def test_a_name_of_another_package_stands_for_its_own_weights(name: str, model: str, weights: str) -> None:
    assert zoo.card(name).name == model
    assert zoo.names(name) == [model]
    choice = pretrained.resolve(name)
    known = zoo.card(model).weights.get(weights)
    assert choice.published is known
    assert choice.source == (known.location if known else weights)
    assert pretrained.resolve(name, "mine.npz").source == "mine.npz"
    random = pretrained.resolve(name, default=None).expected_config
    assert random and random.image_size == (known or find(model)).base_config().image_size


def test_there_are_twenty_aliases_and_each_has_its_model_and_weights() -> None:
    listed = [row for family in families() for row in family.table.get("aliases", {}).items()]
    assert len(listed) == 20
    for name, stated in listed:
        model, weights = stated["model"], stated["weights"]
        assert catalogue.alias(name) == (model, weights)
        assert weights in zoo.card(model).weights or weights.startswith("hf://")


@pytest.mark.parametrize("name", ["vit_base_patch16_244", "vit_base_patch61_224", "google/vit-bass-patch16-224"])
def test_a_misspelt_name_is_answered_with_the_nearest_model(name: str) -> None:
    with pytest.raises(UnknownModelError, match="the nearest are .*'ViT-B/16'"):
        zoo.card(name)


def test_part_of_a_name_lists_all_models_that_have_it() -> None:
    assert zoo.names("r50") == ["R50+ViT-B/16", "R50+ViT-L/32", "BiT-R50x1", "BiT-R50x3"]
    assert {"ViT-B/16", "DINOv2-B/14", "MAE-B/16"} <= set(zoo.names("vit_base"))
    assert zoo.names("nothing") == []


def test_a_folder_of_that_name_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("google/vit-base-patch16-224")
    folder.mkdir(parents=True)
    assert pretrained.resolve(str(folder)).source == str(folder)


def test_a_card_prints_what_a_user_asks_of_it() -> None:
    text = str(catalogue.card("B/16"))
    for said in (
        "ViT-B/16",
        "(default)",
        FINE_TUNED,
        "85.49 % top-1",
        "README of google-research",
        "arXiv 2106.10270",
    ):
        assert said in text


def test_the_table_has_a_row_for_every_file() -> None:
    rows = zoo.table()
    assert {(row["name"], row["weights"]) for row in rows} == {(w.architecture, w.tag) for w in EVERY_FILE}
    assert len(rows) == len(EVERY_FILE)
    assert [row["name"] for row in rows if row["default"]] == catalogue.names()
    assert zoo.table("R50*") == [row for row in rows if row["name"].startswith("R50")]
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize("row", zoo.table(), ids=lambda row: f"{row['name']} {row['weights']}")
def test_a_row_says_what_the_card_says(row: dict[str, Any]) -> None:
    weights = find(row["name"], row["weights"])
    same = ("image_size", "num_classes", "file", "url", "licence")
    assert {name: row[name] for name in same} == {name: getattr(weights, name) for name in same}
    assert [Accuracy(**stated) for stated in row["accuracy"]] == list(weights.accuracy)
    assert row["paper"] == str(weights.paper)
    [call] = [node for node in ast.walk(ast.parse(row["load"])) if isinstance(node, ast.Call)]
    assert ast.unparse(call.func) == "keras_vit.zoo.load"
    name, *_ = map(ast.literal_eval, call.args)
    chosen = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert chosen.pop("accept_licence", False) == (weights.terms is not None)
    assert find(name, **chosen) is weights


# Files whose parameter counts are published with the official code (see tests/test_parameter_counts.py): without a
# class token, with a pre_logits layer, at another resolution, and a model of our own.
@pytest.mark.parametrize(
    ("name", "tag", "parameters"),
    [
        ("B/16", "gsam", 86_566_120),
        ("B/16", "sam", 86_567_656),
        ("L/16", "augreg-imagenet21k+imagenet2012", 304_715_752),
        ("B/16", "imagenet21k", 85_798_656 + 768 * 769 + 769 * 21843),
        ("digits", "digits", 142_026),
    ],
)
def test_a_row_counts_the_numbers_of_its_file(name: str, tag: str, parameters: int) -> None:
    [row] = [row for row in zoo.table(name) if row["weights"] == tag]
    assert row["parameters"] == parameters


def test_the_catalogue_starts_neither_keras_nor_tensorflow() -> None:
    code = (
        "import sys; from keras_vit.zoo import catalogue; catalogue.table(); str(catalogue.card('B/16')); "
        "print({'keras', 'tensorflow', 'numpy'} & set(sys.modules))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=files.PACKAGE.parent
    )
    assert shown.stdout.strip() == "set()"
