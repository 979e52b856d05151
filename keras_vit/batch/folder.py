"""Keep the state of a run in its output folder: what is computed, the list of images, and the finished files."""

import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from keras_vit._util.checks import as_list, given
from keras_vit._util.files import MAX_BYTES, check_results, hash_files, replacing, writing_result
from keras_vit._util.text import error_reason, escaped
from keras_vit.batch import images

# Readers of Parquet folders leave out names with an underscore, and patterns of file names the ending .listing. It is a
# Parquet file too.
RECORD = "_run.json"
LISTING = "_images.listing"
INPUTS = b"keras_vit.inputs"  # in an output file's schema: the `hash_files` of its images, from before they were read


class EmbedResult(NamedTuple):
    """The finished files of a folder: its path, the number of their rows, and of those the number with an error.

    Example:
        >>> keras_vit.batch.EmbedResult("vectors", rows=1000, errors=3).errors
        3
    """

    path: Path
    rows: int
    errors: int


@dataclass(frozen=True)
class Folder:
    """An output folder. File number `n` has the images of row group `n` of the listing."""

    path: Path
    record: Mapping[str, Any]
    max_bytes: int = MAX_BYTES  # of an image file

    def file(self, number: int) -> Path:
        """Path of an output file."""
        return self.path / f"part-{number:05}-of-{self.record['files']:05}.parquet"

    def names(self, number: int) -> list[str]:
        """List the images of an output file."""
        with pq.ParquetFile(self.path / LISTING) as listing:
            return list(map(os.fsdecode, listing.read_row_group(number)["path"].to_pylist()))

    def items(self, number: int) -> Iterator[images.Item]:
        """Yield the images of an output file."""
        return images.open_items(self.names(number), Path(self.record["working_folder"]), self.max_bytes)

    def hash_inputs(self, number: int) -> str:
        """Hash the names, sizes and times of the images of an output file."""
        return hash_files(self.names(number), Path(self.record["working_folder"]))

    def stale(self, first: int = 0, step: int = 1) -> list[int]:
        """List the numbers of finished files whose images have changed, from `first` each `step`-th."""
        numbers = (number for number in range(first, self.record["files"], step) if self.file(number).exists())
        known = ((number, pq.read_schema(self.file(number)).metadata[INPUTS]) for number in numbers)
        return [number for number, then in known if then != self.hash_inputs(number).encode()]

    def is_current(self) -> bool:
        """Check that the source has the images of the list, in its order. A source of URLs is not listed again."""
        sources = self.record["source"]
        if any("://" in source for source in as_list(sources)):
            return True
        return all(found == name for found, name in itertools.zip_longest(images.find(sources), self._listed()))

    def _listed(self) -> Iterator[str]:
        return itertools.chain.from_iterable(map(self.names, range(self.record["files"])))

    def describe_changes(self) -> str:
        """Compare the source with the list: "2 added, 0 removed, such as a.png"; "" if it has the same images."""
        if self.is_current():
            return ""
        counts = Counter(images.find(self.record["source"]))
        counts.subtract(Counter(self._listed()))
        added, removed = +counts, -counts
        example = next(iter([*added, *removed]), None)
        if example is None:
            return "the same images in another order"
        return f"{added.total():,} added, {removed.total():,} removed, such as {escaped(example)}"

    def read(self, name: str) -> bytes:
        """Read the image file of a row, from its path. Errors are those of the row, or of a network."""
        file, _, number = name.rpartition("#")
        is_record = images.is_records(file) and number.isdecimal()
        place, skipped = (file, int(number)) if is_record else (name, 0)
        items = images.open_items([place], Path(self.record["working_folder"]), self.max_bytes)
        item = next(itertools.islice(items, skipped, None), None)
        if item is None:
            raise ValueError(f"There is no record {name!r}")
        return item[1]()

    def finished(self) -> list[Path]:
        """List the finished files, in the order of their rows; raise a ValueError for a file of another run."""
        found = sorted(self.path.glob("part-*"))
        if foreign := {*found} - {self.file(number) for number in range(self.record["files"])}:
            raise ValueError(f"{min(foreign)} is not a file of this run: move it away")
        return found

    def unfinished(self, first: int, step: int, *, retry_errors: bool) -> list[int]:
        """List the output files from `first`, each `step`-th, that are not finished or have errors, by number."""
        paths = ((number, self.file(number)) for number in range(first, self.record["files"], step))
        return [number for number, path in paths if not path.exists() or (retry_errors and _count_rows(path)[1])]

    def note(self, **facts: Any) -> None:
        """Add facts to the record of the run."""
        with replacing(self.path / RECORD) as file:
            file.write(json.dumps({**json.loads((self.path / RECORD).read_bytes()), **facts}, indent=2).encode())

    def result(self) -> EmbedResult:
        """Count the rows of the finished files."""
        counts = [_count_rows(path) for path in self.finished()]
        return EmbedResult(self.path, sum(rows for rows, _ in counts), sum(errors for _, errors in counts))


def first_error(path: Path) -> str:
    """Name the first image of a finished folder that could not be read, and why; "" if all could."""
    for file in sorted(path.glob("part-*")):
        table = pq.read_table(file, columns=["path", "error"], partitioning=None)
        for row in table.filter(table["error"].is_valid()).slice(length=1).to_pylist():
            return f"{row['path']} {row['error']}"
    return ""


def _count_rows(path: Path) -> tuple[int, int]:
    """Count the rows and the errors in an output file; raise a ValueError for another or a damaged file."""
    try:
        errors = pq.read_table(path, columns=["error"], partitioning=None)["error"]
    except (pa.ArrowException, KeyError, OSError) as error:
        reason = f"is not a file of this run, or it is damaged: {error_reason(str(error))[:200]}"
        raise ValueError(f"{path} {reason}. Move it away, and run the same command again to compute it") from None
    return len(errors), len(errors) - errors.null_count


def open_folder(
    path: Path, facts: Mapping[str, Any], first: Mapping[str, Any], origin: Mapping[str, Any] | None = None
) -> Folder:
    """Start a new folder, or open that of a run to be continued; raise a ValueError if it has another run.

    `facts` are the same whenever the run is continued; `first` has the other fields of a new run's record. `origin`
    is what its field "model" says, which the records of older versions lack.
    """
    if not (path / RECORD).exists():  # a finished run may lie in a folder that is read only
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        with FileLock(path / ".lock"):  # one of several shards that start together lists the images
            try:
                if not (path / RECORD).exists():
                    _start(path, {**first, **facts, **given(model=origin)})
            except BaseException:
                if is_new:
                    shutil.rmtree(path, ignore_errors=True)
                raise
    record = _read_record(path, {name: value for name, value in {**first, **facts}.items() if name != "source"})
    changed = [name for name in facts if record.get(name) != facts[name]]
    if lines := [f"{name} was {record.get(name)!r:.200} and is now {facts[name]!r:.200}" for name in changed]:
        raise ValueError(f"{path} has another run: {'; '.join(lines)}. Choose a new folder")
    folder = Folder(path, record)
    folder.result()  # raises an error for a damaged file before the run, not after it
    return folder


def find_folder(path: Path) -> Folder:
    """Open the folder of a run; raise a FileNotFoundError if there is none."""
    if not (path / RECORD).is_file():
        raise FileNotFoundError(f"{path} is not a folder that keras-vit embed has written: it has no {RECORD}")
    return Folder(path, _read_record(path, {"what": "", "weights": "", "working_folder": ""}))


def _start(path: Path, facts: Mapping[str, Any]) -> None:
    """List the images of a new run and write its record."""
    if any(path.glob("part-*")):
        raise ValueError(f"{path} has Parquet files, but no {RECORD} of a run: choose a new folder")
    check_results([path / LISTING])
    counts = _write_listing(path / LISTING, facts["source"], facts["rows_per_file"])
    with replacing(path / RECORD) as file:
        file.write(json.dumps({**facts, **counts}, indent=2).encode())


def _read_record(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Read the record of a run; raise a ValueError if it or the listing is damaged."""
    try:
        record = json.loads((path / RECORD).read_bytes())
        for name, value in {**expected, "files": 1, "images": 0, "records": 0}.items():
            if type(record[name]) is not type(value):
                raise ValueError(f"{name} is {str(record[name])[:200]!r}")
        if not all(isinstance(source, str) for source in as_list(record["source"])):
            raise ValueError(f"source is {str(record['source'])[:200]!r}")
        listing = pq.read_metadata(path / LISTING)
        found = (listing.schema.names, listing.num_row_groups, listing.num_rows)
        if (wanted := (["path"], record["files"], record["images"] + record["records"])) != found:
            raise ValueError(f"{LISTING} has {found} and not {wanted}: its columns, files and images")
    except (ValueError, LookupError, TypeError, RecursionError, OSError, pa.ArrowException) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{path / RECORD} or {LISTING} is damaged ({reason}). Choose a new folder") from None
    return dict(record)


def _write_listing(path: Path, source: str | list[str], rows: int) -> dict[str, int]:
    """Write the list of images, a row group for each output file; return the numbers in it."""
    counts = {"files": 0, "images": 0, "records": 0}
    schema = pa.schema({"path": pa.binary()})  # names of files may have bytes that are not valid UTF-8
    with writing_result(path) as file, pq.ParquetWriter(file, schema) as writer:
        for has_records, names in itertools.groupby(images.find(source), images.is_records):
            while part := list(itertools.islice(names, 1 if has_records else rows)):
                writer.write_table(pa.table([list(map(os.fsencode, part))], schema=schema), row_group_size=rows)
                counts["files"] += 1
                counts["records" if has_records else "images"] += len(part)
        if not counts["files"]:
            raise FileNotFoundError(f"{source} has no images and no files of records")
    return counts
