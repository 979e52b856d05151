"""Opening what is trained and evaluated on: arrays, folders of images, what tensorflow-datasets has prepared, digits.

| data | is |
|---|---|
| `"digits"` | 1,797 handwritten digits that need no download (`keras_vit.digits`) |
| `"cifar10"`, `"imagenet2012:5.1.0"` | a data set that tensorflow-datasets has prepared in `data_dir` |
| `"path/of/a/folder"`, `"gs://bucket/folder"` | one that it has prepared there, or `folder/class/image.jpg` |
| `{"train": (images, labels), "evaluation": (images, labels)}` | arrays in memory |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.train.data import tfds_source
from keras_vit.train.data.folder_source import open_folder
from keras_vit.train.data.order import Order
from keras_vit.train.data.split import Example, RandomAccess, Split

__all__ = ["Data", "Order", "Split", "open_data"]

ON_BAD_IMAGE = ("skip", "fail")
PARTS = ("train", "evaluation")
ARRAY_KEYS = (*PARTS, "class_names", "num_classes")


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set for classification.

    Args:
        name: what it is called.
        train: to train on, if there is such a part.
        evaluation: held out, if there is such a part.
        num_classes: how many classes there are.
        class_names: of each class.
        multi_label: whether an image may have several classes, or none: labels are then rows of ones and zeros.
    """

    name: str
    train: Split | None
    evaluation: Split | None
    num_classes: int
    class_names: tuple[str, ...]
    multi_label: bool = False


def open_data(
    data: Any,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    train_split: str | None = None,
    eval_split: str | None = None,
    on_bad_image: str = "skip",
) -> Data:
    """Opens a data set. No image is read yet, and nothing is downloaded.

    Args:
        data: see the table above, or what this function gave. A name that is also a folder's here is the folder,
            except "digits". Arrays are uint8 (n, height, width, channels) with 1 or 3 channels; labels are integers
            (n,), or float32 (n, classes) of zeros and ones; the mapping may also hold "class_names" or "num_classes".
        data_dir: where tensorflow-datasets keeps what it prepared; None is its own folder (for the digits, our
            cache folder).
        train_split: the part to train on: a split such as "train[:90%]", or a folder's name.
        eval_split: the part to evaluate on.
        on_bad_image: what a file in a folder does that cannot be decoded. "skip": it is left out and named in
            `Split.bad`, and the next good one of the folder stands in for it in training; "fail": it is an error.

    Returns:
        the data set, with at least one part.

    Raises:
        FileNotFoundError: the folder, its images or the prepared data set are not there.
        ImportError: tensorflow-datasets is needed and not installed.
        PermissionError: a folder may not be read.
        TypeError, ValueError: data, split or labels are not as above.
    """
    if on_bad_image not in ON_BAD_IMAGE:
        raise ValueError(f"Expected on_bad_image to be one of {ON_BAD_IMAGE}. Received: {on_bad_image!r}")
    if isinstance(data, Data):
        return data
    if isinstance(data, Mapping):
        if train_split or eval_split:
            raise ValueError("Arrays have no splits to choose from: give those wanted as train and evaluation.")
        return _from_arrays(data)
    if not isinstance(data, (str, os.PathLike)) or not os.fspath(data):
        raise TypeError(f"Expected a name, a folder or a mapping of arrays. Received: {data!r}")
    text = os.fspath(data)
    assert isinstance(text, str)
    wanted: dict[str, Any] = {"train_split": train_split, "eval_split": eval_split}
    folder = _as_folder(text)
    builder = (
        tfds_source.prepared_in(folder)
        if folder
        else tfds_source.prepared_by_name(text, None if data_dir is None else os.fspath(data_dir))
    )
    if builder is not None:
        train, evaluation, names, multi_label = tfds_source.open_prepared(builder, **wanted)
        title = builder.info.full_name
    else:
        assert folder
        train, evaluation, names = open_folder(folder, on_bad_image=on_bad_image, **wanted)
        title, multi_label = folder, False
    if train is None and evaluation is None:
        raise ValueError(f"{title}: name the part to use with train_split or eval_split.")
    return Data(
        name=title,
        train=train,
        evaluation=evaluation,
        num_classes=len(names),
        class_names=names,
        multi_label=multi_label,
    )


def _as_folder(text: str) -> str | None:
    """The folder that is meant; None for a data set's name.

    Raises:
        FileNotFoundError: what can only be a folder's path is none.
    """
    if text == tfds_source.DIGITS:
        return None
    path = text if "://" in text else str(Path(text).expanduser())
    if tf.io.gfile.isdir(path):
        return path.rstrip("/") or path
    if text.startswith("~") or "://" in path or text.startswith(("/", ".")) or tf.io.gfile.exists(path):
        raise FileNotFoundError(
            f"Expected a folder of images, or one prepared by tensorflow-datasets. Received: {text}"
        )
    return None


def _from_arrays(data: Mapping[str, Any]) -> Data:
    if set(data) - set(ARRAY_KEYS) or not set(data) & set(PARTS):
        raise ValueError(
            f"Expected a mapping with {' or '.join(PARTS)} (and perhaps class_names or num_classes)."
            f" Received keys: {', '.join(map(str, data)) or 'none'}"
        )
    pairs = {part: _pair(part, data[part]) for part in PARTS if data.get(part) is not None}
    labels = {part: pair[1] for part, pair in pairs.items()}
    multi_label = {array.ndim == 2 for array in labels.values()}
    if len(multi_label) > 1:
        raise ValueError("Expected labels of one kind: (n,) or (n, classes). Received: both")
    classes = _class_count(data, next(iter(labels.values())))
    for part, array in labels.items():
        _check_range(part, array, classes)
    splits = {part: _array_split(part, *pair) for part, pair in pairs.items()}
    return Data(
        name="arrays",
        train=splits.get("train"),
        evaluation=splits.get("evaluation"),
        num_classes=classes,
        class_names=tuple(map(str, data.get("class_names", range(classes)))),
        multi_label=multi_label.pop(),
    )


def _pair(part: str, pair: Any) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one part, of the right dtypes, ranks and lengths."""
    try:
        images, labels = (np.asarray(array) for array in pair)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Expected {part} to be (images, labels). Received: {type(pair).__name__} ({error})"
        ) from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape:
        raise ValueError(
            f"Expected {part} images: uint8 (n, height, width, 1 or 3), none of them 0."
            f" Received: {images.dtype} {images.shape}"
        )
    if labels.ndim == 2 and labels.dtype.kind in "fiub" and np.isin(labels, (0, 1)).all():
        labels = labels.astype(np.float32)
    elif labels.ndim == 1 and labels.dtype.kind in "iu":
        labels = labels.astype(np.int64)
    else:
        raise ValueError(
            f"Expected {part} labels: integers (n,), or zeros and ones (n, classes)."
            f" Received: {labels.dtype} {labels.shape}"
        )
    if len(images) != len(labels):
        raise ValueError(f"{part} has {len(images)} images and {len(labels)} labels. Expected: as many of both")
    return images, labels


def _class_count(data: Mapping[str, Any], labels: np.ndarray) -> int:
    """What the caller says, else what the (first part's) labels have."""
    stated = {len(data["class_names"])} if "class_names" in data else set()
    if "num_classes" in data:
        stated.add(int(data["num_classes"]))
    if len(stated) > 1:
        raise ValueError(f"class_names and num_classes contradict each other. Received: {sorted(stated)}")
    return stated.pop() if stated else labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1


def _check_range(part: str, labels: np.ndarray, classes: int) -> None:
    if labels.ndim == 2:
        if labels.shape[1] != classes:
            raise ValueError(f"Expected {part} labels of {classes} classes. Received: shape {labels.shape}")
        return
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        raise ValueError(
            f"{part} label {labels[outside[0]]} of example {outside[0]} is outside 0..{classes - 1}"
            f" ({len(outside):,} such labels). If there are more classes than training labels show, give num_classes."
        )


def _array_split(part: str, images: np.ndarray, labels: np.ndarray) -> RandomAccess:
    def reader() -> Callable[[tf.Tensor], Example]:
        pixels, numbers = tf.constant(images), tf.constant(labels)
        return lambda index: {"image": pixels[index], "label": numbers[index]}

    return RandomAccess(name=f"arrays {part}", count=len(images), fetch=reader)
