"""Folders of a user's own pictures: which of them are read, for training, evaluation and on the command line."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from command_line import fails
from keras_vit import train
from keras_vit.model.images import decode_image
from keras_vit.train.data import sources
from keras_vit.train.data.split import RandomAccess, Split
from picture_folders import fill, picture
from tiny_models import built

pytestmark = pytest.mark.filterwarnings("default:.*:UserWarning")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))


def files(split: Split | None) -> list[str]:
    assert isinstance(split, RandomAccess)
    return ["/".join(split.name_of(number).split("/")[-2:]) for number in range(split.count)]


# What is evaluated


DIVIDED = {"train": {"ant": 6, "bee": 5}, "val": {"ant": 2, "bee": 1}, "test": {"bee": 4}}
PARTS = {  # (the part that is asked for, the part that is measured): number of images
    (None, "val"): 3,
    ("val", "val"): 3,
    ("validation", "val"): 3,
    ("VAL/", "val"): 3,
    ("held-out", "val"): 3,
    ("test", "test"): 4,
    ("train", "train"): 11,
    ("all", "all"): 18,
    ("ALL", "all"): 18,
}


@pytest.mark.full
def test_a_part_of_a_divided_folder_is_chosen_by_name(tmp_path: Path) -> None:
    for split, classes in DIVIDED.items():
        fill(tmp_path / split, **classes)
    for (asked, part), count in PARTS.items():
        data = sources.open_data(tmp_path, eval_split=asked, training=False)
        assert data.evaluation and (data.train, data.eval_split, data.evaluation.count) == (None, part, count), asked
        assert data.class_names == ("ant", "bee")
        labels = [int(each["label"]) for each in data.evaluation.iterate_once()]
        assert labels == [int(file.startswith("bee/")) for file in files(data.evaluation)], asked
    data = sources.open_data(tmp_path, train_split="all")
    assert len(files(data.train)) == 18 and data.evaluation is None


def test_the_tenth_that_training_holds_out_can_be_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, cat=40, dog=40)
    with pytest.warns(UserWarning, match="choose the split 'held-out'"):
        trained_on = sources.open_data(tmp_path)
    for word in ("held-out", "Held Out", "holdout"):
        opened = sources.open_data(tmp_path, eval_split=word, training=False)
        assert files(opened.evaluation) == files(trained_on.evaluation)
    rest = sources.open_data(tmp_path, eval_split="train", training=False)
    assert files(rest.evaluation) == files(trained_on.train) and rest.eval_split == "all but held-out"
    assert len(files(rest.evaluation)) + len(files(opened.evaluation)) == 80
    message = fails(monkeypatch, "evaluate", "digits", "--data", tmp_path, "--split", "half")
    assert "no split 'half'" in message and "all, held-out, train" in message


def test_a_class_whose_images_would_all_be_held_out_is_trained_on(tmp_path: Path) -> None:
    fill(tmp_path, owl=40, dog=40)
    with pytest.warns(UserWarning, match="held-out"):
        evaluated = files(sources.open_data(tmp_path).evaluation)
    held_out = next(name for name in evaluated if name.startswith("dog/"))
    assert any(name.startswith("owl/") for name in evaluated)
    for name in (tmp_path / "dog").iterdir():
        if name.name != held_out.partition("/")[2]:
            name.unlink()
    with pytest.warns(UserWarning, match="held-out"):
        data = sources.open_data(tmp_path)
    again = sources.open_data(tmp_path, eval_split="held-out", training=False)
    assert held_out in files(data.train)
    assert held_out not in files(data.evaluation) and files(again.evaluation) == files(data.evaluation)


def test_a_class_of_which_no_picture_can_be_read_is_not_learned(tmp_path: Path) -> None:
    fill(tmp_path / "photos", cat=12, dog=12)
    for path in (tmp_path / "photos" / "dog").iterdir():
        path.write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"at least two classes that occur\. .* images cannot be read\. .*'cat'"):
        train.run("linear-probe", model="digits", data=tmp_path / "photos", changes={"layers": 1}, progress=False)


# What is read


# Name, format, and options of Pillow
FORMATS: list[tuple[str, str, dict[str, Any]]] = [
    ("a.webp", "WEBP", {"lossless": True}),
    ("a.GIF", "GIF", {}),
    ("a.bmp", "BMP", {}),
    ("a.tiff", "TIFF", {}),
    ("webp.jpg", "WEBP", {"lossless": True}),  # as downloaded from many pages
    ("jpeg.png", "JPEG", {}),
]


def test_pictures_of_other_formats_are_read_as_pillow_reads_them(tmp_path: Path) -> None:
    fill(tmp_path / "train", cat=1)
    for name, kind, options in FORMATS:
        (tmp_path / "train" / "cat" / name).write_bytes(picture(kind, **options))
    data = sources.open_data(tmp_path, train_split="train")
    assert data.train
    read = {files(data.train)[int(each["index"])]: each["image"].numpy() for each in data.train.iterate_once()}
    assert read.keys() == {"cat/0.png", *(f"cat/{name}" for name, _, _ in FORMATS)}
    for name, content in read.items():
        with Image.open(tmp_path / "train" / name) as image:
            np.testing.assert_array_equal(decode_image(content), np.asarray(image.convert("RGB")), err_msg=name)


def test_files_that_are_not_read_are_counted_and_named(tmp_path: Path) -> None:
    folder = fill(tmp_path / "photos", cat=12, dog=12)
    for hidden in ("cat/.DS_Store", "cat/._0.png", "dog/Thumbs.db"):
        (folder / hidden).write_bytes(b"x")
    for name in ("cat/a.heic", "cat/b.HEIC", "dog/list.txt", "dog/README", "dog/kittens/c.png", "beside.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(picture())
    (folder / "notes.txt").write_text("no class folder holds it")
    with pytest.warns(UserWarning, match="that are not read: 6 ") as caught:
        evaluated = train.evaluate(built(num_classes=2), folder)
    said = str(caught[0].message)
    assert all(part in said for part in (".heic: 2", ".txt: 1", "no suffix: 1", "folder: 1", "cat/b.HEIC"))
    assert (evaluated.count, evaluated.unread) == (24, 6) and "6 other files or folders" in str(evaluated)
    with pytest.raises(ValueError, match="photos has no image in this part"):
        train.evaluate(built(num_classes=2), folder, split="held-out")


def test_pictures_that_may_be_transparent_are_counted_and_named(tmp_path: Path) -> None:
    fill(tmp_path, ant=2, bee=2)
    for mode in ("RGBA", "LA", "RGB", "L"):
        Image.new(mode, (9, 7)).save(tmp_path / "bee" / f"{mode}.png")
    Image.new("P", (9, 7)).save(tmp_path / "bee" / "clear.PNG", transparency=0)
    with pytest.warns(UserWarning, match=r"3 PNG files may be transparent: bee/LA.png, bee/RGBA.png, bee/clear.PNG"):
        sources.open_data(tmp_path, eval_split="all", training=False)


def test_a_class_folder_may_be_a_link(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", cat=2)
    fill(tmp_path / "photos", dog=2)
    (tmp_path / "photos" / "cat").symlink_to(tmp_path / "elsewhere" / "cat")
    (tmp_path / "photos" / "dog" / "link.png").symlink_to(tmp_path / "elsewhere" / "cat" / "0.png")
    data = sources.open_data(tmp_path / "photos", training=False)
    assert data.class_names == ("cat", "dog")
    assert files(data.evaluation) == ["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png", "dog/link.png"]


def test_pipes_devices_and_sockets_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "train", cat=2)
    monkeypatch.chdir(folder / "cat")  # the path of a socket is short
    os.mkfifo("pipe.png")
    Path("zero.png").symlink_to("/dev/zero")
    Path("broken.jpg").symlink_to("nowhere")
    Path("itself.jpg").symlink_to("itself.jpg")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.png")
    with pytest.warns(UserWarning, match=r"in .* that are not read: 5 .*cat/broken.jpg \(no file\)"):
        data = sources.open_data(tmp_path, train_split="train")
    assert data.train and files(data.train) == ["cat/0.png", "cat/1.png"]


def test_file_names_that_are_no_utf8_are_read_and_names_of_classes_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    fill(folder / "train", cat=1)
    for name, content in ((b"caf\xe9.png", picture()), (b"bad\xff.png", picture()[:50])):
        (folder / "train" / "cat" / os.fsdecode(name)).write_bytes(content)
    data = sources.open_data(folder, train_split="train")
    assert data.train
    assert [bytes(each["image"].numpy()) for each in data.train.iterate_once()] == [picture()] * 2
    with pytest.warns(
        UserWarning, match=r"cat/bad\\udcff.png is a damaged image: Invalid PNG data, size 50. Left out: 1 of 3."
    ):
        data.train.warn_skipped()
    (folder / "train" / os.fsdecode(b"caf\xe9")).mkdir()
    message = fails(monkeypatch, "evaluate", "digits", "--data", folder / "train")
    assert "must be UTF-8: rename caf\\udce9 in" in message
