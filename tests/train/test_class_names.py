"""Class names of model and data are compared, in evaluation, training and on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit import train
from keras_vit.model import labels
from keras_vit.train import prepare
from keras_vit.train.data import sources
from marks import full_except
from picture_folders import WORDS, accuracy, digits_model, fill, write_digits
from tiny_models import built, tiny

PETS = ("cat", "dog", "Guinea pig")
WNIDS = ("n01440764", "n01443537", "n15075141")  # tench, goldfish, toilet tissue: classes 0, 1, 999


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))


def imagenet() -> tuple[str, ...]:
    """Return ImageNet's labels as a file of another library has them: without ids, and one in another spelling."""
    return tuple(label if i != 5 else f"the {label}" for i, (_, label) in enumerate(labels.read("imagenet2012")))


def matched(model: str | tuple[str, ...], data: Sequence[str]) -> list[int]:
    """Match the classes of data with those of a model."""
    count = len(model) if isinstance(model, tuple) else len(labels.read(model))
    return labels.match_classes(model, count, data, "photos")


MATCHES: list[tuple[str | tuple[str, ...], tuple[str, ...], list[int]]] = [
    (PETS, PETS, [0, 1, 2]),
    (PETS, ("Guinea pig", "cat", "dog"), [2, 0, 1]),
    (PETS, ("dog",), [1]),
    (PETS, ("DOG", "guinea_pig"), [1, 2]),
    (("a-b", "A_B"), ("A_B", "a-b"), [1, 0]),  # exact names come first
    ("imagenet2012", WNIDS, [0, 1, 999]),
    ("imagenet2012", ("toilet_tissue", "Goldfish"), [999, 1]),
    ("imagenet2012", ("maillot", "n02012849", "n03126707"), [638, 134, 517]),  # two classes are called "crane"
    (imagenet(), WNIDS, [0, 1, 999]),
    ("digits", tuple("0123456789"), list(range(10))),
    ("digits", ("nine", "3"), [9, 3]),
    (("0", "1", "10", "2"), ("10", "2"), [2, 3]),  # as a folder of numbers names them
    (PETS, ("0", "1", "2"), [0, 1, 2]),  # numbers are no names
]
WITHOUT_MATCH: list[tuple[str | tuple[str, ...], tuple[str, ...], str]] = [
    (PETS, ("cat", "puppy"), "does not have: puppy. The data's 2 classes are puppy, cat; the model's 3 are dog, Gu"),
    (PETS, ("Cat", "cat"), "does not have: Cat. "),  # both would be "cat"
    (("a_b", "A b"), ("a-B",), "does not have: a-B"),  # fits both
    ("imagenet2012", ("crane",), "does not have: crane"),
    ("digits", ("0", "1", "10"), "does not have: 10"),
    (PETS, ("1", "2", "3"), "does not have: 1, 2, 3"),
]


def test_classes_are_matched_by_name() -> None:
    for model, data, numbers in MATCHES:
        assert matched(model, data) == numbers
    for model, data, message in WITHOUT_MATCH:
        with pytest.raises(ValueError, match=message):
            matched(model, data)


def test_numbers_in_another_order_are_class_numbers_with_a_warning() -> None:
    names = tuple(f"class of {number}" for number in "abcdefghijkl")
    with pytest.warns(UserWarning, match=r"classes of photos are taken as numbers of the model's: 11 is 'class of l'"):
        assert matched(names, ("0", "1", "10", "11")) == [0, 1, 10, 11]
    with pytest.warns(UserWarning, match="07 is 'seven'"):
        assert matched("digits", ("00", "07")) == [0, 7]


# The embedded model's labels are those words; in the order of text "eight" comes first.
FOLDERS = {
    "some of the words": dict(enumerate(WORDS[:3])),
    "words in capitals": {number: word.title() for number, word in enumerate(WORDS)},
    "some of the numbers": {7: "7", 8: "8"},
}


@pytest.mark.parametrize("case", full_except(["some of the words"], FOLDERS))
def test_folders_in_any_order_are_measured_by_name(tmp_path: Path, case: str) -> None:
    result = train.evaluate(digits_model(), write_digits(tmp_path, FOLDERS[case]))
    assert result.top1 == pytest.approx(accuracy(FOLDERS[case]))
    count = len(FOLDERS[case])
    assert (f"of {count} of the model's 10 classes" in str(result)) == (count < 10)
    assert (result.classes, result.model_classes) == (count, 10)


def test_several_labels_per_image_are_matched_too() -> None:
    images = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8)
    rows = np.eye(3, dtype=np.float32)[np.arange(8) % 3]
    model = built(num_classes=3, labels=PETS)
    order = [2, 0, 1]
    same, moved = (
        train.evaluate(model, {"evaluation": (images, target), "class_names": names}, labels="real")
        for target, names in ((rows, PETS), (rows[:, order], [PETS[i] for i in order]))
    )
    assert (moved.top1, moved.loss) == (same.top1, same.loss)


@pytest.mark.full
def test_without_names_the_order_of_numbered_folders_is_said(tmp_path: Path) -> None:
    fill(tmp_path, **{str(number): 1 for number in range(12)})
    with pytest.warns(UserWarning, match=r"numbers in the order of text: 0, 1, 10, ... are the classes 0, 1, 2"):
        train.evaluate(built(num_classes=12), tmp_path)


def data_of(names: Sequence[str] | None, order: Sequence[int] = (0, 1, 2)) -> sources.Data:
    """Return 12 images of three classes, whose names and numbers are in the given order."""
    images = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    numbers = np.array([list(order).index(number % 3) for number in range(12)])
    stated = {"class_names": [names[i] for i in order]} if names else {"num_classes": 3}
    return sources.open_data({"train": (images, numbers), "evaluation": (images, numbers), **stated})


def recipe(**changes: Any) -> train.Recipe:
    quick = {"steps": 2, "batch_size": 4, "xla": False, "warmup_fraction": 0.0, "log_steps": 1}
    return train.recipe("digits", **quick | changes)


NEW, NUMBERS = ("ant", "bee", "fly"), ("0", "1", "2")
# (reset_head, labels of the model, names of the data): labels of the trained model, whether the head is new
HEADS = {
    (False, None, PETS): (PETS, False),
    (False, NUMBERS, PETS): (PETS, False),  # of a model that was trained on arrays without names
    (False, NUMBERS, NUMBERS[::-1]): (NUMBERS, False),
    (False, PETS, None): (PETS, False),
    (False, None, None): (NUMBERS, False),
    (True, PETS, NEW): (NEW, True),
    (True, PETS, PETS): (PETS, True),
    ("auto", PETS, PETS[::-1]): (PETS, False),
    ("auto", PETS, NEW): (NEW, True),
    ("auto", None, PETS): (PETS, True),
}


@pytest.mark.full
def test_names_of_the_data_are_those_of_the_trained_model() -> None:
    for case, expected in HEADS.items():
        reset_head, model_names, data_names = case
        source = built(num_classes=3, num_layers=1, labels=model_names)
        decided, data = prepare.match_head(recipe(reset_head=reset_head), source.config, data_of(data_names))
        adapted = prepare.adapt_model(decided, source, num_classes=data.num_classes, class_names=data.class_names)
        is_new = not np.asarray(adapted.get_layer("head").kernel).any()
        assert (adapted.config.labels, is_new) == expected, case
    with pytest.raises(ValueError, match=r"does not have: ant, bee, fly.*reset_head=True"):
        prepare.match_head(recipe(), tiny(num_classes=3, labels=PETS), data_of(NEW))
