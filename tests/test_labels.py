"""Class names: the lists that come with the package, and a model's own."""

import pytest

from keras_vit._util import files
from keras_vit.model import labels

LISTS = sorted(path.stem for path in (files.data_folder("zoo") / "labels").glob("*.txt"))


@pytest.mark.parametrize(
    ("name", "classes", "rows"),
    [
        # The first and last WordNet ids of ILSVRC 2012, in the order that all models use.
        (
            "imagenet2012",
            1000,
            {0: ("n01440764", "tench"), 207: ("n02099601", "golden retriever"), 999: ("n15075141", "toilet")},
        ),
        ("imagenet21k", 21843, {}),
        ("digits", 10, {}),
    ],
)
def test_a_list_has_one_row_a_class(name: str, classes: int, rows: dict[int, tuple[str, str]]) -> None:
    known = labels.names(name, classes)
    assert len(known) == classes
    assert all(label_id and label for label_id, label in known)
    assert len({label_id for label_id, _ in known}) == classes
    for number, (label_id, label) in rows.items():
        assert known[number][0] == label_id
        assert label in known[number][1]


def test_every_list_is_tried() -> None:
    assert {"imagenet2012", "imagenet21k", "digits"} == set(LISTS)


def test_imagenet_ids_are_wordnets_in_order() -> None:
    ids = [label_id for label_id, _ in labels.names("imagenet2012", 1000)]
    assert ids == sorted(ids)
    assert all(label_id.startswith("n") and label_id[1:].isdigit() and len(label_id) == 9 for label_id in ids)


def test_digits_are_called_by_their_number() -> None:
    assert [label_id for label_id, _ in labels.names("digits", 10)] == [str(number) for number in range(10)]


def test_a_models_own_names_are_numbered() -> None:
    assert labels.names(("ant", "bee"), 2) == [("0", "ant"), ("1", "bee")]


def test_without_names_classes_are_numbers() -> None:
    assert labels.names(None, 2) == [("0", "class 0"), ("1", "class 1")]
    assert labels.names(None, 0) == []


@pytest.mark.parametrize(("given", "classes"), [("imagenet2012", 1001), (("ant",), 2), (("ant", "bee"), 1)])
def test_a_list_of_another_length_is_refused(given: str | tuple[str, ...], classes: int) -> None:
    with pytest.raises(ValueError, match=rf"for {classes} classes.*Received"):
        labels.names(given, classes)


@pytest.mark.parametrize("name", ["imagenet", "", "../labels/digits", "digits.txt"])
def test_an_unknown_list_is_refused_and_the_known_are_named(name: str) -> None:
    with pytest.raises(ValueError, match="imagenet2012.*Received"):
        labels.names(name, 10)


def test_changing_an_answer_changes_no_later_one() -> None:
    labels.names("digits", 10).clear()
    assert len(labels.names("digits", 10)) == 10
