import pytest

from keras_vit._util.schema import NUMBER, misfits

SCHEMA = {"name": str, "size?": NUMBER, "exact?": bool, "tags?": [str], "rows?": {"*": {"file": str}}}


@pytest.mark.parametrize(
    "table",
    [
        {"name": "a"},
        {"name": "a", "size": 1, "exact": True, "tags": []},
        {"name": "a", "size": 1.5, "rows": {"any": {"file": "b"}, "other": {"file": "c"}}},
    ],
)
def test_a_table_that_fits_has_no_misfits(table: object) -> None:
    assert list(misfits(table, SCHEMA, "card")) == []


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "card lacks the key 'name'"),
        ({"name": 3}, "card.name must be text. Received: 3"),
        ({"name": "a", "sise": 1}, "card has no key 'sise'; the nearest is 'size'"),
        (
            {"name": "a", "zzz": 1},
            "card has no key 'zzz'; known are ['exact', 'name', 'rows', 'size', 'tags']",
        ),
        ({"name": "a", "size": True}, "card.size must be a whole number or a number. Received: True"),
        ({"name": "a", "exact": 1}, "card.exact must be true or false. Received: 1"),
        ({"name": "a", "tags": "b"}, "card.tags must be a list. Received: 'b'"),
        ({"name": "a", "tags": ["b", 2]}, "card.tags[1] must be text. Received: 2"),
        ({"name": "a", "rows": {"x": {"flie": "b"}}}, "card.rows.x has no key 'flie'; the nearest is 'file'"),
        ([], "card must be a table. Received: []"),
    ],
)
def test_a_misfit_is_named_with_its_place(table: object, said: str) -> None:
    assert said in list(misfits(table, SCHEMA, "card"))


def test_all_misfits_are_named_at_once() -> None:
    assert len(list(misfits({"size": "big", "tag": []}, SCHEMA, "card"))) == 3
