import tomllib
from pathlib import Path

import pytest

from keras_vit._util import files
from keras_vit.errors import CardError
from keras_vit.model.config import ViTConfig
from keras_vit.model.cost import count
from keras_vit.zoo import catalogue
from keras_vit.zoo.cards import Family, Weights, read_family
from marks import full_except

FAMILIES = sorted(files.data_folder("zoo").glob("*.toml"))
EVERY_FILE = [weights for path in FAMILIES for weights in read_family(path).weights]

# Parameters without head and pre_logits at 224 pixels: vit_jax/models_test.py less 1000 * (hidden + 1).
BACKBONES = {
    "ViT-Ti/16": 5_524_416,
    "ViT-S/32": 22_493_952,
    "ViT-S/16": 21_665_664,
    "ViT-B/32": 87_455_232,
    "ViT-B/16": 85_798_656,
    "ViT-B/8": 85_807_872,
    "ViT-L/32": 305_510_400,
    "ViT-L/16": 303_301_632,
    "ViT-H/14": 630_764_800,
    "R+ViT-Ti/16": 6_144_704,
    "R26+ViT-S/32": 36_046_912,
    "R26+ViT-B/32": 100_614_976,
    "R50+ViT-B/16": 97_890_112,
    "R50+ViT-L/32": 327_969_856,
}
CARD = """
title = "Mine"
licence = "MIT"
source = "me"
base = "https://example.org/"
paper = { title = "None", arxiv = "0000.00000" }
preprocessing = { resize = "squash", interpolation = "area", antialias = true, mean = [0.0], std = [1.0] }
[weights.mine]
rank = 1
labels = "imagenet2012"
num_classes = 1000
image_size = 224
[weights.mine.files]
"ViT-B/16" = { file = "b16.npz", config = { classifier = "gap" } }
[[weights.mine.accuracy]]
dataset = "imagenet2012"
metric = "top-1"
image_size = 224
source = "me"
values = { "ViT-B/16" = 80 }
"""


def identity(weights: Weights) -> str:
    return f"{weights.architecture} {weights.tag}"


CARDS = {identity(weights): weights for weights in EVERY_FILE}


@pytest.mark.parametrize("weights", EVERY_FILE, ids=identity)
def test_what_a_card_states_makes_a_config(weights: Weights) -> None:
    config = weights.whole_config()
    assert config.image_size == (weights.image_size,) * 2
    assert config.num_classes == weights.num_classes
    official = "hidden_size" not in weights.config
    assert not official or config == ViTConfig.from_name(weights.architecture, **weights.facts)


@pytest.mark.parametrize("name", full_except(sorted(CARDS)[::8], CARDS))
def test_the_parameters_and_operations_on_a_card_are_those_of_the_model(name: str) -> None:
    counted = count(CARDS[name].whole_config())
    right = {"parameters": counted.parameters, "gflops": counted.flops / 1e9}
    assert {"parameters": CARDS[name].parameters, "gflops": CARDS[name].gflops} == right


def test_what_a_card_does_not_state_is_counted(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CARD, encoding="utf-8")
    [row] = catalogue.rows(catalogue.read_cards(tmp_path / "mine.toml")["ViT-B/16"])
    assert (row["parameters"], row["gflops"]) == (86_566_120, pytest.approx(2 * 17.4, rel=0.01))


@pytest.mark.parametrize("weights", [weights for weights in EVERY_FILE if weights.labels], ids=identity)
def test_there_is_a_label_for_every_class(weights: Weights) -> None:
    lines = (files.data_folder("zoo") / "labels" / f"{weights.labels}.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == weights.num_classes


@pytest.mark.parametrize(
    "weights",
    [weights for weights in EVERY_FILE if weights.size_mib and weights.tag != "sam"],
    ids=identity,
)
def test_the_published_size_is_that_of_the_parameters_stated(weights: Weights) -> None:
    config = ViTConfig.from_name(weights.architecture, **weights.facts)
    at_224 = config.replace(image_size=224)
    features = config.representation_size or config.hidden_size
    backbone = BACKBONES.get(weights.architecture) or count(config.replace(num_classes=0)).parameters
    parameters = (
        backbone
        + (config.num_tokens - at_224.num_tokens) * config.hidden_size
        + (config.hidden_size * features + features if config.representation_size else 0)
        + features * config.num_classes
        + config.num_classes
    )
    # Published sizes are rounded to a MiB or 0.01 GiB (0.4 % of 1.2 GiB), and a file has a header for each tensor.
    # This finds a wrong head or patch size, and a pre_logits layer of the B models (0.57 %).
    assert weights.size_mib == pytest.approx(4 * parameters / 2**20, rel=0.005, abs=0.6)


def read_text(folder: Path, text: str) -> Family:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return read_family(path)


def test_a_card_of_ones_own_is_read(tmp_path: Path) -> None:
    (weights,) = read_text(tmp_path, CARD).weights
    assert weights.location == weights.url == "https://example.org/b16.npz"
    assert weights.config == {"classifier": "gap"}
    assert [accuracy.value for accuracy in weights.accuracy] == [80]


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (
            "num_classes = 1000",
            "num_clases = 1000",
            "weights.mine has no key 'num_clases'; the nearest is 'num_classes'",
        ),
        ("licence =", "license =", "mine.toml has no key 'license'; the nearest is 'licence'"),
        ("file =", "fil =", "files.ViT-B/16 has no key 'fil'; the nearest is 'file'"),
        ("image_size = 224\n[weights", "[weights", "weights.mine lacks the key 'image_size'"),
        ("rank = 1", 'rank = "1"', "weights.mine.rank must be an integer. Received: '1'"),
        ("ViT-B/16", "ViT-BB/16", "No architecture has this name; the nearest are"),
        ("ViT-B/16", "B_16", "a card must use the canonical name 'ViT-B/16'. Received: 'B_16'"),
        (
            "classifier =",
            "clasifier =",
            "no field ['clasifier']; the nearest are {'clasifier': ['classifier'",
        ),
        ('"gap"', '"gab"', "classifier must be one of"),
        (
            'labels = "imagenet2012"',
            'labels = "imagenet"',
            "labels must be one of ['digits', 'imagenet2012', 'imagenet21k']",
        ),
        ('"squash"', '"squish"', "resize must be one of"),
        (
            'values = { "ViT-B/16"',
            'values = { "ViT-L/16"',
            "accuracy[0].values names 'ViT-L/16', which has no file",
        ),
        ('"b16.npz"', '"b16.npz", sha256 = "12"', "sha256 must be 64 digits"),
    ],
)
def test_a_typing_error_in_a_card_is_one_clear_error(tmp_path: Path, right: str, wrong: str, said: str) -> None:
    with pytest.raises(CardError) as error:
        read_text(tmp_path, CARD.replace(right, wrong))
    assert said in str(error.value)
    assert "mine.toml is not a valid model card" in str(error.value)


def test_two_errors_in_a_card_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(CardError, match="'licens'.*'fle'"):
        read_text(tmp_path, CARD.replace("licence", "licens").replace("file =", "fle ="))


def test_a_card_that_is_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine.toml"):
        read_text(tmp_path, CARD + "=")


@pytest.mark.parametrize(
    "second",
    [
        CARD.replace("rank = 1", "rank = 2"),  # the same tag
        CARD.replace("weights.mine", "weights.other"),  # the same rank
    ],
)
def test_two_families_may_not_claim_the_same_place(tmp_path: Path, second: str) -> None:
    rows = [*read_text(tmp_path, CARD).weights, *read_text(tmp_path, second).weights]
    with pytest.raises(CardError, match="same tag or rank"):
        catalogue.gather(rows)


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_every_reported_accuracy_reaches_its_card(path: Path) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    stated = sum(len(entry["values"]) for tag in table["weights"].values() for entry in tag.get("accuracy", []))
    assert sum(len(weights.accuracy) for weights in read_family(path).weights) == stated


def test_the_embedded_weights_lie_in_the_zoo() -> None:
    weights = catalogue.select(catalogue.card("digits"))
    assert weights.url is None
    assert Path(weights.location) == files.data_folder("zoo") / "weights" / "digits.npz"


def test_what_is_wrong_for_all_rows_is_told_once(tmp_path: Path) -> None:
    two = CARD.replace("[[weights", '"ViT-L/16" = { file = "l16.npz" }\n[[weights')
    with pytest.raises(CardError) as error:
        read_text(tmp_path, two.replace("squash", "squish"))
    assert str(error.value).count("resize must be one of") == 1
    assert "weights.mine.files.ViT-B/16, weights.mine.files.ViT-L/16:" in str(error.value)
