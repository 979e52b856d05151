"""Data sets of images with maps: folders, arrays, tensorflow-datasets. A map moves with its image."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import map_folders
from keras_vit import train
from keras_vit.batch import search
from keras_vit.dense.map_tasks import Depth, Segmentation
from keras_vit.model.config import Preprocessing
from keras_vit.train.data.map_folders import read_depth, read_mask
from keras_vit.train.data.pipeline import ModelInput, evaluation_batches, training_batches
from keras_vit.train.data.sources import open_data
from keras_vit.train.data.split import Order
from marks import full_except
from photo_folder import ORIENTATION
from refusals import unrefused

INPUT = ModelInput((24, 24), 3, Preprocessing(mean=(0,), std=(1 / 255,)))


def labels(data: Any) -> list[np.ndarray]:
    return [np.asarray(example["label"]) for example in data.training_split().iterate_once()]


def png(array: np.ndarray, path: Path, **options: Any) -> bytes:
    Image.fromarray(array).save(path, **options)
    return path.read_bytes()


def test_a_folder_of_images_and_masks_is_opened(tmp_path: Path) -> None:
    data = open_data(map_folders.make(tmp_path, count=4))
    assert (data.task.num_classes, data.class_names, data.eval_split) == (2, ("ground", "square"), "val")
    assert isinstance(data.task, Segmentation)
    draw = np.random.default_rng(0)
    for found, size in zip(labels(data), (*map_folders.SIZES, map_folders.SIZES[0]), strict=True):
        np.testing.assert_array_equal(found, map_folders.scene(draw, size)[1])


def test_depth_is_read_in_metres(tmp_path: Path) -> None:
    folder = map_folders.make(tmp_path, count=2, kind="depth")
    (folder / "train/depth/01.png").unlink()
    exact = np.random.default_rng(0).uniform(1, 5, map_folders.SIZES[1])
    exact[0, 0] = np.nan
    np.save(folder / "train/depth/01.npy", exact)
    expected = map_folders.metres(map_folders.scene(np.random.default_rng(0), map_folders.SIZES[0])[1])
    for divided in (1.0, 0.5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            data = open_data(folder)
        assert ("1000 per metre" in str([one.message for one in caught])) == (divided == 1)
        assert isinstance(data.task, Depth)
        first, second = labels(data)
        np.testing.assert_allclose(first, expected / divided)
        np.testing.assert_array_equal(second, np.nan_to_num(exact.astype(np.float32)))
        (folder / "depth_scale.txt").write_text("500\n")


def test_without_split_folders_a_tenth_is_held_out(tmp_path: Path) -> None:
    folder = map_folders.make(tmp_path, count=30, parts=("",))
    with pytest.warns(UserWarning, match="of 30 images are held out"):
        data = open_data(folder)
    assert data.evaluation
    assert data.training_split().count + data.evaluation.count == 30


def test_files_without_a_partner_are_listed(tmp_path: Path) -> None:
    folder = map_folders.make(tmp_path, count=4)
    (folder / "train/masks/02.png").unlink()
    (folder / "train/masks/notes.txt").touch()
    with pytest.warns(UserWarning, match=r"train/images/02.jpg, train/masks/notes.txt. Left out: 2") as caught:
        data = open_data(folder)
    assert (len(caught), data.training_split().count, len(data.training_split().unread)) == (1, 3, 2)
    with pytest.raises(ValueError, match="without a partner of the same name: train/images/02.jpg"):
        open_data(folder, on_bad_image="fail")
    Image.new("RGB", (4, 4)).save(folder / "train/images/01.png")
    with pytest.raises(ValueError, match="Received: train/images/01.jpg"):
        open_data(folder)


def test_maps_that_do_not_fit_are_left_out_and_other_classes_refused(tmp_path: Path) -> None:
    folder = map_folders.make(tmp_path, count=4)
    masks = folder / "train/masks"
    Image.fromarray(np.zeros((48, 40), np.uint8)).save(masks / "00.png")  # a quarter turn
    Image.fromarray(np.zeros((48, 36, 4), np.uint8)).save(masks / "01.png")
    split = open_data(folder).training_split()
    assert len(list(split.iterate_once())) == 2
    with pytest.warns(UserWarning, match="Left out: 2 of 4") as caught:
        split.warn_skipped()
    assert "00.png must have the size of its image, 40 x 48. Received: 48 x 40" in str(caught[-1].message)
    assert "01.png must be a PNG without transparent pixels and of 8 bits. Received: RGBA of 8 bits" in str(
        caught[-1].message
    )
    with pytest.raises(ValueError, match="Remove the file"):
        open_data(folder, on_bad_image="fail").training_split().is_readable(0)
    Image.fromarray(np.full(map_folders.SIZES[2], 7, np.uint8)).save(masks / "02.png")
    with pytest.raises(ValueError, match=r"02.png must have the numbers 0 to 1 of classes.*Received: 7"):
        open_data(folder).training_split().is_readable(2)


def test_classes_without_names_are_counted(tmp_path: Path) -> None:
    folder = map_folders.make(tmp_path, count=2)
    (folder / "classes.txt").unlink()
    assert open_data(folder).class_names == ("0", "1")
    odd = ("a\u2028b", "c\fd\x1ce")
    (folder / "classes.txt").write_text("\r\n".join(odd) + "\n\n", encoding="utf-8-sig", newline="")
    assert open_data(folder).class_names == odd
    for text, message in (
        (b"\n", "an empty file"),
        (b"a\na\n", "Received: a, a"),
        (b"\na\nb\n", "from the first.*Received: an empty line, a, b"),  # dropped, it would shift all numbers
        (b"a\n\xe9t\xe9\n", "classes.txt must be saved as UTF-8. Received: other bytes in line 2"),
    ):
        (folder / "classes.txt").write_bytes(text)
        with pytest.raises(ValueError, match=message):
            open_data(folder)
    (folder / "train/depth").mkdir()
    with pytest.raises(ValueError, match="Received: both"):
        open_data(folder)


def test_masks_of_any_number_of_bits_are_numbers_and_others_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    for bits in (1, 2, 4, 8):
        values = np.random.default_rng(0).integers(0, min(2**bits, 200), (5, 7)).astype(np.uint8)
        with_palette = Image.fromarray(values, "P")
        with_palette.putpalette(list(range(255, -1, -1)) * 3)
        with_palette.save(path, bits=bits)
        np.testing.assert_array_equal(read_mask(path.read_bytes()), values)
    np.testing.assert_array_equal(read_mask(png(values, path)), values)  # grey
    wide = values.astype(np.uint16) * 257
    np.testing.assert_array_equal(read_mask(png(wide, path)), wide)
    np.testing.assert_array_equal(read_mask(png(np.stack([values] * 3, axis=-1), path)), values)
    with pytest.raises(ValueError, match=r"16 bits, or .npy. Received: L"):
        read_depth(png(np.zeros((2, 2), np.uint8), path))
    for read in (read_mask, read_depth):
        with pytest.raises(ValueError, match="cannot be decoded as PNG"):
            read(b"\x89PNG\r\n\x1a\nbroken")
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # the image beside it is turned by its own
    with pytest.raises(ValueError, match="upright, without an EXIF orientation. Received: orientation 6"):
        read_mask(png(values, path, exif=exif))


def test_distances_are_numbers() -> None:
    for wrong in (np.inf, -np.inf, 1e300, -1.0):
        file = io.BytesIO()
        np.save(file, np.array([[1.0, wrong], [np.nan, 2.0]]))
        with pytest.raises(ValueError, match="Received: negative or infinite ones"):
            read_depth(file.getvalue())


@pytest.mark.parametrize("crop", full_except(["inception"], ["inception", "random", "resize"]))
def test_a_map_moves_with_its_image(crop: str) -> None:
    images, classes = map_folders.arrays(4, size=(40, 60))
    images = np.where(classes[..., None] == 1, 250, 5).astype(np.uint8).repeat(3, axis=-1)
    data = open_data({"train": (images, np.where(classes == 1, 1, 0))})
    recipe = train.recipe("segment-folder", steps=1, batch_size=8, crop=crop)
    order = Order(batch=8, seed=3)
    batches = training_batches(data.training_split(), recipe, model_input=INPUT, task=data.task, order=order)
    moved = set()
    for batch in batches.take(3):
        bright, label = np.asarray(batch["image"])[..., 0] > 127, np.asarray(batch["label"])
        # Pixels at an edge are mixtures, and may be on the other side.
        assert (bright != label).mean() < 0.03
        moved |= {tuple(np.argwhere(each == 1).mean(axis=0).round(1)) for each in label if each.any()}
    assert len(moved) > 4


def test_an_evaluation_sees_whole_images_and_maps_must_have_their_size() -> None:
    images, classes = map_folders.arrays(3, size=(48, 48))
    data = open_data({"evaluation": (images, classes)})
    [batch] = evaluation_batches(data.evaluation, batch_size=4, model_input=INPUT, task=data.task)
    np.testing.assert_array_equal(batch["label"][:3], classes[:, 1::2, 1::2])
    np.testing.assert_array_equal(batch["weight"], [1, 1, 1, 0])
    cases = [
        ({"train": (images, classes[:, ::2])}, "train maps of shape (3, 48, 48)"),
        ({"train": (images, classes), "evaluation": (images, classes.astype(float))}, "labels of one kind"),
        ({"train": (images, classes + (classes == 1)), "num_classes": 2}, "Received: 2"),
    ]
    assert not unrefused(lambda **data: open_data(data), cases)


def test_a_damaged_npy_file_is_one_error_that_names_the_file(tmp_path: Path) -> None:
    good = io.BytesIO()
    np.save(good, np.ones((4, 4), np.float32))
    header = good.getvalue()
    huge = header.replace(b"(4, 4), }" + b" " * 14, b"(1200000, 1200000), }  ")
    assert len(huge) == len(header) and huge != header
    for data in (header[:20], header.replace(b"descr", b"\x00escr"), header.replace(b"}", b"("), huge):
        with pytest.raises(ValueError, match=r"is not a \.npy file of numbers, or it is damaged"):
            read_depth(data)
        (tmp_path / "vectors.npy").write_bytes(data)
        with pytest.raises(ValueError, match=r"vectors\.npy is not a \.npy file"):
            search(tmp_path / "vectors.npy", np.ones(4))
