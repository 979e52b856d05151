"""Find images in folders, patterns, lists and files of records, and read them one by one."""

import contextlib
import functools
import itertools
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from keras_vit._util import files
from keras_vit._util.checks import as_list
from keras_vit._util.files import MAX_BYTES, check_regular, count_records, read_file, read_limited
from keras_vit._util.text import error_reason, needs_extra
from keras_vit.errors import DownloadError
from keras_vit.model.classify import IMAGE_ERRORS
from keras_vit.model.pillow import is_jpeg_or_png

RECORDS = re.compile(r"\.(tfrecords?|array_?record)(-\d+-of-\d+)?$")
PATH_COLUMNS = ("path", "url")  # of a Parquet file; or else its only column of strings
IMAGE_FEATURES = ("image/encoded", "image")  # of a tf.train.Example; or else those that begin as image files do
MISSING = (404, 410)  # a server's answers for one image that does not exist; all others end the run
NETWORKS = ("aiohttp", "httpcore", "httpx", "requests", "urllib3")  # packages whose errors are those of a connection
ATTEMPTS = 3
PAUSE = 1.0  # seconds; doubled before each later attempt

Item = tuple[str, Callable[[], bytes]]  # the name of an image in its row, and the function that reads its file


def find(sources: str | list[str]) -> Iterator[str]:
    """Yield the paths and URLs of images and files of records; an ImportError names a missing package."""
    kinds: set[str] = set()
    for name in itertools.chain.from_iterable(map(_find, as_list(sources))):
        kind = name.partition("://")[0] if "://" in name else ""
        if kind not in kinds:
            kinds.add(kind)
            with contextlib.suppress(ValueError):  # an unknown protocol is the error of its row
                fsspec.get_filesystem_class(kind)
        if is_records(name) and ".tfrecord" not in name:
            _array_records()
        yield name


def _find(source: str) -> Iterator[str]:
    if source.endswith((".parquet", ".txt")) and "://" not in source:
        check_regular(Path(source))
    if source.endswith(".parquet"):
        yield from _read_parquet(source)
    elif source.endswith(".txt"):
        with fsspec.open(source, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                if "\0" in line:
                    raise ValueError(f"{source}: line {number} has a null character. Expected: UTF-8, one path a line")
                if name := line.strip():
                    yield name
    elif "://" in source:
        system, path = fsspec.core.url_to_fs(source)
        found = system.glob(path) if "*" in path else system.find(path)
        yield from sorted(system.unstrip_protocol(name) for name in found if _is_wanted(name))
    elif Path(source).is_dir():
        yield from files.walk([Path(source)], _is_wanted)
    else:
        yield from files.expand(source, _is_wanted)


def is_records(name: str) -> bool:
    """Check if a file has records instead of one image."""
    return RECORDS.search(name) is not None


def open_items(names: list[str], base: Path, max_bytes: int = MAX_BYTES) -> Iterator[Item]:
    """Yield the images of one output file: `names`, or the records of one file. Relative paths begin at `base`."""
    for name in names:
        place = name if "://" in name else str(base / name)
        if not is_records(name):
            yield name, functools.partial(_read_image, place, max_bytes)
            continue
        number = 0
        try:
            for number, record in enumerate(_read_records(place), 1):
                yield f"{name}#{number - 1}", functools.partial(_extract_image, record)
        except Exception as error:  # of a reader of records: TensorFlow's own too
            reason = f"This record and all after it cannot be read: {error_reason(str(error))}"
            yield f"{name}#{number}", functools.partial(_extract_image, ValueError(reason))


def _is_wanted(name: str) -> bool:
    return files.is_image(name) or is_records(name)


def _read_parquet(source: str) -> Iterator[str]:
    with fsspec.open(source, "rb") as file, pq.ParquetFile(file) as table:
        strings = [field.name for field in table.schema_arrow if field.type in (pa.string(), pa.large_string())]
        columns = [name for name in strings if name in PATH_COLUMNS or len(strings) == 1]
        if len(columns) != 1:
            raise ValueError(f"{source} needs one column of strings named path or url. Received: {strings}")
        for batch in table.iter_batches(columns=columns):
            if batch[columns[0]].null_count:
                raise ValueError(f"{source}: the column {columns[0]} has null in place of a path. Remove these rows")
            yield from batch[columns[0]].to_pylist()


def _read_image(place: str, max_bytes: int) -> bytes:
    if "://" not in place:
        return read_file(place, max_bytes)
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2**attempt)
        try:
            return _read_url(place, max_bytes)
        except Exception as error:  # of any package that reads URLs
            failure = _outage(error)
            if failure is None and isinstance(error, (*IMAGE_ERRORS, ImportError)):
                raise
            if failure is None:
                raise ValueError(_describe_error(error)) from error
    reason = f"Lost the network: {place[:200]} failed {ATTEMPTS} times ({_describe_error(failure)})"
    raise DownloadError(f"{reason}. Run the same command again when it answers, to go on from here") from failure


def _read_url(place: str, max_bytes: int) -> bytes:
    system, path = fsspec.core.url_to_fs(place)
    if isinstance(system, LocalFileSystem):
        return read_file(path, max_bytes)
    # Files of web servers in one request: in blocks, fsspec reads a body of unknown length at once.
    options = {"block_size": 0} if "http" in system.protocol or "https" in system.protocol else {}
    with system.open(path, "rb", **options) as file:
        return read_limited(file, place, max_bytes)


def _outage(error: BaseException | None) -> BaseException | None:
    """Find the failure of a network or server behind an error; fsspec raises a FileNotFoundError for it too."""
    while error is not None:
        status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return None if status in MISSING else error
        kind = type(error)
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror) or "Connect" in kind.__name__:
            return error
        if kind.__module__.partition(".")[0] in NETWORKS:
            return None if isinstance(error, ValueError) else error  # None for an invalid URL
        error = error.__cause__ or error.__context__
    return None


def _describe_error(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _read_records(place: str) -> Iterator[bytes]:
    if "://" not in place:
        check_regular(Path(place))
    if ".tfrecord" in place:
        import tensorflow as tf

        count, problem = count_records(place)
        yield from tf.data.TFRecordDataset(place).take(count).prefetch(1).as_numpy_iterator()
        if problem:
            raise ValueError(problem)
        return
    records = _array_records()(place)
    yield from map(records.__getitem__, range(len(records)))


def _array_records() -> Any:
    with needs_extra("A file of ArrayRecords", "train"):
        from array_record.python.array_record_data_source import ArrayRecordDataSource
    return ArrayRecordDataSource


def _extract_image(record: bytes | Exception) -> bytes:
    """Extract the image file from a record, the record itself or a feature of a tf.train.Example."""
    if isinstance(record, Exception):
        raise record
    if is_jpeg_or_png(record):
        return record
    import tensorflow as tf

    try:
        features = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # of protobuf: its class depends on the version
        raise ValueError(f"is neither an image nor a tf.train.Example: {error}") from None
    values = {name: feature.bytes_list.value[0] for name, feature in features.items() if feature.bytes_list.value}
    found = [values[name] for name in IMAGE_FEATURES if name in values] + list(filter(is_jpeg_or_png, values.values()))
    if not found:
        raise ValueError(f"has no image among its features {sorted(features)}")
    return bytes(found[0])
