"""A damaged file of records is one error that names it, also where its records are streamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from keras_vit.train.data import sources
from keras_vit.train.data.dataset_files import name_bad_image
from keras_vit.train.data.split import Order, Split
from marks import full_except
from test_sources import COUNT, prepare, sequential


def lengthen(file: Path) -> None:
    file.write_bytes(bytes.fromhex("0000000000010000aa3d6be6") + file.read_bytes())  # 2**40, a valid checksum


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-20] ^= 255
    file.write_bytes(content)


def fill(file: Path, record: bytes) -> None:
    with tf.io.TFRecordWriter(str(file)) as writer:
        for _ in range(9):
            writer.write(record)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a length beyond its end": (lengthen, "record 0 states a length of 1,099,511,627,776 bytes"),
    "a wrong checksum": (flip, "example 17 of the split cannot be read: corrupted record at"),
    "no records": (lambda file: file.write_bytes(b""), "has 0 records, and not 9 as the data set states"),
    "no features": (
        lambda file: fill(file, b""),
        "example 9 of the split cannot be read: Feature: image .*is required",
    ),
    "no example": (lambda file: fill(file, b"\xff" * 9), "example 9 of the split cannot be read: "),
    "no file": (Path.unlink, "cannot be read: .*No such file"),
}


def assert_named(split: Split | None, file: Path, said: str) -> None:
    assert split
    order = Order(batch=1, shuffle=False)
    for read in (split.iterate_once, lambda: split.examples(order).take(COUNT)):
        with (
            pytest.raises(ValueError, match=rf"{file.name}'.* {said}"),
            name_bad_image(lambda: split.first_bad(order, batches=COUNT)),
        ):
            list(read())


@pytest.mark.parametrize("is_in_memory", full_except([False], [True, False]))
@pytest.mark.parametrize("damage", full_except(["a wrong checksum", "no records", "no file"], DAMAGES))
def test_a_file_of_records_is_named_with(damage: str, is_in_memory: bool, tmp_path: Path) -> None:
    folder = prepare(tmp_path, "tfrecord")
    [file] = Path(folder).glob("*.tfrecord-00001*")
    change, said = DAMAGES[damage]
    change(file)
    split = sources.open_data(folder, train_split="train").train if is_in_memory else sequential(folder)
    assert_named(split, file, said)


def test_a_damaged_array_record_is_named(tmp_path: Path) -> None:
    folder = prepare(tmp_path, "array_record")
    [file] = Path(folder).glob("*.array_record-00001*")
    file.write_bytes(b"abc")
    split = sources.open_data(folder, train_split="train").train
    assert_named(split, file, "example 9 of the split cannot be read: .*64KB")


def test_a_label_that_is_no_class_is_named(tmp_path: Path) -> None:
    folder = prepare(tmp_path, labels=[-1] * COUNT)
    assert_named(
        sequential(folder), Path("tiny-train.tfrecord-00000-of-00004"), ".*label outside 0..1: -1 in example 0"
    )
