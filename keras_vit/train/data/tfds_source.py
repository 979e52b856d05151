"""Data sets that tensorflow-datasets has prepared, by name or by folder, and the digits, which prepare themselves.

Only what is prepared is opened: nothing here downloads, so a data set that is not there is an error at once.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit._util.download import cache_folder
from keras_vit._util.text import install_command
from keras_vit.train.data.image_check import opened
from keras_vit.train.data.records import Files, Sequential, by_number, in_memory
from keras_vit.train.data.split import Example, Split

DIGITS = "digits"
TRAIN = "train"
MARKER = "features.json"  # is in a prepared folder
HELD_OUT = ("validation", "val", "test")  # the first that is there is evaluated on
MEMORY = 2**30  # bytes of records that a split may hold: all of them, or those in a shuffle buffer


def tfds() -> Any:
    """The package tensorflow_datasets.

    Raises:
        ImportError: where it is not installed, saying how to.
    """
    try:
        import importlib_resources  # noqa: F401  which tensorflow-datasets 4.9.10 needs and does not ask for
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(
            f"This kind of data needs the package tensorflow-datasets (missing: {error.name}):"
            f" `{install_command('train')}`"
        ) from error
    return tensorflow_datasets


def prepared_by_name(name: str, data_dir: str | None) -> Any:
    """A prepared data set's builder.

    Args:
        name: "cifar10", "imagenet2012:5.1.0", "name/config:version"; "digits" is prepared now, if it is not yet.
        data_dir: where data sets are; None is tensorflow-datasets' own folder, for the digits our cache folder.

    Raises:
        FileNotFoundError: it is not prepared there.
        ImportError: tensorflow-datasets is not installed.
        ValueError: the name is not well-formed, or several folders hold the data set.
    """
    package = tfds()
    if name == DIGITS:
        return _prepared_digits(data_dir)
    if not re.fullmatch(r"\w+(/[\w.+-]+)?(:[\d.*]+)?", name):
        raise ValueError(
            "Expected the path of a folder, or a tensorflow-datasets name such as cifar10, imagenet2012:5.1.0 or"
            f" name/config:1.0.0. Received: {name!r}, which is neither."
        )
    try:  # tfds.builder would run the builder's own code, and ask the network
        return package.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except package.core.DatasetNotFoundError:
        raise FileNotFoundError(_not_prepared(package, name, data_dir)) from None


def _not_prepared(package: Any, name: str, data_dir: str | None) -> str:
    base = re.split("[/:]", name)[0]
    places = [data_dir] if data_dir else package.core.utils.file_utils.list_data_dirs()
    known = [DIGITS, *package.list_builders(with_community_datasets=False)]
    message = f"The data set {name!r} is not prepared in {', '.join(map(str, places))}"
    if base not in known:
        near = difflib.get_close_matches(base, known, n=3)
        hint = f" Nearest names: {', '.join(near)}." if near else ""
        return f"{message}, there is no folder of that name, and tensorflow-datasets does not know it.{hint}"
    folder = f" --data_dir={data_dir}" if data_dir else ""
    return (
        f"{message}. Prepare it where there is internet: `tfds build {name}{folder}`, or in Python:"
        f" tensorflow_datasets.builder({name!r}{f', data_dir={data_dir!r}' if data_dir else ''}).download_and_prepare()"
    )


def _prepared_digits(data_dir: str | None) -> Any:
    """The digits, written on first use; what is prepared at the same time elsewhere is waited for."""
    from filelock import FileLock

    from keras_vit.train.data.digits_dataset_builder import Builder

    local = data_dir is not None and "://" not in data_dir  # there is no locking elsewhere
    folder = Path(data_dir).expanduser() if data_dir and local else cache_folder() / "tfds"
    try:
        if not (Builder(data_dir=folder).data_path / MARKER).exists():
            folder.mkdir(parents=True, exist_ok=True)
            # What is printed is of downloads, of which there are none.
            quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
            with FileLock(folder / "digits.lock"), quiet[0], quiet[1]:
                # Nothing if they have appeared meanwhile; else a folder of another name, renamed when it is complete.
                Builder(data_dir=folder).download_and_prepare(file_format="tfrecord")
    except OSError as error:
        raise OSError(
            f"The digits cannot be written to {folder}: {error}. Set data_dir or KERAS_VIT_CACHE to a folder that can."
        ) from error
    return Builder(data_dir=folder)


def prepared_in(folder: str) -> Any | None:
    """The builder of a folder that tensorflow-datasets has prepared, or of the only version in it; None if it is none.

    Raises:
        ValueError: for a folder of several versions.
    """
    inside = [name.rstrip("/") for name in opened(tf.io.gfile.listdir, folder)]
    if MARKER in inside:
        return tfds().builder_from_directory(folder)
    versions = sorted(f"{folder}/{name}" for name in inside if re.fullmatch(r"\d+\.\d+\.\d+", name))
    prepared = [version for version in versions if tf.io.gfile.exists(f"{version}/{MARKER}")]
    if len(prepared) > 1:
        raise ValueError(f"{folder} holds several versions of a data set: name one of {', '.join(prepared)}")
    return tfds().builder_from_directory(prepared[0]) if prepared else None


def open_prepared(
    builder: Any, *, train_split: str | None, eval_split: str | None, memory: int = MEMORY
) -> tuple[Split | None, Split | None, tuple[str, ...], bool]:
    """The training and evaluation parts of a prepared data set, its classes, and whether an image may have several.

    Args:
        builder: tensorflow-datasets', prepared.
        train_split: such as "train" or "train[:90%]"; None finds it.
        eval_split: such as "validation"; None finds it, or holds out the last tenth of the only part.
        memory: bytes that a split's records may take; larger ones are read from their files.

    Raises:
        ValueError: for a split that is not there, or features that are not an image and its class or classes.
    """
    info = builder.info
    image, label, classes, several = _image_and_label(info)
    if not (train_split or eval_split) and set(info.splits) == {TRAIN}:
        train_split, eval_split = "train[:90%]", "train[90%:]"
        warnings.warn(
            f"{info.full_name} has no part to evaluate on: the last tenth of {TRAIN} is held out.", stacklevel=3
        )
    names = (
        train_split or (TRAIN if TRAIN in info.splits else None),
        eval_split or next((name for name in HELD_OUT if name in info.splits), None),
    )
    parse = functools.partial(_parse, info.features, image=image, label=label, classes=len(classes), several=several)
    train, evaluation = (_open_split(builder, name, parse, memory) if name else None for name in names)
    return train, evaluation, classes, several


def _image_and_label(info: Any) -> tuple[str, str, tuple[str, ...], bool]:
    """The names of the two features that matter, the classes, and whether the label is a sequence of them."""
    features = tfds().features
    pairs = [info.supervised_keys, ("image", "label")]
    for image, label in (pair for pair in pairs if pair and len(pair) == 2 and set(pair) <= set(info.features)):
        kind = info.features[label]
        several = isinstance(kind, features.Sequence)
        kind = kind.feature if several else kind
        if isinstance(info.features[image], features.Image) and isinstance(kind, features.ClassLabel):
            if info.features[image].np_dtype != np.uint8:
                raise ValueError(
                    f"{info.full_name} has images of {np.dtype(info.features[image].np_dtype)}. Expected: uint8"
                )
            return image, label, tuple(kind.names), several
    raise ValueError(
        f"{info.full_name} is not for classification. Expected: an image and a class (or a sequence of classes), named"
        f" image and label or by the builder's supervised_keys. Received features: {', '.join(info.features)}"
    )


def _open_split(builder: Any, name: str, parse: Callable[..., Example], memory: int) -> Split:
    info = builder.info
    title = f"{info.name} {name}"
    try:
        files = Files(info.splits[name].file_instructions)
    except (KeyError, ValueError, AssertionError) as error:
        raise ValueError(
            f"{info.full_name} has no split {name!r}. Received splits: {', '.join(info.splits)}"
        ) from error
    read = functools.partial(parse, title)
    kind = info.file_format.value
    if kind == "array_record":
        return by_number(title, files, read)
    if kind != "tfrecord":
        raise ValueError(f"{info.full_name} is kept as {kind}. Expected: tfrecord or array_record")
    record_bytes = max(1, info.dataset_size // max(1, info.splits.total_num_examples))
    if files.count * record_bytes <= memory:
        return in_memory(title, files, read)
    return Sequential(name=title, count=files.count, files=files, parse=read, buffer=max(1, memory // record_bytes))


def _parse(
    features: Any,
    title: str,
    index: tf.Tensor,
    record: tf.Tensor,
    *,
    image: str,
    label: str,
    classes: int,
    several: bool,
) -> Example:
    """The encoded image and the checked label of a record."""
    package = tfds()
    wanted = package.features.FeaturesDict({name: features[name] for name in (image, label)})
    example = wanted.deserialize_example(record, decoders={image: package.decode.SkipDecoding()})
    checked = _checked(tf.cast(example[label], tf.int64), classes, title, index)
    return {"image": example[image], "label": _multi_hot(checked, classes) if several else checked}


def _checked(labels: tf.Tensor, classes: int, title: str, index: tf.Tensor) -> tf.Tensor:
    """A label or several, of which each is a class: test parts without labels often have -1."""
    message = tf.strings.format(f"label outside 0..{classes - 1}: {{}} in example {{}} of {title}", (labels, index))
    with tf.control_dependencies([tf.Assert(tf.reduce_all((labels >= 0) & (labels < classes)), [message])]):
        return tf.identity(labels)


def _multi_hot(labels: tf.Tensor, classes: int) -> tf.Tensor:
    """A one for each label, of which there may be none."""
    return tf.clip_by_value(tf.reduce_sum(tf.one_hot(labels, classes), axis=0), 0.0, 1.0)
