"""Find images in folders, patterns, lists and files of records, and read them one by one."""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from keras_vit._util import image_paths
from keras_vit._util.text import error_reason
from keras_vit.model.images.jpeg_png import is_jpeg_or_png
from keras_vit.model.preprocess import read_file

RECORDS = re.compile(r"\.(tfrecords?|array_?record)(-\d+-of-\d+)?$")
PATH_COLUMNS = ("path", "url")  # of a Parquet file; or else its only column of strings
IMAGE_FEATURES = ("image/encoded", "image")  # of a tf.train.Example; or else those that begin as image files do

Item = tuple[str, Callable[[], bytes]]  # the name of an image in its row, and the function that reads its file


def find(source: str) -> Iterator[str]:
    """Yield the paths and URLs of images and of files of records, one at a time."""
    if source.endswith(".parquet"):
        yield from _read_parquet(source)
    elif source.endswith(".txt"):
        with fsspec.open(source, "rt", encoding="utf-8", errors="surrogateescape") as file:
            yield from filter(None, map(str.strip, file))
    elif "://" in source:
        system, path = fsspec.core.url_to_fs(source)
        found = system.glob(path) if "*" in path else system.find(path)
        yield from sorted(system.unstrip_protocol(name) for name in found if _is_wanted(name))
    elif Path(source).is_dir():
        yield from image_paths.walk(Path(source), _is_wanted)
    else:
        yield from image_paths.expand(source, _is_wanted)


def is_records(name: str) -> bool:
    """Return whether a file has records instead of one image."""
    return RECORDS.search(name) is not None


def open_items(names: list[str], base: Path) -> Iterator[Item]:
    """Yield the images of one output file: `names`, or the records of one file. Relative paths begin at `base`."""
    for name in names:
        place = name if "://" in name else str(base / name)
        if not is_records(name):
            yield name, functools.partial(_read, place)
            continue
        number = 0
        try:
            for number, record in enumerate(_read_records(place), 1):
                yield f"{name}#{number - 1}", functools.partial(_image_of, record)
        except (OSError, RuntimeError, ValueError, tf.errors.OpError) as error:
            reason = f"This record and all after it cannot be read: {error_reason(str(error))}"
            yield f"{name}#{number}", functools.partial(_image_of, ValueError(reason))


def _is_wanted(name: str) -> bool:
    return image_paths.is_image(name) or is_records(name)


def _read_parquet(source: str) -> Iterator[str]:
    with fsspec.open(source, "rb") as file, pq.ParquetFile(file) as table:
        strings = [field.name for field in table.schema_arrow if field.type in (pa.string(), pa.large_string())]
        columns = [name for name in strings if name in PATH_COLUMNS or len(strings) == 1]
        if len(columns) != 1:
            raise ValueError(f"{source} needs one column of strings named path or url. Received: {strings}")
        for batch in table.iter_batches(columns=columns):
            yield from batch[columns[0]].to_pylist()


def _read(place: str) -> bytes:
    if "://" not in place:
        return read_file(place)
    with fsspec.open(place, "rb") as file:
        return bytes(file.read())


def _read_records(place: str) -> Iterator[bytes]:
    if ".tfrecord" in place:
        return iter(tf.data.TFRecordDataset(place).prefetch(1).as_numpy_iterator())
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    records = ArrayRecordDataSource(place)
    return map(records.__getitem__, range(len(records)))


def _image_of(record: bytes | Exception) -> bytes:
    """Return the image file in a record: the record itself, or a feature of a tf.train.Example."""
    if isinstance(record, Exception):
        raise record
    if is_jpeg_or_png(record):
        return record
    try:
        features = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # of protobuf: its class depends on the version
        raise ValueError(f"is neither an image nor a tf.train.Example: {error}") from None
    values = {name: feature.bytes_list.value[0] for name, feature in features.items() if feature.bytes_list.value}
    found = [values[name] for name in IMAGE_FEATURES if name in values] + list(filter(is_jpeg_or_png, values.values()))
    if not found:
        raise ValueError(f"has no image among its features {sorted(features)}")
    return bytes(found[0])
