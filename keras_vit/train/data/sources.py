"""Open data sets: arrays, folders of images, data prepared by tensorflow-datasets, and the digits.

| data | meaning |
|---|---|
| `"digits"` | 1,797 handwritten digits that need no download (`keras_vit.digits`) |
| `"cifar10"`, `"imagenet2012:5.1.0"` | a data set that tensorflow-datasets has prepared in `data_dir` |
| `"path/of/a/folder"`, `"gs://bucket/folder"` | a folder it has prepared, or images in `folder/class/image.jpg` |
| the same | with images and maps in `folder/images/name.jpg` and `folder/masks/name.png` or `folder/depth/name.png` |
| `{"train": (images, labels), "evaluation": (images, labels)}` | arrays in memory |
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit._util.checks import as_path, expand_home
from keras_vit._util.text import warn
from keras_vit.dense.map_tasks import IGNORED, Segmentation
from keras_vit.model import task as tasks
from keras_vit.model.config import Preprocessing
from keras_vit.model.preprocess import check_array
from keras_vit.model.vision_transformer import hash_weights
from keras_vit.train.data import tfds_source
from keras_vit.train.data.dataset_files import is_folder
from keras_vit.train.data.folder_source import open_folder
from keras_vit.train.data.label_values import (
    MaskValues,
    choose_mask_values,
    count_values,
    pack_colours,
    tally_labels,
)
from keras_vit.train.data.map_folders import find_kind, open_map_folder
from keras_vit.train.data.split import Data, DataRequest, Example, Order, RandomAccess, Split

__all__ = ["Data", "DataRequest", "Order", "Split", "open_data"]

SPLITS = ("train", "evaluation")
ARRAY_KEYS = (*SPLITS, "class_names", "num_classes")
MOST_COMPARED = 2**30  # bytes of training images that held-out ones are compared with: about a second


def open_data(data: Any, **options: Any) -> Data:
    """Open a data set with at least one split. Nothing is downloaded, and no image is read yet.

    A folder takes precedence over a data set of the same name, except for "digits".

    Args:
        data: see the table above; a `DataRequest`; or a `Data`, which is returned as it is. Arrays are pixels
            (n, height, width, channels), uint8 or other numbers, of which the model's preprocessing may state `bits` or
            `range`; labels are integers (n,) or (n, 1), zeros and ones (n, classes), or maps (n, height, width) or
            (n, height, width, 1): integers for classes, of which 255 does not count, or floats for metres, of which 0
            does not count. The mapping may also have "class_names" or "num_classes".
        **options: the other fields of a `DataRequest`.
    """
    request = data if isinstance(data, DataRequest) else DataRequest(data=data, **options)
    if isinstance(request.data, Data):
        return request.data
    opened = _open(request)
    if request.mask_values is not None and opened.make_task is not Segmentation:
        raise ValueError(f"mask_values are for masks of classes. Received: {opened.name}, {opened.task.NAME}")
    return dataclasses.replace(opened, states_values=request.mask_values is not None)


def _open(request: DataRequest) -> Data:
    data = request.data
    if isinstance(data, Mapping):
        if request.train_split or request.eval_split:
            raise ValueError("Arrays do not have named splits: pass them as train and evaluation.")
        return _open_arrays(data, request)
    if not isinstance(data, (str, os.PathLike)) or not os.fspath(data):
        raise TypeError(f"Expected a name, a folder or a mapping of arrays. Received: {data!r:.200}")
    name = as_path(data, "data")
    folder = _find_folder(name)
    builder = tfds_source.builder_in(folder) if folder else tfds_source.builder_named(name, request.data_dir)
    if builder is not None:
        opened = tfds_source.open_prepared(builder, request)
    else:
        assert folder
        kind = find_kind(folder, request)
        opened = open_folder(folder, request) if kind is None else open_map_folder(folder, kind, request)
    if opened.train is None and opened.evaluation is None:
        raise ValueError(f"{opened.name}: choose the split to use with train_split or eval_split.")
    return opened


def _find_folder(name: str) -> str | None:
    """Find the folder at this path; None for the name of a data set."""
    if name == tfds_source.DIGITS:
        return None
    path = name if "://" in name else str(expand_home(name))
    if is_folder(path):
        return path.rstrip("/") or path
    if "://" in path or name.startswith(("/", ".", "~")) or Path(path).exists():
        raise FileNotFoundError(
            f"Expected a folder of images, or one prepared by tensorflow-datasets. Received: {name}"
        )
    return None


def _open_arrays(data: Mapping[str, Any], request: DataRequest) -> Data:
    if set(data) - set(ARRAY_KEYS) or not set(data) & set(SPLITS):
        raise ValueError(
            f"Expected a mapping with {' or '.join(SPLITS)} (and perhaps class_names or num_classes)."
            f" Received keys: {', '.join(map(str, data)) or 'none'}"
        )
    is_labelled = request.needs_labels or not all(_is_unlabelled(data[split]) for split in SPLITS if split in data)
    if not is_labelled:
        data = {split: (data[split][0], np.zeros(len(data[split][0]), np.int64)) for split in SPLITS if split in data}
    stated = _stated_classes(data)
    has_single_class = request.has_single_class or stated == 1
    arrays = {
        split: _check_arrays(split, data[split], has_single_class=has_single_class)
        for split in SPLITS
        if data.get(split) is not None
    }
    labels = {split: pair[1] for split, pair in arrays.items()}
    first = next(iter(labels.values()))
    kind: Any = tasks.kind_of_labels(first)
    if any((array.ndim, tasks.kind_of_labels(array)) != (first.ndim, kind) for array in labels.values()):
        raise ValueError(f"Expected labels of one kind: {_accepted_labels()}. Received: both")
    if kind is Segmentation:
        met = set().union(*map(count_values, labels.values()))
        mask_values = choose_mask_values("arrays", met, stated=request.values_of_masks, num_classes=stated)
        labels = {split: _number_classes(split, array, mask_values) for split, array in labels.items()}
        stated = stated or (len(mask_values.values) if mask_values.values else None)
    num_classes = kind.count_classes(next(iter(labels.values()))) if stated is None else stated
    for split, array in labels.items():
        kind(num_classes=num_classes).check_labels(split, array)
    if is_labelled and len(arrays) == 2:
        _warn_same_images(*(images for images, _ in arrays.values()))
    splits = {
        split: RandomAccess(
            name=f"arrays {split}",
            count=len(images),
            make_reader=functools.partial(_reader, images, labels[split]),
            check_arrays=functools.partial(_check_for_model, split, images),
            fingerprint=functools.partial(
                hash_weights, (images, labels[split]), str([images.shape, labels[split].shape])
            ),
            tally=tally_labels(labels[split]),
        )
        for split, (images, _) in arrays.items()
    }
    return Data(
        name="arrays",
        train=splits.get("train"),
        evaluation=splits.get("evaluation"),
        eval_split="evaluation",
        num_classes=num_classes,
        class_names=tuple(map(str, data.get("class_names", range(num_classes)))),
        make_task=kind,
        is_labelled=is_labelled,
        multi_label=first.ndim == 2,
    )


def _warn_same_images(train: np.ndarray, held_out: np.ndarray) -> None:
    """Warn of held-out images that are trained on, byte for byte."""
    if (train.dtype, train.shape[1:]) != (held_out.dtype, held_out.shape[1:]) or train.nbytes > MOST_COMPARED:
        return
    known = {hashlib.blake2b(image.tobytes()).digest() for image in train}
    if same := sum(hashlib.blake2b(image.tobytes()).digest() in known for image in held_out):
        warn(
            f"keras_vit: {same:,} of the {len(held_out):,} held-out images are training images, byte for byte. "
            "Measured on them a model looks better than it is: hold out others"
        )


def _number_classes(split: str, masks: np.ndarray, mask_values: MaskValues) -> np.ndarray:
    try:
        return mask_values.numbers(masks)
    except ValueError as error:
        raise ValueError(f"{split} masks {error}") from None


def _is_unlabelled(pair: Any) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2 and pair[0] is not None and pair[1] is None


def _accepted_labels() -> str:
    return ", or ".join(kind.LABELS for kind in tasks.KINDS)


def _check_arrays(split: str, pair: Any, *, has_single_class: bool) -> tuple[np.ndarray, np.ndarray]:
    """Convert images and labels to arrays, and check their dtypes, ranks and lengths.

    Labels (n, 1) become (n,), unless they are zeros and ones of a single class; masks (n, height, width, 1 or 3) become
    (n, height, width).
    """
    try:
        images, labels = (np.asarray(array) for array in pair)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Expected {split} to be (images, labels). Received: {type(pair).__name__} ({error})"
        ) from error
    if images.dtype.kind not in "uif" or images.ndim != 4 or 0 in images.shape:
        hint = ". Grey ones (n, height, width) need a last axis: images[..., None]" * (images.ndim == 3)
        raise ValueError(
            f"Expected {split} images: numbers (n, height, width, channels), no dimension 0."
            f" Received: {images.dtype} {images.shape}{hint}"
        )
    is_column = labels.ndim == 2 and has_single_class and np.isin(labels, (0, 1)).all()
    if labels.ndim in (2, 4) and labels.shape[-1] == 1 and not is_column:
        labels = labels[..., 0]
    elif (
        labels.ndim == 4
        and labels.shape[-1] == 3
        and labels.dtype.kind in "iu"
        and 0 <= labels.min() <= labels.max() <= IGNORED
    ):
        labels = pack_colours(labels)
    kind = tasks.kind_of_labels(labels)
    if kind is None:
        raise ValueError(f"Expected {split} labels: {_accepted_labels()}. Received: {labels.dtype} {labels.shape}")
    if len(images) != len(labels):
        raise ValueError(f"{split} has {len(images)} images and {len(labels)} labels. Expected: equal numbers")
    if labels.ndim == 3 and labels.shape != images.shape[:3]:
        raise ValueError(f"Expected {split} maps of shape {images.shape[:3]}. Received: {labels.shape}")
    return images, kind.read_labels(labels)


def _stated_classes(data: Mapping[str, Any]) -> int | None:
    """Number of classes that the caller states, if any."""
    stated = {len(data["class_names"])} if "class_names" in data else set()
    if "num_classes" in data:
        stated.add(int(data["num_classes"]))
    if len(stated) > 1:
        raise ValueError(f"class_names and num_classes contradict each other. Received: {sorted(stated)}")
    return stated.pop() if stated else None


def _check_for_model(split: str, images: np.ndarray, num_channels: int, preprocessing: Preprocessing) -> None:
    """Raise a ValueError for images that a model of so many channels and this preprocessing does not take."""
    channels, received = images.shape[3], f"Received: {split} images {images.dtype} {images.shape}"
    if channels not in (1, num_channels) and (channels, num_channels) != (3, 1):
        raise ValueError(
            f"The model takes images of {num_channels} channels. For others it is adapted by "
            f'zoo.load(name, num_channels={channels}), or a recipe\'s config={{"num_channels": {channels}}}. {received}'
        )
    if images.dtype != np.uint8:
        check_array(images, preprocessing, received)


def _reader(images: np.ndarray, labels: np.ndarray) -> Callable[[tf.Tensor], Example]:
    pixels, numbers = tf.constant(images), tf.constant(labels)
    return lambda index: {"image": pixels[index], "label": numbers[index]}
