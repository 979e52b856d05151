"""Rows of many images: each once, with the model's own pixels and numbers, whatever happens on the way."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

import image_kinds
from command_line import fails, run
from keras_vit import batch
from keras_vit.batch import compute, images
from keras_vit.batch.folder import open_folder
from keras_vit.cli import app
from keras_vit.errors import DownloadError
from keras_vit.model.config import Preprocessing
from keras_vit.model.vision_transformer import VisionTransformer
from tiny_models import built

GOOD, BAD = image_kinds.good(), image_kinds.bad()
# Of embeddings of length 1: 2.4e-7 was measured on Intel. The compiled call computes one token of the last block.
TOLERANCE = 2e-6
WORKER = compute.Worker


@functools.cache
def model() -> VisionTransformer:
    return built(num_layers=1, preprocessing=Preprocessing(mean=(0.4, 0.5, 0.6), std=(0.3, 0.2, 0.1)))


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep compiled models from test to test."""
    monkeypatch.setattr(compute, "Worker", _worker)


@functools.cache
def _worker(model: VisionTransformer, **settings: Any) -> compute.Worker:
    return WORKER(model, **settings)


embed = functools.partial(batch.embed, dtype="float32", batch_size=4, rows_per_file=5)


def rows(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder).to_pylist()


def photos(folder: Path, count: int = 13) -> list[str]:
    """Write PNG files in nested folders; return their paths in the order of the rows."""
    paths = []
    for number in range(count):
        path = folder / f"{number // 5}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_kinds.encoded(image_kinds.photo(32, 32, seed=number), "PNG"))
        paths.append(str(path))
    return paths


@functools.cache
def embeddings(count: int = 13) -> np.ndarray:
    """Return what `model.embed` returns for the photos."""
    pixels = [np.asarray(image_kinds.photo(32, 32, seed=number)) for number in range(count)]
    return model().embed(pixels) if count == 13 else embeddings()[:count]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("part-*")}


def test_each_image_of_a_folder_is_one_row_of_what_model_embed_returns(tmp_path: Path) -> None:
    paths = photos(tmp_path / "photos")
    (tmp_path / "photos" / ".hidden.png").write_bytes(b"")
    result = embed(model(), tmp_path / "photos", to=tmp_path / "out")
    assert result == (tmp_path / "out", 13, 0)
    found = pq.read_table(tmp_path / "out")
    assert found.schema.field("embeddings").type == pa.list_(pa.float32(), 32)
    assert found["path"].to_pylist() == paths and found["error"].null_count == 13
    np.testing.assert_allclose(found["embeddings"].to_pylist(), embeddings(len(paths)), rtol=0, atol=TOLERANCE)
    # A pattern of vectors meets nothing else.
    assert all(path.name.startswith("part-") for path in (tmp_path / "out").glob("*.parquet"))


@pytest.mark.full
def test_the_pixels_are_those_of_preprocess_to_the_last_bit(tmp_path: Path) -> None:
    others = {name: image_kinds.encoded(image_kinds.photo(), name) for name in ("BMP", "GIF", "TIFF", "WEBP")}
    kinds = {**GOOD, **BAD, **others}
    files = {name: file if isinstance(file, bytes) else file[0] for name, file in kinds.items()}
    grey = {name: files[name] for name in ("JPEG", "grey PNG", "BMP", *list(BAD)[:6])}  # files are decoded alike
    for chosen, some in ((model(), files), (built(num_layers=1, num_channels=1), grey)):
        photos = tmp_path / str(chosen.config.num_channels)
        photos.mkdir()
        paths = [photos / f"{number:02}.jpg" for number in range(len(some))]
        for path, file in zip(paths, some.values(), strict=True):
            path.write_bytes(file)
        facts = {"source": str(photos), "rows_per_file": 99}
        folder = open_folder(photos / "out", facts, {"working_folder": "/"})
        worker = _worker(chosen, what="embeddings", dtype="float32", output_dtype="float32", batch_size=4)
        batches = list(worker._batches(folder, [0]))
        found = [pair for batch in batches for pair in zip(batch.images, batch.errors, strict=False)]
        bad = []
        for path, name, (pixels, error) in zip(paths, some, found, strict=True):
            try:
                np.testing.assert_array_equal(pixels, chosen.preprocess(path)[0], err_msg=name)
                assert error is None
            except ValueError as reason:
                assert str(reason) == f"{str(path)!r} {error}"
                bad.append(name)
        assert set(BAD) >= set(bad) and len(bad) > 2


def test_what_else_can_be_computed(tmp_path: Path) -> None:
    paths = photos(tmp_path / "photos", 3)
    prepared = model().preprocess(paths)
    logits = model()(prepared).numpy()
    features = model().features(prepared, ["pre_logits"])["pre_logits"]
    wanted = {"features": features, "logits": logits, "probabilities": tf.nn.softmax(logits)}
    for what, want in wanted.items():
        embed(model(), tmp_path / "photos", to=tmp_path / what, what=what, output_dtype="float16")
        assert pq.read_table(tmp_path / what).schema.field(what).type.value_type == pa.float16()
        # Rounded to float16: 2 ** -11.
        np.testing.assert_allclose([row[what] for row in rows(tmp_path / what)], want, rtol=1e-3, atol=1e-3)
    embed(model(), tmp_path / "photos", to=tmp_path / "classes", what="classes")
    best, found = model().decode_predictions(logits, top=1), rows(tmp_path / "classes")
    assert [(row["label_id"], row["label"]) for row in found] == [each[0][:2] for each in best]
    np.testing.assert_allclose([row["probability"] for row in found], [each[0][2] for each in best], rtol=1e-5)


def test_a_stopped_run_goes_on_with_the_same_bytes_and_no_image_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = photos(tmp_path / "photos")
    embed(model(), tmp_path / "photos", to=tmp_path / "whole")
    compute_rows, calls = WORKER._rows, []

    def stop(self: compute.Worker, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 4:  # in the second file
            raise KeyboardInterrupt
        return compute_rows(self, batch)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(WORKER, "_rows", stop)
        embed(model(), tmp_path / "photos", to=tmp_path / "out")
    (first,) = (tmp_path / "out").glob("part-*")
    written = first.stat().st_mtime_ns
    Path(paths[-1]).with_name("00-added-later.png").write_bytes(Path(paths[0]).read_bytes())
    monkeypatch.chdir(tmp_path / "photos")
    with pytest.warns(UserWarning, match="1 added, 0 removed, such as .*00-added-later.png. Its run goes on with"):
        assert embed(model(), tmp_path / "photos", to="../out").rows == 13
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert first.stat().st_mtime_ns == written
    assert not list((tmp_path / "out").glob(".*.partial"))


def test_what_changed_is_computed_again_and_what_is_gone_is_kept(tmp_path: Path) -> None:
    paths = [Path(path) for path in photos(tmp_path / "photos")]
    sources, out = [tmp_path / "photos" / str(number) for number in range(3)], tmp_path / "out"
    embed(model(), sources, to=out)
    assert [row["path"] for row in rows(out)] == list(map(str, paths))
    before, time = contents(out), paths[0].stat().st_mtime_ns
    paths[0].write_bytes(paths[1].read_bytes().ljust(paths[0].stat().st_size, b"\0"))
    os.utime(paths[0], ns=(time, time))
    with pytest.warns(UserWarning, match="computed again: 1, such as part-00000-of-00003.parquet"):
        embed(model(), sources, to=out)
    assert rows(out)[0]["embeddings"] == rows(out)[1]["embeddings"]
    assert [contents(out)[name] == file for name, file in before.items()] == [False, True, True]
    paths[0].unlink()
    with pytest.raises(ValueError, match=r"0 added, 1 removed, such as .*png. Its run is finished: embed into a new"):
        embed(model(), sources, to=out)
    (out / "part-00002-of-00003.parquet").unlink()
    with pytest.warns(UserWarning, match="goes on with the images of the list"):
        assert embed(model(), sources, to=out) == (out, 13, 0)  # with the vector of the image that is gone


def test_a_folder_keeps_its_rows_per_file_unless_others_are_stated(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    embed(model(), tmp_path / "photos", to=tmp_path / "out", rows_per_file=6)
    assert embed(model(), tmp_path / "photos", to=tmp_path / "out", rows_per_file=None).rows == 13
    with pytest.raises(ValueError, match="rows_per_file was 6 and is now 7"):
        embed(model(), tmp_path / "photos", to=tmp_path / "out", rows_per_file=7)
    embed(model(), tmp_path / "photos", to=tmp_path / "others", rows_per_file=None)
    assert json.loads((tmp_path / "others" / "_run.json").read_text())["rows_per_file"] == 4096


def test_a_list_in_another_order_is_told_from_other_images(tmp_path: Path) -> None:
    paths = photos(tmp_path / "photos")
    source = _list_of_paths(tmp_path, paths)
    embed(model(), source, to=tmp_path / "out")
    _list_of_paths(tmp_path, paths[::-1])
    with pytest.raises(ValueError, match="the same images in another order. Its run is finished"):
        embed(model(), source, to=tmp_path / "out")


def test_shards_share_the_work_and_another_run_is_refused(tmp_path: Path) -> None:
    paths = photos(tmp_path / "photos")
    parts = []
    for number in range(2):
        embed(model(), tmp_path / "photos", to=tmp_path / "out", shard=f"{number}/2")
        parts.append(len(contents(tmp_path / "out")))
    assert parts == [2, 3]
    assert [row["path"] for row in rows(tmp_path / "out")] == paths
    other = built(num_layers=1, num_classes=3)
    with pytest.raises(ValueError, match=r"another run: what was 'embeddings' and is now 'logits'; weights was"):
        embed(other, tmp_path / "photos", to=tmp_path / "out", what="logits")


def _list_of_paths(folder: Path, paths: list[str]) -> str:
    (folder / "list.txt").write_text("\n".join(paths) + "\n\n")
    return str(folder / "list.txt")


def _parquet_of_urls(folder: Path, paths: list[str]) -> str:
    for path in paths:
        with fsspec.open(f"memory://bucket/{Path(path).name}", "wb") as file:
            file.write(Path(path).read_bytes())
    urls = [f"memory://bucket/{Path(path).name}" for path in paths]
    pq.write_table(pa.table({"id": range(len(urls)), "url": urls}), folder / "list.parquet")
    return str(folder / "list.parquet")


def _records(paths: list[str]) -> list[bytes]:
    """Return records: the first are files, the others Examples."""
    files = [Path(path).read_bytes() for path in paths]
    examples = []
    for file in files:
        feature = {"image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[file]))}
        examples.append(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return [*files[:4], *examples[4:]]


def _tfrecords(folder: Path, paths: list[str]) -> str:
    with tf.io.TFRecordWriter(str(folder / "a.tfrecord-00000-of-00001")) as writer:
        for record in _records(paths):
            writer.write(record)
    return str(folder / "*.tfrecord*")


def _array_records(folder: Path, paths: list[str]) -> str:
    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for record in _records(paths):
        writer.write(record)
    writer.close()
    return str(folder / "a.array_record")


SOURCES = {
    "list": _list_of_paths,
    "Parquet of URLs": _parquet_of_urls,
    "folder of URLs": lambda folder, paths: _parquet_of_urls(folder, paths) and "memory://bucket",
    "pattern": lambda folder, paths: str(folder / "photos" / "*" / "*.png"),
    "TFRecord": _tfrecords,
    "ArrayRecord": _array_records,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_images_come_from(kind: str, tmp_path: Path) -> None:
    paths = photos(tmp_path / "photos", 6)
    embed(model(), SOURCES[kind](tmp_path, paths), to=tmp_path / "out")
    found = rows(tmp_path / "out")
    assert [row["error"] for row in found] == [None] * 6
    np.testing.assert_allclose([row["embeddings"] for row in found], embeddings(len(paths)), rtol=0, atol=TOLERANCE)
    if "Record" in kind:
        assert [row["path"].rpartition("#")[2] for row in found] == list(map(str, range(6)))


def test_a_damaged_file_of_records_says_where(tmp_path: Path) -> None:
    paths = photos(tmp_path / "photos", 6)
    _tfrecords(tmp_path, paths)
    (file,) = tmp_path.glob("a.tfrecord*")
    whole = file.read_bytes()
    # 2**40 has a valid checksum.
    lengths = [
        bytes.fromhex(f"{length}61626300000000")
        for length in ("0000000000010000aa3d6be6", "00000000100000000000000000")
    ]
    for number, (content, place, said) in enumerate(
        [
            (whole[:-300], 5, "all after it cannot be read"),
            *((whole + length, 6, "record 6 states a length of") for length in lengths),
        ]
    ):
        file.write_bytes(content)
        assert embed(model(), str(file), to=tmp_path / f"{number}").errors == 1
        *good, last = rows(tmp_path / f"{number}")
        assert {row["error"] for row in good} == {None}
        assert last["path"] == f"{file}#{place}" and said in last["error"]


def test_files_without_an_end_and_files_too_large_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, *_ = photos(tmp_path, 1)
    for name in ("pipe.png", "pipe.tfrecord", "pipe.txt"):
        os.mkfifo(tmp_path / name)
    with (tmp_path / "sparse.png").open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        file.truncate(40 << 30)
    with fsspec.open("memory://long/body.png", "wb") as file:
        file.write(bytes(5000))
    monkeypatch.chdir(tmp_path)
    wanted = {
        **dict.fromkeys(["pipe.png", "pipe.tfrecord", "/dev/zero", "file:///dev/zero"], "not a regular file"),
        **{"sparse.png": "42,949,672,960 bytes", "/proc/kmsg": "empty", "memory://long/body.png": "5,000 bytes"},
    }
    source = _list_of_paths(tmp_path, [good, *wanted])
    assert embed(model(), source, to=tmp_path / "out", max_bytes=4000) == (tmp_path / "out", 8, 7)
    [first, *errors] = [row["error"] for row in rows(tmp_path / "out")]
    assert first is None
    assert not [(name, error) for (name, want), error in zip(wanted.items(), errors, strict=True) if want not in error]
    for name in ("sparse.png", "file:///dev/zero"):
        with pytest.raises(ValueError, match="at most 200,000,000|not a regular file"):
            model().preprocess(name)
    with pytest.raises(ValueError, match="not a regular file"):
        embed(model(), "pipe.txt", to="other")


def test_what_is_left_out_of_a_folder_is_counted_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos(tmp_path / "photos", 1)
    monkeypatch.chdir(tmp_path / "photos")
    Path("linked").symlink_to(tmp_path, target_is_directory=True)
    Path("broken.png").symlink_to("nothing.png")
    Path("d.png").mkdir()
    os.mkfifo("pipe.png")
    for source, others in ((".", ["linked"]), ("*", [])):
        named = ["broken.png", "d.png", "pipe.png", *others]
        with pytest.warns(UserWarning, match=rf"Left out: {len(named)} \(.*pipe.png.*\)") as found:
            assert embed(model(), source, to=tmp_path / f"out{len(named)}").rows == 1
        assert len(found) == 1 and all(name in str(found[0].message) for name in named)
        Path("linked").unlink(missing_ok=True)  # links to folders that a pattern matches are read


class StatusError(Exception):
    """An answer of a web server, as packages for HTTP raise it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def test_an_outage_ends_the_run_and_leaves_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _parquet_of_urls(tmp_path, photos(tmp_path, 6))
    monkeypatch.setattr(images, "PAUSE", 0)
    hidden = OSError("x")
    hidden.__context__ = TimeoutError("no answer")
    missing: list[tuple[Exception, Exception | None]] = [
        (ConnectionRefusedError("refused"), None),
        (FileNotFoundError("x"), StatusError(503)),
        (FileNotFoundError("x"), hidden),
    ]
    for error, cause in missing:
        error.__cause__ = cause
        with monkeypatch.context() as patched, pytest.raises(DownloadError, match="Run the same command"):
            patched.setattr(MemoryFileSystem, "_open", _raising(error))
            embed(model(), source, to=tmp_path / "out")
        assert not contents(tmp_path / "out")
    assert embed(model(), source, to=tmp_path / "out") == (tmp_path / "out", 6, 0)


def test_missing_and_damaged_bodies_are_rows_that_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _parquet_of_urls(tmp_path, photos(tmp_path, 6))
    for number, (error, status) in enumerate([(FileNotFoundError("x"), 404), (zipfile.BadZipFile("no zip"), 0)]):
        error.__cause__ = StatusError(status) if status else None
        with monkeypatch.context() as patched:
            patched.setattr(MemoryFileSystem, "_open", _raising(error))
            assert embed(model(), source, to=tmp_path / f"{number}").errors == 6
        assert embed(model(), source, to=tmp_path / f"{number}").errors == 6
        assert embed(model(), source, to=tmp_path / f"{number}", retry_errors=True).errors == 0


def test_a_damaged_folder_of_rows_is_an_error(tmp_path: Path) -> None:
    photos(tmp_path / "photos", 2)
    out = tmp_path / "out"
    embed(model(), tmp_path / "photos", to=out)
    shutil.copytree(out, tmp_path / "whole")
    record = json.loads((out / "_run.json").read_text())
    fields = ({"files": -4}, {"files": 10**12}, {"images": 3}, {"working_folder": 3})
    for text in ("{", "[]", "null", "[" * 100_000, *(json.dumps({**record, **field}) for field in fields)):
        (out / "_run.json").write_text(text)
        with pytest.raises(ValueError, match="_run.json or _images.listing is damaged.*Choose a new folder"):
            embed(model(), tmp_path / "photos", to=out)
    for name in ("part-00000-of-00001.parquet", "part-00007-of-00009.parquet", "_images.listing"):
        foreign = pa.table({"x": [1, 2]}).slice(0, 0 if name.startswith("_") else 2)
        for kind in ("truncated", "foreign"):
            shutil.copytree(tmp_path / "whole", out := tmp_path / f"{name} {kind}")
            if kind == "truncated":
                (out / name).write_bytes(b"PAR1 and no more")
            else:
                pq.write_table(foreign, out / name)
            with pytest.raises(ValueError, match=rf"{name} is .*(Move|move|Choose)"):
                embed(model(), tmp_path / "photos", to=out)


def test_lists_begin_with_a_mark_and_have_no_nulls(tmp_path: Path) -> None:
    (path,) = photos(tmp_path, 1)
    (tmp_path / "marked.txt").write_text(path, encoding="utf-8-sig")
    assert embed(model(), str(tmp_path / "marked.txt"), to=tmp_path / "out").errors == 0
    (tmp_path / "null.txt").write_text(f"{path}\na\0b")
    pq.write_table(pa.table({"path": [path, None]}), tmp_path / "null.parquet")
    for name, message in (("null.txt", "line 2 has a null character"), ("null.parquet", "has null in place of a path")):
        with pytest.raises(ValueError, match=message):
            embed(model(), str(tmp_path / name), to=tmp_path / "none")
        assert not (tmp_path / "none").exists()


def test_what_fails_beside_the_images_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _list_of_paths(tmp_path, [*photos(tmp_path / "photos", 2), "memory://bucket/a.png"])
    with monkeypatch.context() as patched, pytest.raises(ImportError, match="Install s3fs"):
        patched.setattr(fsspec, "get_filesystem_class", _raising(ImportError("Install s3fs")))
        embed(model(), source, to=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left on device: '.*out/_images.list"):
        patched.setattr(os, "fsync", _raising(full))
        embed(model(), tmp_path / "photos", to=tmp_path / "out")
    monkeypatch.setattr(images, "read_file", _raising(MemoryError("too small for an image")))
    assert embed(model(), tmp_path / "photos", to=tmp_path / "other").errors == 2


def _raising(error: Exception) -> Callable[..., Any]:
    """Return what raises an error: a function, as Python 3.13 warns of a partial in place of a method."""

    def function(*_: object, **__: object) -> Any:
        raise error

    return function


def test_a_missing_image_is_a_row_but_unreadable_ones_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _list_of_paths(tmp_path, ["gone.png", *photos(tmp_path, 1)])
    assert embed(model(), source, to=tmp_path / "out") == (tmp_path / "out", 2, 1)
    assert rows(tmp_path / "out")[0]["embeddings"] is None and "gone.png" in rows(tmp_path / "out")[0]["error"]
    (tmp_path / "names.txt").write_bytes(b"memory://\xff.png\n")  # no valid Unicode
    embed(model(), tmp_path / "names.txt", to=tmp_path / "names")
    assert [row["error"] for row in rows(tmp_path / "names")] == ["/\\udcff.png"]
    monkeypatch.setattr(images, "read_file", _raising(PermissionError("no access")))
    with pytest.raises(PermissionError, match="no access"):
        embed(model(), source, to=tmp_path / "other", batch_size=2)
    assert not contents(tmp_path / "other")


def test_a_row_that_is_not_finite_has_an_error(tmp_path: Path) -> None:
    photos(tmp_path / "photos", 2)
    large = built(num_layers=1)
    large.get_layer("head").bias.assign([1e6, 0, 0, 0, 0])
    embed(large, tmp_path / "photos", to=tmp_path / "out", what="logits", output_dtype="float16")
    assert {row["error"] for row in rows(tmp_path / "out")} == {"The model's output is not finite in float16"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"what": "labels"}, "what must be one of.*embeddings"),
    ({"shard": "2/2"}, "from 0 to n - 1"),
    ({"engine": "spark"}, "engine must be one of"),
    ({"rows_per_file": 0}, "rows_per_file must be an integer >= 1"),
    ({"dtype": "float64"}, "dtype must be one of"),
    ({"source": ""}, "source must be a path"),
    ({"source": []}, "source must be a path or a list of paths"),
    ({"to": ""}, "to must be a path"),
    ({"to": "s3://bucket/rows"}, "to must be a folder of this machine.*s3://bucket/rows"),
    ({"source": "empty"}, "has no images"),
    ({"source": "nothing.txt"}, "nothing.txt"),
    ({"model": {"num_classes": 0}, "what": "classes"}, "needs a model with a head"),
    ({"model": {"classifier": "unpooled"}}, "needs a pooled feature"),
    ({"model": {"num_channels": 5}}, "5 channels"),
    ({"to": ".", "source": "seven.png"}, "has Parquet files"),
]


def test_wrong_input_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for name in ("part-1.parquet", "seven.png"):
        Path(name).write_bytes(b"")
    for changes, message in WRONG:
        chosen = built(num_layers=1, **changes["model"]) if "model" in changes else model()
        arguments = {"to": "out", "source": "empty", **changes, "model": chosen}
        with pytest.raises((ValueError, OSError), match=message):
            batch.embed(arguments.pop("model"), arguments.pop("source"), **arguments)
        assert not Path("out").exists() and not Path("s3:").exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "keras_vit.batch._embed")
    monkeypatch.delitem(vars(batch), "embed", raising=False)  # kept there by an earlier use
    with pytest.raises(ImportError, match=r"needs the package pyarrow: pip install \"keras-vit-zoo\[batch\]\""):
        batch.embed  # noqa: B018


@pytest.mark.full
def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos(tmp_path / "photos", 2)

    def stop(self: compute.Worker, batch: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(WORKER, "_rows", stop)
    line = ["embed", "digits", str(tmp_path / "photos"), "--to", str(tmp_path / "out"), "--dtype", "float32"]
    ended = CliRunner().invoke(app, line)
    assert ended.exit_code == 130
    assert f"Stopped. The same command goes on in {tmp_path / 'out'}" in ended.stderr


def test_an_int8_run_warns_of_nothing_that_its_file_is_not_for(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="keras_vit: MediaPipe")
        batch.embed(model(), tmp_path / "photos", to=tmp_path / "out", dtype="int8")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", 2)
    Path("photos", "0", "bad.png").write_bytes(b"no image")
    line = ["embed", "digits", "photos", "--to", "out", "--what", "classes", "--json"]
    assert json.loads(run(*line)) == {"path": str(tmp_path / "out"), "rows": 3, "errors": 1}
    assert "what was 'classes'" in fails(monkeypatch, *line[:5], "--what", "logits")
    Path("bad.txt").write_text("photos/0/bad.png")
    message = fails(monkeypatch, "embed", "digits", "bad.txt", "--to", "none")
    assert "none of the 1 images could be read. The first: photos/0/bad.png is not an image of a known fo" in message
