"""Open data sets that tensorflow-datasets has prepared, by name or by folder, and prepare the digits."""

import dataclasses
import functools
import io
import os
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_vit._util.checks import expand_home
from keras_vit._util.files import cache_folder, count_records, hash_files
from keras_vit._util.text import error_reason, nearest, needs_extra, warn
from keras_vit.dense.map_tasks import Depth, Segmentation
from keras_vit.model import images
from keras_vit.model.task import Classification
from keras_vit.train.data.dataset_files import READ_ERRORS, hash64, list_files
from keras_vit.train.data.folder_source import ALL, HELD_OUT, TRAIN, normalize_name
from keras_vit.train.data.label_values import (
    MOST_MAPS,
    Tally,
    add_counts,
    choose_mask_values,
    count_metres,
    count_values,
)
from keras_vit.train.data.split import (
    LABELS_AT_ONCE,
    MAX_BATCHES,
    MAX_EXAMPLES,
    Data,
    DataRequest,
    Example,
    Indices,
    Order,
    RandomAccess,
    Split,
)

Parse = Callable[[tf.Tensor, tf.Tensor], Example]  # from the index and the record of an example
PREPARE_AGAIN = "Prepare the data set again"
INTERLEAVED_FILES = 16  # so that one shuffle buffer holds records of many files
DIGITS = "digits"
MARKER = "features.json"  # every prepared folder has this file
EVALUATION_SPLITS = ("validation", "val", "test")  # the first that exists is the evaluation split
MEMORY = 2**30  # bytes of records kept per split: all of them, or those in a shuffle buffer
RECORDS_AT_ONCE = 1024
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


class RecordFiles:
    """The files of a split in order; the index of an example counts through all of them.

    `instructions` are tensorflow-datasets' FileInstruction for each file: filename, skip, take.
    """

    def __init__(self, instructions: Sequence[Any]) -> None:
        self.instructions = instructions
        self._takes = np.array([file.take for file in instructions], np.int64)
        self.count = int(self._takes.sum())  # examples in all files

    def fingerprint(self) -> str:
        """Hash the names, sizes and times of the files, and which examples are read."""
        files = [os.fspath(file.filename) for file in self.instructions]
        return f"{hash_files(files)} {hash64(str([(file.skip, file.take) for file in self.instructions])):x}"

    def stream(self, seed: tf.Tensor | None) -> tf.data.Dataset:
        """Stream (index, TFRecord) of every example, file after file, or interleaved in an order given by a seed."""
        names, skips = [str(file.filename) for file in self.instructions], [file.skip for file in self.instructions]
        columns = (names, np.array(skips, np.int64), self._takes, np.cumsum(self._takes) - self._takes)
        if seed is None:
            return tf.data.Dataset.from_tensor_slices(columns).flat_map(_read_file)
        order = tf.random.experimental.stateless_shuffle(tf.range(len(names)), seed)
        files = tf.data.Dataset.from_tensor_slices(tuple(tf.gather(column, order) for column in columns))
        return files.interleave(_read_file, cycle_length=INTERLEAVED_FILES, num_parallel_calls=tf.data.AUTOTUNE)

    def check(self, parse: Parse) -> None:
        """Read all examples of TFRecords; raise a ValueError that names the first damaged file."""
        for file in self.instructions:
            _check_file(os.fsencode(file.filename), file.skip + file.take)
        index = 0
        try:
            for _ in self.stream(None).map(parse):
                index += 1
        except READ_ERRORS as error:
            raise ValueError(self.damage(index, error)) from error

    def damage(self, index: int, error: Exception) -> str:
        """Message about an example that cannot be read."""
        number = int(np.searchsorted(np.cumsum(self._takes), index, side="right"))
        filename = str(self.instructions[number].filename)
        reason = error_reason(getattr(error, "message", None) or str(error))
        return f"{filename!r}: example {index} of the split cannot be read: {reason}. {PREPARE_AGAIN}"


def _read_file(filename: tf.Tensor, skip: tf.Tensor, take: tf.Tensor, first: tf.Tensor) -> tf.data.Dataset:
    indices = tf.data.Dataset.range(first, first + take)
    filename = tf.numpy_function(_check_file, [filename, skip + take], tf.string, stateful=False)
    filename = tf.ensure_shape(filename, ())
    return tf.data.Dataset.zip(indices, tf.data.TFRecordDataset(filename).skip(skip).take(take))


def _check_file(filename: bytes, least: int) -> bytes:
    """Raise a ValueError if a file of TFRecords is cut off or has fewer records than `least`; return its name."""
    path = os.fsdecode(filename)
    try:
        count, problem = count_records(path)
    except (OSError, tf.errors.OpError) as error:
        raise ValueError(f"{path!r} cannot be read: {error_reason(str(error))}. {PREPARE_AGAIN}") from None
    if problem is None and count < least:
        problem = f"{path!r} has {count:,} records, and not {least:,} as the data set states"
    if problem:
        raise ValueError(f"{problem}. {PREPARE_AGAIN}")
    return filename


def in_memory_split(name: str, files: RecordFiles, parse: Parse) -> RandomAccess:
    """Create a split of TFRecords that is read into memory on first use."""

    @functools.cache
    def load_records() -> tf.Tensor:
        return tf.concat([*files.stream(None).map(lambda _, record: record).batch(RECORDS_AT_ONCE)], axis=0)

    def make_reader() -> Callable[[tf.Tensor], Example]:
        records = load_records()
        return lambda index: parse(index, records[index])

    return RandomAccess(
        name=name,
        count=files.count,
        make_reader=make_reader,
        check=lambda: files.check(parse),
        fingerprint=files.fingerprint,
    )


def array_record_split(name: str, files: RecordFiles, parse: Parse) -> RandomAccess:
    """Create a split of ArrayRecords, which are read by index."""

    def make_reader() -> Callable[[tf.Tensor], Example]:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        source = ArrayRecordDataSource(files.instructions)

        def read_record(number: np.int64) -> bytes:
            try:
                return bytes(source[int(number)])
            except RuntimeError as error:
                raise ValueError(files.damage(int(number), error)) from None

        def read(index: tf.Tensor) -> Example:
            record = tf.numpy_function(read_record, [index], tf.string, stateful=False)
            return parse(index, tf.ensure_shape(record, ()))

        return read

    return RandomAccess(name=name, count=files.count, make_reader=make_reader, fingerprint=files.fingerprint)


@dataclass(frozen=True, kw_only=True)
class RecordStream(Split):
    """A split of TFRecords too large for memory."""

    files: RecordFiles
    parse: Parse
    buffer: int  # number of records in the shuffle buffer

    def examples(self, order: Order) -> tf.data.Dataset:
        """See `Split`; records before the order's first are read and skipped."""
        first = order.start * order.batch
        epoch = first // self.count
        stream = tf.data.Dataset.range(epoch, MAX_BATCHES).flat_map(lambda number: self._epoch(order, number))
        stream = stream.enumerate(start=epoch * self.count).skip(first - epoch * self.count)

        def is_local(position: tf.Tensor, _: Any) -> tf.Tensor:
            place = position % order.batch
            return (place >= order.local.start) & (place < order.local.stop)

        return self._parse_all(stream.filter(is_local))

    def iterate_once(self, *, only: Indices | None = None, shard: int = 0, shards: int = 1) -> tf.data.Dataset:
        """See `Split`."""
        stream = self.files.stream(None)
        if only is None:
            stream = stream.filter(lambda index, _: index % shards == shard)
        else:
            is_chosen = np.zeros(self.count, bool)
            is_chosen[np.unique(only)[shard::shards]] = True
            mask = tf.constant(is_chosen)
            stream = stream.filter(lambda index, _: mask[index])
        return self._parse_all(stream.map(lambda index, record: (index, (index, record))))

    def labels(self) -> np.ndarray:
        """See `Split`."""
        return self.some_labels(self.count)

    def some_labels(self, most: int) -> np.ndarray:
        """See `Split`."""
        stream = self.iterate_once().map(lambda example: example["label"]).take(most).batch(LABELS_AT_ONCE)
        return np.concatenate(list(stream.as_numpy_iterator()))

    def _epoch(self, order: Order, number: tf.Tensor) -> tf.data.Dataset:
        if not order.shuffle:
            return self.files.stream(None)
        seed = tf.constant(np.uint64(order.seed).astype(np.int64))
        stream = self.files.stream(tf.stack([seed, number]))
        variant = tf.raw_ops.ShuffleDatasetV3(  # `stream.shuffle` adds TensorFlow's global seed
            input_dataset=tf.data.experimental.to_variant(stream),
            buffer_size=tf.constant(self.buffer, tf.int64),
            seed=seed,
            seed2=number + 1,  # never 0, because (0, 0) would mean a random shuffle
            seed_generator=tf.raw_ops.DummySeedGenerator(),
            reshuffle_each_iteration=False,
            output_types=[tf.int64, tf.string],
            output_shapes=[[], []],
        )
        return tf.data.experimental.from_variant(variant, stream.element_spec)

    def _parse_all(self, stream: tf.data.Dataset) -> tf.data.Dataset:
        def parse(position: tf.Tensor, indexed: tuple[tf.Tensor, tf.Tensor]) -> Example:
            index, record = indexed
            return {"position": position, "index": index, **self.renumbered(self.parse(index, record))}

        return stream.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def tfds(extra: str = "train") -> Any:
    """Import tensorflow_datasets, or raise an ImportError that says how to install it."""
    with needs_extra("This kind of data", extra):
        import importlib_resources  # noqa: F401  tensorflow-datasets 4.9.10 needs it without requiring it
        import tensorflow_datasets
    return tensorflow_datasets


def builder_named(name: str, data_dir: str | os.PathLike[str] | None) -> Any:
    """Find the builder of a prepared data set, such as "cifar10" or "name/config:version", or of the digits."""
    package = tfds("demo" if name == DIGITS else "train")
    data_dir = None if data_dir is None else os.fspath(data_dir)
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
    """Find the builder of a prepared folder, or of the only version in it; None where nothing is prepared."""
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
    """Write the digits on first use, while a lock makes other processes wait, and create their builder."""
    from filelock import FileLock

    from keras_vit.train.data.digits_dataset_builder import Builder

    is_local = data_dir is not None and "://" not in data_dir  # remote file systems have no locks
    folder = expand_home(data_dir) if data_dir and is_local else cache_folder() / "tfds"
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
    """Open a prepared data set; a split that is not named is searched for, or the last tenth is held out."""
    info = builder.info
    schema = _read_schema(info)
    train_split, eval_split = request.train_split, request.eval_split
    if eval_split and normalize_name(eval_split) in (ALL, HELD_OUT):  # any spelling, as of folders
        eval_split = ALL if normalize_name(eval_split) == ALL else None
    if not (train_split or eval_split) and set(info.splits) == {TRAIN}:
        train_split, eval_split = "train[:90%]", "train[90%:]"
        warn(f"{info.full_name} has no evaluation split: the last tenth of {TRAIN} is held out.")
    train_split = train_split or (TRAIN if TRAIN in info.splits else None)
    eval_split = eval_split or next((name for name in EVALUATION_SPLITS if name in info.splits), None)
    splits = [_open_split(info, name, schema, memory) if name else None for name in (train_split, eval_split)]
    if schema.task is Segmentation:
        splits, schema = _number_masks(info.full_name, splits, schema, request)
    elif schema.task is Depth:
        splits = [
            split and dataclasses.replace(split, tally=_tally_maps(split, MOST_MAPS, count_metres)) for split in splits
        ]
    train, evaluation = splits
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
    """Derive the schema from the feature of a label, classes or a map; None if it is another."""
    features = tfds().features
    multi_label = isinstance(feature, features.Sequence)
    kind = feature.feature if multi_label else feature
    if isinstance(kind, features.ClassLabel):
        return Schema(image, label, tuple(kind.names), multi_label)
    if isinstance(kind, features.Image) and kind.shape[-1] == 1 and np.dtype(kind.np_dtype).kind == "u":
        has_names = bool(getattr(kind, "num_classes", None))
        return Schema(image, label, tuple(kind.names) if has_names else (), task=Segmentation)
    is_depth = isinstance(kind, features.Tensor) and np.dtype(kind.np_dtype).kind == "f" and len(kind.shape) == 2
    return Schema(image, label, task=Depth) if is_depth else None


def _number_masks(
    name: str, splits: Sequence[Split | None], schema: Schema, request: DataRequest
) -> tuple[list[Split | None], Schema]:
    """Find the classes of masks: by the names of the features and some masks, or without names by all masks."""
    most = MOST_MAPS if schema.class_names else MAX_EXAMPLES  # the largest number decides how many classes there are
    raw = {place: _tally_maps(split, most, count_values) for place, split in enumerate(splits) if split}
    values = set().union(*(tally.counts for tally in raw.values()))
    num_classes = len(schema.class_names) or None
    mask_values = choose_mask_values(name, values, stated=request.values_of_masks, num_classes=num_classes)
    tallies = {place: tally.renumbered(mask_values) for place, tally in raw.items()}
    table = tf.constant(mask_values.table)

    def renumber(label: tf.Tensor) -> tf.Tensor:
        numbers = tf.gather(table, label)
        message = f"A mask of {name} must have the values {mask_values}. Received a mask with other values"
        with tf.control_dependencies([tf.debugging.assert_non_negative(numbers, message)]):
            return tf.cast(numbers, tf.uint8)

    numbered = [
        split and dataclasses.replace(split, renumber=renumber, tally=tallies[place])
        for place, split in enumerate(splits)
    ]
    return numbered, schema._replace(class_names=schema.class_names or mask_values.class_names(tallies.values()))


def _tally_maps(split: Split, most: int, count_map: Callable[[np.ndarray], dict[int, int]]) -> Tally:
    """Count the values in the maps of the first `most` examples of a split."""
    count = min(most, split.count)
    with split.naming_bad_image(Order(batch=1, shuffle=False), batches=count):
        examples = split.iterate_once(only=np.arange(count)).take(count)
        maps = examples.map(lambda example: example["label"]).as_numpy_iterator()
        return Tally(counts=add_counts(map(count_map, maps)), read=count, total=split.count)


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
    return RecordStream(
        name=title,
        count=files.count,
        files=files,
        parse=parse,
        buffer=buffer,
        check=check,
        fingerprint=files.fingerprint,
    )


def _make_parser(features: Any, schema: Schema, title: str) -> Parse:
    """Create the function that reads the encoded image and the label of a record, and checks the label."""
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
            label = tf.cast(label[..., 0], tf.int32) if schema.task is Segmentation else label
            header = images.read_header(image)
            sides = images.upright_sides(tf.cast(header.sides, tf.int32), header.orientation)
            is_valid = tf.shape(label) == sides
            message = f"A map of another size than its image: {{}}, {{}} in example {{}} of {title}"
            values = [tf.shape(label), sides, index]
        with tf.control_dependencies([tf.Assert(tf.reduce_all(is_valid), [tf.strings.format(message, values)])]):
            label = tf.identity(label)
        if schema.multi_label:  # an image may have no label, or the same label twice
            label = tf.clip_by_value(tf.reduce_sum(tf.one_hot(label, num_classes), axis=0), 0.0, 1.0)
        return {"image": image, "label": label}

    return parse
