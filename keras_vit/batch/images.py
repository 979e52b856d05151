"""Find images in folders, patterns, lists and files of records, and read them one by one."""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
from fsspec.implementations.local import LocalFileSystem

from keras_vit._util import image_paths
from keras_vit._util.image_paths import MAX_BYTES, check_regular, read_file, read_limited
from keras_vit._util.text import error_reason
from keras_vit._util.tfrecords import count_records
from keras_vit.model.images.jpeg_png import is_jpeg_or_png

RECORDS = re.compile(r"\.(tfrecords?|array_?record)(-\d+-of-\d+)?$")
PATH_COLUMNS = ("path", "url")  # of a Parquet file; or else its only column of strings
IMAGE_FEATURES = ("image/encoded", "image")  # of a tf.train.Example; or else those that begin as image files do

Item = tuple[str, Callable[[], bytes]]  # the name of an image in its row, and the function that reads its file


def find(source: str) -> Iterator[str]:
    """Yield the paths and URLs of images and of files of records, one at a time."""
    if source.endswith((".parquet", ".txt")) and "://" not in source and Path(source).exists():
        check_regular(Path(source))
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
        yield from image_paths.walk([Path(source)], _is_wanted)
    else:
        yield from image_paths.expand(source, _is_wanted)


def is_records(name: str) -> bool:
    """Return whether a file has records instead of one image."""
    return RECORDS.search(name) is not None


def open_items(names: list[str], base: Path, max_bytes: int = MAX_BYTES) -> Iterator[Item]:
    """Yield the images of one output file: `names`, or the records of one file. Relative paths begin at `base`."""
    for name in names:
        place = name if "://" in name else str(base / name)
        if not is_records(name):
            yield name, functools.partial(_read, place, max_bytes)
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


def _read(place: str, max_bytes: int) -> bytes:
    if "://" not in place:
        return read_file(place, max_bytes)
    system, path = fsspec.core.url_to_fs(place)
    if isinstance(system, LocalFileSystem):
        return read_file(path, max_bytes)
    # Files of web servers in one request: in blocks, fsspec reads a body of unknown length at once.
    options = {"block_size": 0} if "http" in system.protocol or "https" in system.protocol else {}
    with system.open(path, "rb", **options) as file:
        return read_limited(file, place, max_bytes)


def _read_records(place: str) -> Iterator[bytes]:
    if "://" not in place and Path(place).exists():
        check_regular(Path(place))
    if ".tfrecord" in place:
        count, problem = count_records(place)
        yield from tf.data.TFRecordDataset(place).take(count).prefetch(1).as_numpy_iterator()
        if problem:
            raise ValueError(problem)
        return
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    records = ArrayRecordDataSource(place)
    yield from map(records.__getitem__, range(len(records)))


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
