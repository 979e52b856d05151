import ast
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_vit import zoo
from keras_vit._util import data_files
from keras_vit.errors import UnknownModelError
from keras_vit.model.sizes import canonical_name
from keras_vit.zoo import catalogue, spellings
from keras_vit.zoo.cards import Accuracy, Weights, read_family

EVERY_FILE = [weights for path in data_files.folder("zoo").glob("*.toml") for weights in read_family(path).weights]

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
    ("spelling", "name"),
    [
        ("ViT-B/16", "ViT-B/16"),
        ("vit-b_16", "ViT-B/16"),
        ("B_16", "ViT-B/16"),
        ("b/16", "ViT-B/16"),
        ("ViT-B-16", "ViT-B/16"),
        ("R50+ViT-B_16", "R50+ViT-B/16"),
        ("R26_S_32", "R26+ViT-S/32"),
        ("r26+s/32", "R26+ViT-S/32"),
        ("R_Ti_16", "R+ViT-Ti/16"),
        ("digits", "ViT-digits"),
        ("vit-DIGITS", "ViT-digits"),
    ],
)
def test_any_spelling_finds_the_card(spelling: str, name: str) -> None:
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


@pytest.mark.parametrize("name", [FINE_TUNED, f"{FINE_TUNED}.npz", FINE_TUNED.lower()])
def test_a_recommended_file_is_found_by_its_name(name: str) -> None:
    assert find(name) == find("ViT-B/16", RECOMMENDED)
    assert find(name).url == f"gs://vit_models/augreg/{FINE_TUNED}.npz"


def test_a_name_with_fine_tuning_tells_data_set_and_resolution() -> None:
    stem = FINE_TUNED.replace("B_16", "R50_L_32").replace("imagenet2012", "oxford_iiit_pet").replace("384", "224")
    found = find(stem)
    assert (found.architecture, found.tag, found.file) == ("R50+ViT-L/32", stem, f"{stem}.npz")
    assert (found.image_size, found.num_classes, found.labels) == (224, 37, None)


@pytest.mark.parametrize(("data", "classes"), [("i1k", 1000), ("i21k", 21843)])
def test_a_name_without_fine_tuning_is_of_224_pixels_and_the_classes_of_its_data(data: str, classes: int) -> None:
    found = find(AUGREG.replace("i21k", data).replace("medium1", "light0"))
    assert (found.image_size, found.num_classes) == (224, classes)


@given(
    model=st.sampled_from(MODELS),
    data=st.sampled_from(["i1k", "i21k"]),
    epochs=st.sampled_from([30, 300]),
    augmentation=st.sampled_from(["none", "light0", "light1", "medium1", "medium2", "strong1", "strong2"]),
    decay=st.sampled_from([0.03, 0.1]),
    dropout=st.sampled_from([0.0, 0.1]),
    depth=st.sampled_from([0.0, 0.1]),
    tuned=st.none()
    | st.tuples(
        st.sampled_from(["imagenet2012", "cifar100", "oxford_iiit_pet", "kitti", "resisc45"]),
        st.sampled_from(["20k", "10k", "2k", "0k"]),
        st.sampled_from([0.001, 0.003, 0.01, 0.03]),
        st.sampled_from([224, 384]),
    ),
    suffix=st.sampled_from(["", ".npz"]),
)
def test_every_name_of_the_grammar_is_read(
    model: str,
    data: str,
    epochs: int,
    augmentation: str,
    decay: float,
    dropout: float,
    depth: float,
    tuned: tuple[str, str, float, int] | None,
    suffix: str,
) -> None:
    stem = f"{model}-{data}-{epochs}ep-lr_0.001-aug_{augmentation}-wd_{decay}-do_{dropout}-sd_{depth}"
    if tuned:
        stem += "--{}-steps_{}-lr_{}-res_{}".format(*tuned)
    found = spellings.parse_augreg(stem + suffix)
    assert found is not None
    assert found.url == f"gs://vit_models/augreg/{stem}.npz"
    assert found.architecture == canonical_name(model)
    assert found.image_size == (tuned[3] if tuned else 224)
    classes = {
        "i1k": 1000,
        "i21k": 21843,
        "imagenet2012": 1000,
        "cifar100": 100,
        "oxford_iiit_pet": 37,
        "resisc45": 45,
    }
    assert found.num_classes == classes.get(tuned[0] if tuned else data)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("aug_medium1", "aug_strong9", "augmentation .* 'aug_strong2'.*Received: 'aug_strong9'"),
        ("res_384", "res_300", "resolution .*'res_224', 'res_384'.*Received: 'res_300'"),
        ("i21k", "i22k", "data set .*Received: 'i22k'"),
        ("B_16-", "X_16-", "model .*Received: 'X_16'"),
        ("-wd_0.1", "", "weight decay .*Received: 'do_0.0'"),
        (
            "--imagenet2012-steps_20k-lr_0.03-res_384",
            "--imagenet2012-steps_20k",
            "learning rate .*Received: nothing",
        ),
        ("--imagenet2012", "--imagenet", "data set .*Received: 'imagenet'"),
        ("res_384", "res_384-again", "ends after its resolution. Received: 'again'"),
        ("--imagenet2012", "-imagenet2012", "ends after its stochastic depth. Received: 'imagenet2012'"),
    ],
)
def test_a_name_that_is_almost_one_is_told_the_part_that_is_wrong(right: str, wrong: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        catalogue.card(FINE_TUNED.replace(right, wrong))


@pytest.mark.parametrize("name", ["ViT-B/16", "B_16", "R50+ViT-B_16", "weights.npz", "B_16.npz", "ViT-B_16-224", ""])
def test_other_names_are_no_augreg_names(name: str) -> None:
    assert spellings.parse_augreg(name) is None


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
    assert row["bytes_float32"] == 4 * row["parameters"] > row["bytes_float16"] > row["bytes_int8"] > row["parameters"]
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
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=data_files.PACKAGE.parent
    )
    assert shown.stdout.strip() == "set()"
