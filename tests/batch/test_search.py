"""Search: the rows that NumPy finds, in bounded memory, and a page that any names and images leave harmless."""

from __future__ import annotations

import json
import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import image_kinds
from command_line import fails, run
from html_document import Document
from keras_vit import batch, digits, zoo
from keras_vit.batch import _search

RANDOM = np.random.default_rng(0)
HOSTILE = "\"><img src=x onerror=alert(1)>&'{{ 7 * 7 }}\u202e.png"


def by_numpy(vectors: Any, query: Any, top: int) -> tuple[list[int], np.ndarray]:
    """Return the rows with the largest cosines, and these, in float64."""
    rows, query = np.asarray(vectors, np.float64), np.asarray(query, np.float64)
    cosines = rows @ query / np.linalg.norm(rows, axis=1) / np.linalg.norm(query)
    best = np.argsort(-cosines, kind="stable")[:top]
    return best.tolist(), cosines[best]


def test_the_rows_are_those_that_numpy_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_search, "BLOCK", 24 * 7)  # 7 rows, and the last block has fewer
    rows, queries = RANDOM.normal(size=(60, 24)).astype("f4"), RANDOM.normal(size=(3, 24))
    np.save(tmp_path / "vectors.npy", rows)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(rows))
    places: tuple[Any, ...] = (rows, rows.astype("f2"), tmp_path / "vectors.npy", tmp_path / "fortran.npy")
    for place in places:
        for top in (1, 5, 100):
            vectors = place if isinstance(place, np.ndarray) else rows
            for query, found in zip(queries, batch.search(place, queries, top=top), strict=True):
                want, cosines = by_numpy(vectors, query, top)
                assert [match.row for match in found] == want
                np.testing.assert_allclose([match.score for match in found], cosines, atol=1e-6)
                assert {match.path for match in found} == {None}


def test_of_equal_rows_the_first_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_search, "BLOCK", 4 * 3)
    rows = np.tile(np.eye(2, 4, dtype="f4"), (10, 1)) * RANDOM.uniform(1, 2, (20, 1)).astype("f4").round()
    assert [match.row for match in batch.search(rows, [0, 1, 0, 0], top=4)[0]] == [1, 3, 5, 7]


def png(number: int) -> bytes:
    """Return a held-out digit as a file."""
    return image_kinds.encoded(image_kinds.Image.fromarray(digits.load().test_images[number, ..., 0]), "PNG")


def test_a_score_is_never_above_one() -> None:
    row = np.float32([[0.9, 0.1, 0.8]])
    rows = row * RANDOM.uniform(0.1, 9, (500, 1)).astype("f4")
    scores = [match.score for match in batch.search(rows, row, top=500)[0]]
    assert max(scores) == 1 and min(scores) > 0.999


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with photos, one of which is damaged, and with their embeddings."""
    place = tmp_path_factory.mktemp("search")
    (place / "photos").mkdir()
    for number in range(9):
        (place / "photos" / f"{number}.png").write_bytes(png(number)[: 50 if number == 4 else None])
    run("embed", "digits", place / "photos", "--to", place / "vectors", "--rows-per-file", 4, "--dtype", "float32")
    return place


def test_a_photo_finds_itself_and_what_resembles_it(folder: Path) -> None:
    photo = folder / "photos" / "3.png"
    found = json.loads(run("search", folder / "vectors", photo, "--top", "4", "--json"))
    table = pq.read_table(folder / "vectors").to_pylist()
    good = [number for number, row in enumerate(table) if row["error"] is None]
    assert len(good) == len(table) - 1 == 8
    query = zoo.load("digits").embed(photo)[0]
    want, cosines = by_numpy([table[number]["embeddings"] for number in good], query, 4)
    assert [match["row"] for match in found] == [good[number] for number in want]
    assert [match["path"] for match in found] == [table[good[number]]["path"] for number in want]
    np.testing.assert_allclose([match["score"] for match in found], cosines, atol=1e-6)
    lines = run("search", folder / "vectors", photo, "--top", "2", "--model", "digits").splitlines()
    assert len(lines) == 2 and lines[0] == f"1.000  {photo}"


def test_search_and_embed_agree_about_images_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, vectors = tmp_path / "photos", tmp_path / "vectors"
    photos.mkdir()
    for number in range(3):
        (photos / f"{number}.png").write_bytes(png(number))
    run("embed", "digits", photos, "--to", vectors, "--dtype", "float32")
    (photos / "1.png").write_bytes(png(7))
    with pytest.warns(
        UserWarning, match="of images that have changed: 1, such as .*. The same keras-vit embed computes"
    ):
        run("search", vectors, photos / "2.png")
    with pytest.warns(UserWarning, match="computed again"):
        run("embed", "digits", photos, "--to", vectors, "--dtype", "float32")
    (photos / "9.png").write_bytes(png(9))
    with pytest.warns(UserWarning, match="1 added, 0 removed, such as .*9.png. .* embed into a new folder"):
        run("search", vectors, photos / "2.png")
    message = fails(monkeypatch, "embed", "digits", photos, "--to", vectors, "--dtype", "float32")
    assert "1 added, 0 removed, such as" in message and "embed into a new folder" in message


@pytest.mark.full
def test_the_contact_sheet_shows_each_image_or_why_it_cannot(tmp_path: Path) -> None:
    photos, sheet = tmp_path / "photos", tmp_path / "sheet.html"
    photos.mkdir()
    for number in range(4):
        (photos / f"{number}.png").write_bytes(png(number))
    (photos / HOSTILE).write_bytes(png(3))
    with tf.io.TFRecordWriter(str(photos / "some.tfrecord")) as writer:
        for number in (5, 6):
            writer.write(png(number))
    run("embed", "digits", photos, "--to", tmp_path / "vectors")
    record = json.loads((tmp_path / "vectors" / "_run.json").read_text())
    assert record["model"] == {"model": "ViT-digits", "weights": "digits"}
    [[best]] = batch.search(tmp_path / "vectors", zoo.load("digits").embed(digits.load().test_images[6:7]), top=1)
    assert best.path is not None and best.path.endswith("some.tfrecord#1")
    (photos / "0.png").unlink()
    (photos / "1.png").write_bytes(b"no image")
    (photos / "2.png").write_bytes(image_kinds.png(60_000, 60_000, 8, 2, b"\0"))  # would be 10 GB of pixels
    with pytest.warns(
        UserWarning, match="0 added, 1 removed, such as .*0.png. To search in them, embed into a new folder"
    ):
        run("search", tmp_path / "vectors", photos / "3.png", "--out", sheet)
    page = Document(sheet.read_text(encoding="utf-8"))
    shown = page.all("img")
    assert len(shown) == 4 and all(picture["src"].startswith("data:image/") for picture in shown)
    assert page.text.count("Cannot be read") == 3 and "There is no image file" in page.text
    assert HOSTILE.replace("\u202e", "\\u202e") in page.text  # as text, and not as an element
    assert not {name for _, attributes in page.tags for name in attributes} & {"onerror", "href"}
    assert "default-src 'none'" in page.source and "<script" not in page.source


@pytest.mark.full
def test_another_model_is_an_error_by_its_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = zoo.load("digits", image_size=48)
    other.save(tmp_path / "other.keras")
    photo = folder / "photos" / "3.png"
    told = fails(monkeypatch, "search", folder / "vectors", photo, "--model", tmp_path / "other.keras")
    assert "another model than" in told and "other.keras" in told
    with pytest.raises(ValueError, match="different widths, 9 and 64"):
        batch.search(folder / "vectors", np.ones(9))
    for line in (["--weights", "digits"], ["--out", tmp_path / "no" / "sheet.html"], ["--top", "0"]):
        assert fails(monkeypatch, "search", folder / "vectors", photo, *line)
    assert "There is no image file" in fails(monkeypatch, "search", folder / "vectors", "missing.jpg")
    assert "must be a text" in fails(monkeypatch, "search", folder / "vectors", " ")


def test_a_folder_that_does_not_name_its_model_asks_for_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "vectors", tmp_path / "vectors")
    record = json.loads((tmp_path / "vectors" / "_run.json").read_text())
    for origin in (None, "digits", {"model": "digits", "other": 1}, {}):
        (tmp_path / "vectors" / "_run.json").write_text(json.dumps({**record, "model": origin}))
        told = fails(monkeypatch, "search", tmp_path / "vectors", folder / "photos" / "3.png")
        assert "pass --model" in told
    assert run("search", tmp_path / "vectors", folder / "photos" / "3.png", "--model", "digits")


@pytest.mark.full
def test_a_text_is_compared_only_with_vectors_of_its_own_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("x" * 300, "~5 red cars"):  # no file can have these names
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the long text is cut
            assert len(run("search", folder / "vectors", text, "--top", 2).splitlines()) == 2
    place = tmp_path / "vectors"
    shutil.copytree(folder / "vectors", place)
    record = json.loads((place / "_run.json").read_text())
    (place / "_run.json").write_text(json.dumps({**record, "weights": "0" * 16}))
    assert "another model than ViT-digits is now" in fails(monkeypatch, "search", place, "seven")
    zoo.load("digits").save(tmp_path / "images.keras")
    (place / "_run.json").write_text(json.dumps({**record, "model": {"model": str(tmp_path / "images.keras")}}))
    told = fails(monkeypatch, "search", place, "seven")
    assert "images.keras, and no text can be compared with them" in told and "Search with an image file" in told


def test_unfinished_and_damaged_folders_are_told(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "vectors"
    shutil.copytree(folder / "vectors", place)
    files = sorted(place.glob("part-*"))
    files[0].unlink()
    with pytest.warns(UserWarning, match="lacks 1 files: its run has not finished"):
        batch.search(place, np.ones(64))
    files[1].write_bytes(files[1].read_bytes()[:-9])
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=f"{files[1].name} is not a file of this run"):
        batch.search(place, np.ones(64))
    (place / "part-9.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="part-9.parquet is not a file of this run"):
        batch.search(place, np.ones(64))
    record = json.loads((place / "_run.json").read_text())
    (place / "_run.json").write_text(json.dumps({**record, "what": "logits"}))
    with pytest.raises(ValueError, match="has no embeddings, but logits"):
        batch.search(place, np.ones(64))


def test_wrong_vectors_and_queries_get_one_clear_error() -> None:
    wrong: list[tuple[Any, Any, str]] = [
        (np.eye(3), [], "queries must be numbers"),
        (np.eye(3), np.ones((1, 1, 3)), "queries must be numbers"),
        (np.eye(3), np.zeros(3), "such as query 0"),
        (np.eye(3), [1, np.nan, 0], "such as query 0"),
        (np.eye(3) * [[1], [0], [1]], np.ones(3), "such as row 1"),
        (np.full((2, 3), np.inf), np.ones(3), "such as row 0"),
        (np.eye(3), np.ones(4), "different widths, 4 and 3"),
        (np.ones(3), np.ones(3), r"vectors must be floats.* of shape \(3,\)"),
        (np.eye(3, dtype=int), np.ones(3), "vectors must be floats"),
        (np.ma.masked_array(np.eye(3), np.eye(3)), np.ones(3), "without a mask. Received: MaskedArray"),
        (np.eye(3), np.ma.masked_array([1.0, 2.0, 3.0], [0, 1, 0]), "without a mask. Received: MaskedArray"),
        (np.eye(3), [1j, 0, 0], "queries must be numbers .*, real"),
        (np.eye(3), {}, "queries must be numbers .* Received: dict"),
        ("nothing", np.ones(3), "nothing is not a folder that keras-vit embed has written"),
        ("nothing.npy", np.ones(3), "nothing.npy"),
    ]
    for vectors, queries, named in wrong:
        with pytest.raises((ValueError, FileNotFoundError), match=named):
            batch.search(vectors, queries)


def test_a_file_of_other_things_than_numbers_is_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "archive.npz", np.eye(3))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 3), }".ljust(117) + b"\n"
    (tmp_path / "short.npy").write_bytes(b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header)
    for name in ("objects", "archive", "short"):
        with pytest.raises(ValueError, match=f"{name}.npy is not a .npy file of numbers"):
            batch.search(tmp_path / f"{name}.npy", np.ones(3))
