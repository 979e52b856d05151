import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pytest

from keras_vit._util.checks import check_depth, table_problems
from keras_vit.converters.table import load_table
from keras_vit.export.quantization.modes import load_mode
from keras_vit.train import recipe
from keras_vit.zoo.cards import read_family


class Row(TypedDict):
    file: str


class Card(TypedDict):
    name: str
    size: NotRequired[float]
    exact: NotRequired[bool]
    tags: NotRequired[list[str]]
    rows: NotRequired[dict[str, Row]]


PROBLEMS: list[tuple[object, str]] = [
    ({}, "card lacks the key 'name'"),
    ({"name": 3}, "card.name must be text. Received: 3"),
    ({"name": "a", "sise": 1}, "card has no key 'sise'; the nearest is 'size'"),
    ({"name": "a", "zzz": 1}, "card has no key 'zzz'; known are ['exact', 'name', 'rows', 'size', 'tags']"),
    ({"name": "a", "size": True}, "card.size must be an integer or a number. Received: True"),
    ({"name": "a", "exact": 1}, "card.exact must be true or false. Received: 1"),
    ({"name": "a", "tags": "b"}, "card.tags must be a list. Received: 'b'"),
    ({"name": "a", "tags": ["b", 2]}, "card.tags[1] must be text. Received: 2"),
    ({"name": "a", "rows": {"x": {"flie": "b"}}}, "card.rows.x has no key 'flie'; the nearest is 'file'"),
    ([], "card must be a table. Received: []"),
]


def test_a_table_that_fits_has_no_problems_and_each_problem_is_named_with_its_place() -> None:
    for table in (
        {"name": "a"},
        {"name": "a", "size": 1, "exact": True, "tags": []},
        {"name": "a", "size": 1.5, "rows": {"any": {"file": "b"}, "other": {"file": "c"}}},
    ):
        assert list(table_problems(table, Card, "card")) == []
    for wrong, said in PROBLEMS:
        assert said in list(table_problems(wrong, Card, "card"))
    assert len(list(table_problems({"size": "big", "tag": []}, Card, "card"))) == 3  # all at once


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


def test_depth_is_counted_through_lists_and_tables() -> None:
    deep: Any = 1
    for _ in range(15):
        deep = {"a": [deep]}
    assert check_depth(deep, "it") is deep
    with pytest.raises(ValueError, match="it is nested more than 32 levels deep"):
        check_depth([[[deep]]], "it")
