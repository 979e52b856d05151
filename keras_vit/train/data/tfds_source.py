"""Open data sets that tensorflow-datasets has prepared, by name or by folder, and prepare the digits."""

import functools
import io
import os
import re
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_vit._util.downloads import cache_folder
from keras_vit._util.text import install_command, nearest
from keras_vit.dense.task import Depth, Segmentation
from keras_vit.model.images import jpeg_png
from keras_vit.model.task import Classification
from keras_vit.train.data.dataset_files import list_files
from keras_vit.train.data.folder_source import ALL, HELD_OUT, TRAIN, spelled
from keras_vit.train.data.records import Parse, RecordFiles, RecordStream, array_record_split, in_memory_split
from keras_vit.train.data.split import Data, DataRequest, Example, Split

DIGITS = "digits"
MARKER = "features.json"  # every prepared folder has this file
EVALUATION_SPLITS = ("validation", "val", "test")  # the first that exists is the evaluation split
MEMORY = 2**30  # bytes of records kept per split: all of them, or those in a shuffle buffer
# Names of an image and of its label, where `supervised_keys` does not state them: those of classes and of maps.
PAIRS = (
    ("image", "label"),
    ("image", "segmentation_mask"),
    ("image", "segmentation_label"),
    ("image_left", "segmentation_label"),
    ("image", "annotation"),
    ("image", "depth"),
)


class Schema(NamedTuple):
    """The features of a data set that are read."""

    image: str  # name of the image feature
    label: str  # name of the label feature
    class_names: tuple[str, ...] = ()
    multi_label: bool = False  # whether the label is a sequence of classes
    task: type[Any] = Classification


def tfds() -> Any:
    """Return the package tensorflow_datasets, or raise an ImportError that says how to install it."""
    try:
        import importlib_resources  # noqa: F401  tensorflow-datasets 4.9.10 needs it without requiring it
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(
            f"This kind of data needs the package tensorflow-datasets (missing: {error.name}):"
            f" `{install_command('train')}`"
        ) from error
    return tensorflow_datasets


def builder_named(name: str, data_dir: str | os.PathLike[str] | None) -> Any:
    """Return the builder of a prepared data set, such as "cifar10" or "name/config:version", or of the digits."""
    package, data_dir = tfds(), None if data_dir is None else os.fspath(data_dir)
    if name == DIGITS:
        return _prepare_digits(data_dir)
    if not re.fullmatch(r"\w+(/[\w.+-]+)?(:[\d.*]+)?", name):
        raise ValueError(
            "Expected the path of a folder, or a tensorflow-datasets name such as cifar10, imagenet2012:5.1.0 or"
            f" name/config:1.0.0. Received: {name!r:.200}, which is neither."
        )
    try:  # tfds.builder would run the builder's own code and use the network
        return package.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except package.core.DatasetNotFoundError:
        raise FileNotFoundError(_not_prepared_message(package, name, data_dir)) from None


def builder_in(folder: str) -> Any | None:
    """Return the builder of a prepared folder, or of the only version in it; None where nothing is prepared."""
    names = [name.rstrip("/") for kind in list_files(folder) for name in kind]
    if MARKER in names:
        return tfds().builder_from_directory(folder)
    versions = [f"{folder}/{name}" for name in names if re.fullmatch(r"\d+\.\d+\.\d+", name)]
    prepared = [version for version in versions if tf.io.gfile.exists(f"{version}/{MARKER}")]
    if len(prepared) > 1:
        raise ValueError(f"{folder} holds several versions of a data set. Choose one of {', '.join(prepared)}")
    return tfds().builder_from_directory(prepared[0]) if prepared else None


def _not_prepared_message(package: Any, name: str, data_dir: str | None) -> str:
    base = re.split("[/:]", name)[0]
    folders = [data_dir] if data_dir else package.core.utils.file_utils.list_data_dirs()
    known = [DIGITS, *package.list_builders(with_community_datasets=False)]
    message = f"The data set {name!r:.200} is not prepared in {', '.join(map(str, folders))}"
    if base not in known:
        similar = nearest(base, known, count=3)
        hint = f" Nearest names: {', '.join(similar)}." if similar else ""
        return f"{message}, there is no folder of that name, and tensorflow-datasets does not know it.{hint}"
    option = f" --data_dir={data_dir}" if data_dir else ""
    argument = f", data_dir={data_dir!r:.200}" if data_dir else ""
    return (
        f"{message}. Prepare it where there is internet: `tfds build {name}{option}`, or in Python:"
        f" tensorflow_datasets.builder({name!r:.200}{argument}).download_and_prepare()"
    )


def _prepare_digits(data_dir: str | None) -> Any:
    """Return the digits' builder and write the data set on first use; a lock makes other processes wait."""
    from filelock import FileLock

    from keras_vit.train.data.digits_dataset_builder import Builder

    is_local = data_dir is not None and "://" not in data_dir  # remote file systems have no locks
    folder = Path(data_dir).expanduser() if data_dir and is_local else cache_folder() / "tfds"
    try:
        if not (Builder(data_dir=folder).data_path / MARKER).exists():
            folder.mkdir(parents=True, exist_ok=True)
            # tensorflow-datasets prints that it downloads, although nothing is downloaded.
            with FileLock(folder / "digits.lock"), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                # Does nothing if another process has written them; writes to a temporary folder otherwise.
                Builder(data_dir=folder).download_and_prepare(file_format="tfrecord")
    except OSError as error:
        raise OSError(
            f"The digits cannot be written to {folder}: {error}. Set data_dir or KERAS_VIT_CACHE to a writable folder."
        ) from error
    return Builder(data_dir=folder)


def open_prepared(builder: Any, request: DataRequest, *, memory: int = MEMORY) -> Data:
    """Return a prepared data set; a split that is not named is searched for, or the last tenth is held out."""
    info = builder.info
    schema = _read_schema(info)
    train_split, eval_split = request.train_split, request.eval_split
    if eval_split and spelled(eval_split) in (ALL, HELD_OUT):  # any spelling, as of folders
        eval_split = ALL if spelled(eval_split) == ALL else None
    if not (train_split or eval_split) and set(info.splits) == {TRAIN}:
        train_split, eval_split = "train[:90%]", "train[90%:]"
        warnings.warn(f"{info.full_name} has no evaluation split: the last tenth of {TRAIN} is held out.", stacklevel=4)
    train_split = train_split or (TRAIN if TRAIN in info.splits else None)
    eval_split = eval_split or next((name for name in EVALUATION_SPLITS if name in info.splits), None)
    if schema.task is Segmentation and not schema.class_names:
        schema = schema._replace(class_names=_count_classes(info, [train_split, eval_split], schema))
    train, evaluation = (
        _open_split(info, name, schema, memory) if name else None for name in (train_split, eval_split)
    )
    return Data(
        name=info.full_name,
        train=train,
        evaluation=evaluation,
        eval_split=eval_split or "",
        num_classes=len(schema.class_names),
        class_names=schema.class_names,
        make_task=schema.task,
        multi_label=schema.multi_label,
    )


def _read_schema(info: Any) -> Schema:
    features = tfds().features
    pairs = [info.supervised_keys, *PAIRS]
    for image, label in (pair for pair in pairs if pair and len(pair) == 2 and set(pair) <= set(info.features)):
        schema = _label_schema(image, label, info.features[label])
        if schema and isinstance(info.features[image], features.Image):
            dtype = np.dtype(info.features[image].np_dtype)
            if dtype != np.uint8:
                raise ValueError(f"{info.full_name} has images of {dtype}. Expected: uint8")
            return schema
    raise ValueError(
        f"{info.full_name} is not for classification. Expected: an image and a class (or a sequence of classes), named"
        f" image and label or by the builder's supervised_keys, or a map of classes or depth. Received features:"
        f" {', '.join(info.features)}"
    )


def _label_schema(image: str, label: str, feature: Any) -> Schema | None:
    """Return the schema for the feature of a label: classes, or a map; None if it is another."""
    features = tfds().features
    multi_label = isinstance(feature, features.Sequence)
    kind = feature.feature if multi_label else feature
    if isinstance(kind, features.ClassLabel):
        return Schema(image, label, tuple(kind.names), multi_label)
    if isinstance(kind, features.Image) and kind.shape[-1] == 1 and np.dtype(kind.np_dtype) == np.uint8:
        has_names = bool(getattr(kind, "num_classes", None))
        return Schema(image, label, tuple(kind.names) if has_names else (), task=Segmentation)
    is_depth = isinstance(kind, features.Tensor) and np.dtype(kind.np_dtype).kind == "f" and len(kind.shape) == 2
    return Schema(image, label, task=Depth) if is_depth else None


def _count_classes(info: Any, names: Sequence[str | None], schema: Schema) -> tuple[str, ...]:
    """Return the numbers up to the largest in any mask of the splits: the features have no names."""
    parse = _make_parser(info.features, schema, info.name)
    largest = 0
    for name in filter(None, names):
        for index, record in RecordFiles(info.splits[name].file_instructions).stream(None):
            largest = max(largest, Segmentation.count_classes(parse(index, record)["label"].numpy()))
    return tuple(map(str, range(largest)))


def _open_split(info: Any, name: str, schema: Schema, memory: int) -> Split:
    title = f"{info.name} {name}"
    try:
        files = RecordFiles(info.splits[name].file_instructions)
    except (KeyError, ValueError, AssertionError) as error:
        raise ValueError(
            f"{info.full_name} has no split {name!r:.200}. Received splits: {', '.join(info.splits)}"
        ) from error
    parse = _make_parser(info.features, schema, title)
    file_format = info.file_format.value
    if file_format == "array_record":
        return array_record_split(title, files, parse)
    if file_format != "tfrecord":
        raise ValueError(f"{info.full_name} is stored as {file_format}. Expected: tfrecord or array_record")
    record_bytes = max(1, info.dataset_size // max(1, info.splits.total_num_examples))
    if files.count * record_bytes <= memory:
        return in_memory_split(title, files, parse)
    buffer = max(1, memory // record_bytes)
    check = functools.partial(files.check, parse)
    return RecordStream(name=title, count=files.count, files=files, parse=parse, buffer=buffer, check=check)


def _make_parser(features: Any, schema: Schema, title: str) -> Parse:
    """Return the function that reads the encoded image and the label of a record, and checks the label."""
    package = tfds()
    wanted = package.features.FeaturesDict({name: features[name] for name in (schema.image, schema.label)})
    num_classes = len(schema.class_names)

    def parse(index: tf.Tensor, record: tf.Tensor) -> Example:
        example = wanted.deserialize_example(record, decoders={schema.image: package.decode.SkipDecoding()})
        image, label = example[schema.image], example[schema.label]
        if schema.task is Classification:
            label = tf.cast(label, tf.int64)
            is_valid = (label >= 0) & (label < num_classes)  # test splits without labels often have -1
            message = f"label outside 0..{num_classes - 1}: {{}} in example {{}} of {title}"
            values = [label, index]
        else:
            label = label[..., 0] if schema.task is Segmentation else label
            header = jpeg_png.read_header(image)
            sides = jpeg_png.upright_sides(tf.cast(header.sides, tf.int32), header.orientation)
            is_valid = tf.shape(label) == sides
            message = f"A map of another size than its image: {{}}, {{}} in example {{}} of {title}"
            values = [tf.shape(label), sides, index]
        with tf.control_dependencies([tf.Assert(tf.reduce_all(is_valid), [tf.strings.format(message, values)])]):
            label = tf.identity(label)
        if schema.multi_label:  # an image may have no label, or the same label twice
            label = tf.clip_by_value(tf.reduce_sum(tf.one_hot(label, num_classes), axis=0), 0.0, 1.0)
        return {"image": image, "label": label}

    return parse
