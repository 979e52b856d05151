"""The data folders are found, their tables are read, and errors name file and line."""

import re
import tomllib
from pathlib import Path

import pytest

from keras_vit._util import files

FOLDERS = ["zoo", "converters"]
TABLES = [path for name in FOLDERS for path in sorted(files.data_folder(name).rglob("*.toml"))]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty package in an empty folder."""
    package = tmp_path / "keras_vit"
    package.mkdir()
    monkeypatch.setattr(files, "PACKAGE", package)
    return package


@pytest.mark.parametrize("name", FOLDERS)
def test_both_folders_are_found(name: str) -> None:
    assert files.data_folder(name).is_dir()


def test_a_checkout_has_its_folders_beside_the_package(package: Path) -> None:
    (package.parent / "zoo").mkdir()
    assert files.data_folder("zoo") == package.parent / "zoo"


def test_an_installed_folder_comes_before_one_beside_the_package(package: Path) -> None:
    (package.parent / "zoo").mkdir()
    (package / "_installed" / "zoo").mkdir(parents=True)
    assert files.data_folder("zoo") == package / "_installed" / "zoo"


def test_a_missing_folder_is_an_error_that_names_both_places(package: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'zoo'.*install keras-vit-zoo again") as caught:
        files.data_folder("zoo")
    assert str(package / "_installed" / "zoo") in str(caught.value)
    assert str(package.parent / "zoo") in str(caught.value)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_every_table_of_the_package_reads_as_tomllib_reads_it(path: Path) -> None:
    with path.open("rb") as file:
        assert files.read_toml(path) == tomllib.load(file) != {}


BROKEN = {
    "a value that is no TOML": (b'name = "ViT"\nsize = big\n', "not valid TOML.*line 2"),
    "a key given twice": (b"size = 1\n\nsize = 2\n", "not valid TOML.*line 3"),
    "an open string": (b'name = "ViT\n', "not valid TOML.*line 1"),
    "bytes that are no UTF-8": (b"# one\n# two\nname = '\xff'\n", "not UTF-8 text.*line 3"),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_table_is_one_error_with_file_and_line(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} is {message}"):
        files.read_toml(path)


def test_a_missing_table_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml"):
        files.read_toml(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(("name", "count"), [("imagenet2012", 1000), ("imagenet21k", 21843)])
def test_class_names_are_one_a_line_with_their_wordnet_id_in_order(name: str, count: int) -> None:
    text = (files.data_folder("zoo") / "labels" / f"{name}.txt").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()]
    assert len(rows) == count
    assert all(len(row) == 2 and re.fullmatch(r"n\d{8}", row[0]) and row[1].strip() for row in rows)
    assert [row[0] for row in rows] == sorted({row[0] for row in rows})
