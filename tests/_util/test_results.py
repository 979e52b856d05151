"""No command replaces what it has not written: inputs, other people's files, links, devices, pipes."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from command_line import fails, run
from keras_vit import batch, converters, dense, digits, export, text, train, visualize, zoo
from keras_vit._util import downloads, files
from keras_vit.batch import _search
from keras_vit.batch.folder import find_folder
from keras_vit.cli import app, predict
from keras_vit.errors import CheckpointError
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.train.checkpoints import RUN_FILES
from keras_vit.train.data import folder_source
from keras_vit.visualize import report_page
from marks import full_except
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
        file.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "masks" / "a.png", pnginfo=None)
    mended = (tmp_path / "masks" / "a.png").read_bytes()
    with pytest.raises(FileExistsError, match="or was changed since"):
        list(predict.map_each(maps, files_, to=tmp_path / "masks", top=1))
    assert (tmp_path / "masks" / "a.png").read_bytes() == mended
    (tmp_path / "masks" / "a.png").unlink()
    list(predict.map_each(maps, files_, to=tmp_path / "masks", top=1))
    with Image.open(tmp_path / "masks" / "a.png") as file:
        np.testing.assert_array_equal(np.asarray(file), maps.predict_maps(files_[0])[0])
    overlay = str(photo(tmp_path / "a-overlay.png"))
    with pytest.raises(ValueError, match=r"different names. Several would be a-overlay\.png"):
        list(predict.map_each(maps, [files_[0], overlay], to=tmp_path / "others", top=1))
    assert not (tmp_path / "others").exists()


def test_an_overlay_leaves_the_background_as_it_is(tmp_path: Path) -> None:
    keras.utils.set_random_seed(1)  # both classes occur
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
        (tmp_path / "file", "must be a folder"),
        (tmp_path / "mine", "not written by keras-vit"),
    ):
        assert message in fails(monkeypatch, "evaluate", "digits", "--data", "digits", "--out", out)
    assert (tmp_path / "mine" / "examination.json").read_bytes() == JSON
    result = CliRunner().invoke(app, ["evaluate", "digits", "--data", "digits", "--out", ""])
    assert result.exit_code == 2 and "a folder needs a name" in result.output


def test_a_tokenizer_and_its_model_are_two_files(tmp_path: Path) -> None:
    encoder = zoo.text_encoder("digits")
    with pytest.raises(ValueError, match="the tokenizer's file"):
        text.tflite(encoder, tmp_path / encoder.tokenizer.file_name)
    assert not list(tmp_path.iterdir())


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


# Command line -> the file at stake. {source} is a checkpoint, {mine} somebody's file, {link} a link to the source.
REFUSED = {
    "resize an input": ("resize {source} {source} 48", "source", "would replace an input"),
    "resize through a link": ("resize {source} {link} 48", "source", "would replace an input"),
    "resize through another spelling": ("resize {source} {other} 48", "source", "would replace an input"),
    "resize over a file": ("resize {source} {mine} 48", "mine", "not written by keras-vit"),
    "convert an input": ("convert {source} {source} --to google", "source", "would replace an input"),
    "convert over a file": ("convert {source} {mine} --to google", "mine", "not written by keras-vit"),
    "export over a file": ("export {source} --to {tflite}", "tflite", "not written by keras-vit"),
}


@pytest.mark.parametrize("name", full_except(["resize an input", "convert over a file", "export over a file"], REFUSED))
def test_files_of_weights_and_exports_are_never_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, at_stake, message = REFUSED[name]
    (tmp_path / "folder").mkdir()
    paths = {
        "source": converters.save(zoo.load("digits"), tmp_path / "source.npz", format="google"),
        "mine": tmp_path / "mine.npz",
        "tflite": tmp_path / "mine.tflite",
        "link": tmp_path / "link.npz",
        "other": tmp_path / "folder" / ".." / "source.npz",
    }
    paths["link"].symlink_to(paths["source"])
    _write(paths["mine"], HAND_MADE)
    _write(paths["tflite"], HAND_MADE)
    before = paths[at_stake].read_bytes()
    assert message in fails(monkeypatch, *command.format(**paths).split())
    assert paths[at_stake].read_bytes() == before
    assert not list(tmp_path.glob(".*partial"))


def test_an_unchanged_checkpoint_or_export_is_replaced_and_a_changed_one_is_not(tmp_path: Path) -> None:
    model = zoo.load("digits")
    writers: dict[str, Callable[[Path], Any]] = {
        "a.npz": lambda path: converters.save(model, path, format="google"),
        "folder/model.safetensors": lambda path: converters.save(model, path.parent, format="huggingface"),
        "a.tflite": lambda path: export.tflite(model, path, quantize="float16"),
        "text.tflite": lambda path: text.tflite(zoo.text_encoder("digits"), path),
    }
    for name, write in writers.items():
        path = tmp_path / name
        for _ in range(2):
            write(path)
        content = path.read_bytes()
        path.write_bytes(content + b"\0")
        with pytest.raises(FileExistsError, match="or was changed since"):
            write(path)
        assert path.read_bytes() == content + b"\0"
    config = tmp_path / "folder" / "config.json"
    (tmp_path / "folder" / "model.safetensors").unlink()
    config.write_text(config.read_text().replace("keras_vit", "keras_vit "))
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        converters.save(model, tmp_path / "folder", format="huggingface")


def test_a_result_whose_note_was_not_written_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "record_results", killed)
    path = tmp_path / "page.html"
    with pytest.raises(KeyboardInterrupt):
        _written(path, HAND_MADE)
    monkeypatch.undo()
    with pytest.raises(FileExistsError):
        files.check_results([path])
    files.record_results(path)
    files.check_results([path])
    moved = path.rename(tmp_path / "moved.html")
    with pytest.raises(FileExistsError):
        files.check_results([moved])


# ---- training runs


def tiny_run(out: Path, data: Any) -> train.Result:
    recipe = train.recipe(
        "digits", steps=2, batch_size=4, optimizer="sgd", xla=False, image_size=16, checkpoint_steps=1
    )
    return train.run(recipe, model=tiny(image_size=16), data=data, out=out, progress=False)


def two_classes(folder: Path) -> Path:
    for number in range(8):
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        photo(place / f"{number}.png", number)
    return folder


@pytest.mark.parametrize("name", RUN_FILES)
def test_training_refuses_a_folder_with_files_of_its_names_and_no_checkpoints(name: str, tmp_path: Path) -> None:
    _write(tmp_path / name, HAND_MADE)
    _write(tmp_path / "notes.txt", HAND_MADE)
    with pytest.raises(FileExistsError, match=f"The folder has {name} and no checkpoint of a run"):
        tiny_run(tmp_path, "digits")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(
        [name, "notes.txt"], HAND_MADE
    )


@pytest.mark.filterwarnings("ignore:.*too few images for an evaluation split")
@pytest.mark.full
def test_a_finished_run_without_its_checkpoints_is_not_trained_over(tmp_path: Path) -> None:
    data, out = two_classes(tmp_path / "data"), tmp_path / "run"
    out.mkdir()
    _write(out / "notes.txt", HAND_MADE)  # other files may be there
    assert tiny_run(out, str(data)).steps == 2
    assert tiny_run(out, str(data)).steps == 2  # finished: nothing is trained
    model = (out / "model.keras").read_bytes()
    shutil.rmtree(out / "checkpoints")
    for _ in range(2):
        with pytest.raises(FileExistsError, match="model.keras, .*log.jsonl"):
            tiny_run(out, str(data))
        (out / "checkpoints").mkdir(exist_ok=True)  # empty: as of a run that died before its first checkpoint
        (out / "log.jsonl").unlink(missing_ok=True)
        with pytest.raises(FileExistsError, match="has model.keras and no checkpoint"):
            tiny_run(out, str(data))
        shutil.rmtree(out / "checkpoints")
        _write(out / "log.jsonl", b"")
    assert (out / "model.keras").read_bytes() == model


@pytest.mark.full
def test_a_run_that_died_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("log.jsonl", "best.json"):
        _write(tmp_path / name, b"")
    assert tiny_run(tmp_path, "digits").steps == 2


def test_folders_of_runs_are_not_listed_as_classes(tmp_path: Path) -> None:
    two_classes(tmp_path)
    for run_folder in ("run", "runs/first"):
        (tmp_path / run_folder / "checkpoints").mkdir(parents=True)
        _write(tmp_path / run_folder / "log.jsonl", b"{}")
    (tmp_path / "a" / "checkpoints").mkdir()  # without a log: somebody's own
    assert folder_source.subfolders(str(tmp_path)) == ["a", "b"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*too few images for an evaluation split")
def test_the_folder_of_a_run_is_no_class(tmp_path: Path) -> None:
    data = two_classes(tmp_path)
    for out, others in (("run", ""), ("run", "run"), ("runs/first", "run"), ("runs/second", "run, runs")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert tiny_run(data / out, str(data)).model.config.labels == ("a", "b")
        said = [str(warning.message).partition("hold training runs: ")[2] for warning in caught]
        assert [text for text in said if text] == [others] * bool(others)


# ---- no home directory


def test_without_a_home_directory_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    for name in ("KERAS_VIT_CACHE", "KERAS_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="set KERAS_VIT_CACHE to a folder"):
        files.cache_folder()
    for wrong in (
        lambda: files.image_files(["~/a.png"]),
        lambda: files.read_file("~/a.png"),
        lambda: downloads.fetch("~/a.npz"),
        lambda: train.evaluate(zoo.load("digits"), "~/data"),
        lambda: batch.search("~/vectors", np.ones((1, 4), np.float32)),
    ):
        with pytest.raises(ValueError, match="no home directory: give the whole path, or set HOME"):
            wrong()


# ---- every kind of place for every result

Make = Callable[[Path, Path], None]  # of a path, and of an input


def _linked(path: Path, target: Path, content: bytes | None = None) -> None:
    if content is not None:
        target.write_bytes(content)
    path.symlink_to(target)


def _written(path: Path, content: bytes, later: bytes | None = None) -> None:
    with files.writing_result(path) as file:
        file.write(content)
    if later is not None:
        path.write_bytes(later)


PLACES: dict[str, tuple[bool, Make]] = {  # whether a result may be written, and what is there
    "nothing": (True, lambda path, _: None),
    "an empty file": (True, lambda path, _: path.write_bytes(b"") and None),
    "somebody's file": (False, lambda path, _: path.write_bytes(HAND_MADE) and None),
    "an earlier result": (True, lambda path, _: _written(path, HAND_MADE)),
    "an earlier result, changed by hand": (False, lambda path, _: _written(path, HAND_MADE, b"mended by hand")),
    "a page that mentions keras-vit": (False, lambda path, _: path.write_bytes(b"<p>keras-vit</p>") and None),
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
        may_change = {str(path)} if is_written else set()
        changed = {
            node for node in before
            if node not in may_change and after.get(node) != before[node] and before[node][1] is not None
        }  # fmt: skip
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
