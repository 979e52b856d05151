"""Model cards: what they state is true of the models, and a wrong card is one clear error."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keras_vit._util import files
from keras_vit.converters.table import load_table
from keras_vit.errors import CardError
from keras_vit.export.modes import load_mode
from keras_vit.model.config import Preprocessing, ViTConfig
from keras_vit.model.cost import count
from keras_vit.train import recipe
from keras_vit.zoo import cards, catalogue
from keras_vit.zoo.cards import Family, Weights, read_family
from official_counts import OFFICIAL

FAMILIES = sorted(files.data_folder("zoo").glob("*.toml"))
EVERY_FILE = [weights for path in FAMILIES for weights in read_family(path).weights]
CARDS = {f"{weights.architecture} {weights.tag}": weights for weights in EVERY_FILE}
STEP = 12  # tests that share the cards, so that they run side by side
BACKBONES = {name.replace("_", "/"): headless for name, (_, headless, _) in OFFICIAL.items()}

CARD = """
title = "Mine"
license = "MIT"
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


def test_what_a_card_states_makes_a_config_with_a_label_for_every_class() -> None:
    lists = {path.stem: path for path in (files.data_folder("zoo") / "labels").glob("*.txt")}
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in lists.items()}
    for name, weights in CARDS.items():
        config = weights.whole_config()
        assert config.image_size == (weights.image_size,) * 2, name
        assert config.num_classes == weights.num_classes, name
        official = "hidden_size" not in weights.config
        assert not official or config == ViTConfig.from_name(weights.architecture, **weights.facts), name
        assert not weights.labels or lengths[weights.labels] == weights.num_classes, name


@pytest.mark.full
@pytest.mark.parametrize("start", range(STEP))
def test_the_parameters_and_operations_on_a_card_are_those_of_the_model(start: int) -> None:
    stated: dict[ViTConfig, dict[str, tuple[int | None, float | None]]] = {}
    for name, card in CARDS.items():
        config = card.whole_config().replace(labels=None, preprocessing=Preprocessing())
        stated.setdefault(config, {})[name] = (card.parameters, card.gflops)
    for config, same in list(stated.items())[start::STEP]:
        found = count(config)
        assert same == dict.fromkeys(same, (found.parameters, found.flops / 1e9))


def test_the_published_size_is_that_of_the_parameters_stated() -> None:
    with_size = {name: weights for name, weights in CARDS.items() if weights.size_mib and weights.tag != "sam"}
    assert len(with_size) > 20
    wrong = {}
    for name, weights in with_size.items():
        config = ViTConfig.from_name(weights.architecture, **weights.facts)
        at_224 = config.replace(image_size=224)
        features = config.representation_size or config.hidden_size
        parameters = (
            (BACKBONES.get(weights.architecture) or count(config.replace(num_classes=0)).parameters)
            + (config.num_tokens - at_224.num_tokens) * config.hidden_size
            + (config.hidden_size * features + features if config.representation_size else 0)
            + features * config.num_classes
            + config.num_classes
        )
        # Published sizes are rounded to a MiB or 0.01 GiB (0.4 % of 1.2 GiB), and a file has a header for each tensor.
        # This finds a wrong head or patch size, and a pre_logits layer of the B models (0.57 %).
        if weights.size_mib != pytest.approx(4 * parameters / 2**20, rel=0.005, abs=0.6):
            wrong[name] = (weights.size_mib, parameters)
    assert not wrong


def test_the_embedded_weights_lie_in_the_zoo_and_every_reported_accuracy_is_on_a_card() -> None:
    weights = cards.select(cards.card("digits"))
    assert weights.url is None
    assert Path(weights.location) == files.data_folder("zoo") / "weights" / "digits.npz"
    for path in FAMILIES:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        stated = sum(len(entry["values"]) for tag in table["weights"].values() for entry in tag.get("accuracy", []))
        assert sum(len(weights.accuracy) for weights in read_family(path).weights) == stated, path.stem


# ---- a card of one's own


def read_text(folder: Path, text: str) -> Family:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return read_family(path)


def test_a_card_of_ones_own_is_read_and_what_it_does_not_state_is_counted(tmp_path: Path) -> None:
    (weights,) = read_text(tmp_path, CARD).weights
    assert isinstance(weights, Weights)
    assert weights.location == weights.url == "https://example.org/b16.npz"
    assert weights.config == {"classifier": "gap"}
    assert [accuracy.value for accuracy in weights.accuracy] == [80]
    [row] = catalogue.rows(catalogue.read_cards(tmp_path / "mine.toml")["ViT-B/16"])
    assert (row["parameters"], row["gflops"]) == (86_566_120, pytest.approx(2 * 17.4, rel=0.01))


WRONG = {
    # right text: (wrong text, part of the error)
    "num_classes = 1000": ("num_clases = 1000", "weights.mine has no key 'num_clases'; the nearest is 'num_classes'"),
    "file =": ("fil =", "files.ViT-B/16 has no key 'fil'"),
    "image_size = 224\n[weights": ("[weights", "weights.mine lacks the key 'image_size'"),
    "rank = 1": ('rank = "1"', "weights.mine.rank must be an integer"),
    "ViT-B/16": ("ViT-BB/16", "No architecture has this name"),
    '"ViT-B/16"': ('"B_16"', "canonical name 'ViT-B/16'"),
    "classifier =": ("clasifier =", "no field ['clasifier']"),
    '"gap"': ('"gab"', "classifier must be one of"),
    'labels = "imagenet2012"': ('labels = "imagenet"', "labels must be one of"),
    '"squash"': ('"squish"', "resize must be one of"),
    'values = { "ViT-B/16"': ('values = { "ViT-L/16"', "names 'ViT-L/16', which has no file"),
    '"b16.npz"': ('"b16.npz", sha256 = "12"', "sha256"),
}


def test_a_typing_error_in_a_card_is_one_clear_error(tmp_path: Path) -> None:
    for right, (wrong, said) in WRONG.items():
        with pytest.raises(CardError, match="mine.toml is not a valid model card") as error:
            read_text(tmp_path, CARD.replace(right, wrong))
        assert said in str(error.value)
    with pytest.raises(ValueError, match="mine.toml"):
        read_text(tmp_path, CARD + "=")


def test_all_errors_in_a_card_are_told_together_and_each_once(tmp_path: Path) -> None:
    with pytest.raises(CardError, match="'licens'.*'fle'"):
        read_text(tmp_path, CARD.replace("license", "licens").replace("file =", "fle ="))
    two = CARD.replace("[[weights", '"ViT-L/16" = { file = "l16.npz" }\n[[weights')
    with pytest.raises(CardError) as error:
        read_text(tmp_path, two.replace("squash", "squish"))
    assert str(error.value).count("resize must be one of") == 1


def test_two_families_may_not_claim_the_same_tag_or_rank(tmp_path: Path) -> None:
    for second in (CARD.replace("rank = 1", "rank = 2"), CARD.replace("weights.mine", "weights.other")):
        rows = [*read_text(tmp_path, CARD).weights, *read_text(tmp_path, second).weights]
        with pytest.raises(CardError, match="same tag or rank"):
            cards.gather(rows)


# ---- any table in a TOML file


READERS: dict[str, Callable[[Path], Any]] = {
    "format": load_table,
    "card": read_family,
    "recipe": recipe,
    "mode": load_mode,
}
DEEP = ("a = " + "[" * 20_000 + "]" * 20_000, "a = " + "{b = " * 5_000 + "1" + "}" * 5_000, "a." * 3_000 + "b = 1")


@pytest.mark.parametrize("kind", READERS)
def test_a_table_that_is_nested_deeply_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    for text in DEEP:
        path.write_text(text)
        with pytest.raises(ValueError, match="deep.toml is nested") as caught:
            READERS[kind](path)
        assert len(str(caught.value)) < 500


FORMAT = """
format = "mine"
container = "safetensors"
layout = "torch"
detect = ["x"]
tensors = { "head/kernel" = "head.weight" }
"""


def test_a_wrong_type_in_a_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value, said in (
        ("tensors", 7, "tensors must be a table. Received: 7"),
        ("tensors", {"a": 7}, "tensors.a must be a list. Received: 7"),
        ("tensors", {"a": [7]}, r"tensors.a\[0\] must be text. Received: 7"),
        ("tensors", {"a": "b | if x = " + "[" * 5_000}, "."),
        ("json", {"fields": {}}, r"json must be text. Received: \{'fields'"),
        ("json", "timmm", r"json must be one of \['huggingface', .*'timm'"),
        ("jsn", "timm", "has no key 'jsn'; the nearest is 'json'"),
    ):
        table = {**tomllib.loads(FORMAT), key: value}
        monkeypatch.setattr("keras_vit.converters.table._read_raw", lambda *_, table=table: table)
        with pytest.raises(ValueError, match=said) as caught:
            load_table(tmp_path / "mine.toml")
        assert str(tmp_path / "mine.toml") in str(caught.value)
