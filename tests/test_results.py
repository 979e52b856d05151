"""No command replaces what it has not written: inputs, other people's files, links, devices, pipes."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from command_line import fails, run
from keras_vit import dense, digits, train, visualize, zoo
from keras_vit._util import files
from keras_vit.batch import _search
from keras_vit.batch.folder import find_folder
from keras_vit.cli import app, predict
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize import report_page
from tiny_models import randomised, tiny

HAND_MADE = b"drawn by hand"
JSON = b'{"mine": 1}'


def photo(path: Path, number: int = 0) -> Path:
    Image.fromarray(digits.load().test_images[number]).save(path)
    return path


@pytest.fixture(scope="module")
def maps() -> dense.DenseModel:
    return dense.segmenter(randomised(VisionTransformer(tiny())), 3)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    photo(folder / "a.png")
    run("embed", "digits", folder / "a.png", "--to", folder / "vectors", "--dtype", "float32")
    return folder / "vectors"


def test_photos_and_masks_drawn_by_hand_are_never_replaced(tmp_path: Path, maps: dense.DenseModel) -> None:
    files_ = [str(photo(tmp_path / name)) for name in ("a.png", "b.png")]
    before = [Path(file).read_bytes() for file in files_]
    with pytest.raises(FileExistsError, match="would replace an input"):
        list(predict.map_each(maps, files_, to=tmp_path, top=1))
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "b.png").write_bytes(HAND_MADE)
    with pytest.raises(FileExistsError, match="not written by keras-vit"):
        list(predict.map_each(maps, files_, to=tmp_path / "masks", top=1))
    assert [Path(file).read_bytes() for file in files_] == before
    assert {path.name: path.read_bytes() for path in (tmp_path / "masks").iterdir()} == {"b.png": HAND_MADE}
    (tmp_path / "masks" / "b.png").unlink()
    for _ in range(2):  # its own results are replaced
        list(predict.map_each(maps, files_, to=tmp_path / "masks", top=1))
    assert len(list((tmp_path / "masks").iterdir())) == 4
    with Image.open(tmp_path / "masks" / "a.png") as file:
        np.testing.assert_array_equal(np.asarray(file), maps.predict_maps(files_[0])[0])
    overlay = str(photo(tmp_path / "a-overlay.png"))
    with pytest.raises(ValueError, match=r"different names. Several would be a-overlay\.png"):
        list(predict.map_each(maps, [files_[0], overlay], to=tmp_path / "others", top=1))
    assert not (tmp_path / "others").exists()


def test_an_overlay_leaves_the_background_as_it_is(tmp_path: Path) -> None:
    model = dense.segmenter(randomised(VisionTransformer(tiny())), 2, labels=["Background", "thing"])
    file = photo(tmp_path / "a.png")
    list(predict.map_each(model, [str(file)], to=tmp_path / "maps", top=1))
    [classes] = model.predict_maps(file)
    with Image.open(tmp_path / "maps" / "a-overlay.png") as overlay, Image.open(file) as picture:
        is_same = (np.asarray(overlay) == np.asarray(picture.convert("RGB"))).all(axis=-1)
    assert 0 < (classes == 0).mean() < 1
    np.testing.assert_array_equal(is_same, classes == 0)


def test_an_examination_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "evaluate", lambda *_args, **_options: pytest.fail("it should not begin"))
    (tmp_path / "file").write_bytes(HAND_MADE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "examination.json").write_bytes(JSON)
    for out, message in (
        (tmp_path / "file", "needs a folder, and this is a file"),
        (tmp_path / "mine", "not written by keras-vit"),
    ):
        assert message in fails(monkeypatch, "evaluate", "digits", "--data", "digits", "--out", out)
    assert (tmp_path / "mine" / "examination.json").read_bytes() == JSON
    result = CliRunner().invoke(app, ["evaluate", "digits", "--data", "digits", "--out", ""])
    assert result.exit_code == 2 and "a folder needs a name" in result.output


def test_a_tokenizer_and_its_model_are_two_files(tmp_path: Path) -> None:
    from keras_vit import text

    encoder = zoo.text_encoder("digits")
    with pytest.raises(ValueError, match="the tokenizer's file"):
        text.tflite(encoder, tmp_path / encoder.tokenizer.file_name)
    assert not list(tmp_path.iterdir())


# ---- every kind of place for every result

Make = Callable[[Path, Path], None]  # of a path, and of an input


def _linked(path: Path, target: Path, content: bytes | None = None) -> None:
    if content is not None:
        target.write_bytes(content)
    path.symlink_to(target)


PLACES: dict[str, tuple[bool, Make]] = {  # whether a result may be written, and what is there
    "nothing": (True, lambda path, _: None),
    "an empty file": (True, lambda path, _: path.write_bytes(b"") and None),
    "somebody's file": (False, lambda path, _: path.write_bytes(HAND_MADE) and None),
    "a large file": (False, lambda path, _: path.write_bytes(bytes(4096) + files.MARK) and None),
    "an input": (False, lambda path, source: os.link(source, path)),
    "a link to an input": (False, lambda path, source: path.symlink_to(source)),
    "a link to somebody's file": (False, lambda path, _: _linked(path, path.parent / "theirs", HAND_MADE)),
    "a link to nothing": (True, lambda path, _: _linked(path, path.parent / "new")),
    "a link into no folder": (False, lambda path, _: _linked(path, path.parent / "none" / "new")),
    "a folder": (False, lambda path, _: path.mkdir()),
    "a pipe": (True, lambda path, _: os.mkfifo(path)),
    "a device": (True, lambda path, _: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))),
}


def _snapshot(folder: Path) -> dict[str, Any]:
    """Return what must not change below a folder: kinds of all nodes, targets of links, contents of files."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        kind = stat.S_IFMT(path.lstat().st_mode)
        content = path.read_bytes() if stat.S_ISREG(kind) else path.readlink() if stat.S_ISLNK(kind) else None
        found[str(path)] = (kind, content or None)
    return found


@pytest.mark.full
def test_every_kind_of_place_for_every_result(
    tmp_path: Path, maps: dense.DenseModel, vectors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.load("digits")
    collected = report_page._collect(model, model.preprocess(digits.load().test_images[:1]), 3, progress=False)
    monkeypatch.setattr(report_page, "_collect", lambda *_args, **_options: collected)
    data = digits.load()
    examined = train.examine(model, {"evaluation": (data.test_images[:20], data.test_labels[:20])})
    found = find_folder(vectors)

    def look_up(path: Path, source: Path) -> None:
        files.check_results([path], inputs=[source])
        _search.write_contact_sheet(path, "seven", found, [])

    def report(path: Path, source: Path) -> None:
        files.check_results([path], inputs=[source])
        visualize.report(model, [str(source)], path)

    def map_files(path: Path, source: Path) -> None:
        for result in predict.map_each(maps, [str(source)], to=path.parent, top=1):
            if isinstance(result, Exception):
                raise result

    writers: list[tuple[str, Callable[[Path, Path], None], tuple[str, ...]]] = [
        ("predict", map_files, ("photo.png", "photo-overlay.png")),
        ("search", look_up, ("page.html",)),
        ("visualize", report, ("page.html",)),
        ("evaluate", lambda path, _: examined.write(path.parent, predictions=True) and None,
         ("examination.html", "examination.json", "predictions.csv")),
    ]  # fmt: skip
    failed, count = [], 0
    cases = [(command, write, name) for command, write, names in writers for name in names]
    spellings = (("plain", "photo.png"), ("with spaces, ümlauts", "photo.bmp"), ("[1]*?", "photo.gif"))
    for (command, write, name), (kind, (is_written, make)), (folder, source_name) in itertools.product(
        cases, PLACES.items(), spellings
    ):
        if kind == "a device" and os.geteuid():
            continue
        work = tmp_path / str(count) / folder
        (work / "out").mkdir(parents=True)
        source, path = photo(work / source_name), work / "out" / name
        make(path, source)
        before = _snapshot(work)
        reader = threading.Thread(target=path.read_bytes, daemon=True) if kind == "a pipe" else None
        if reader:
            reader.start()
        error: Exception | None = None
        try:
            write(path, source)
        except (OSError, ValueError) as caught:
            error = caught
        after = _snapshot(work)
        changed = {node for node in before if after.get(node) != before[node] and before[node][1] is not None}
        kinds = {node for node in before if node in after and after[node][0] != before[node][0]}
        if changed or kinds or (error is None) != is_written:
            failed.append(f"{command} {name} at {kind} ({folder}): {error!r:.200} {changed or kinds}")
        if reader:
            with contextlib.suppress(OSError):  # the reader, for which this ends the pipe, has ended by itself
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            reader.join(10)
        count += 1
        shutil.rmtree(tmp_path / str(count - 1))
    assert count >= (230 if os.geteuid() else 250) and not failed, (count, failed)
