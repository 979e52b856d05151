"""Keep the state of a run in its output folder: what is computed, the list of images, and the finished files."""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from keras_vit._util.atomic import replacing
from keras_vit.batch import images
from keras_vit.batch.images import Item

RECORD, LISTING = "_run.json", "_images.parquet"  # readers of Parquet folders leave out names with an underscore


class Result(NamedTuple):
    """The finished files of a folder: its path, the number of their rows, and of those the number with an error."""

    path: Path
    rows: int
    errors: int

    def __str__(self) -> str:
        return f"{self.path}: {self.rows:,} rows, {self.errors:,} with an error"


@dataclass(frozen=True)
class Folder:
    """An output folder. File number `n` has the images of row group `n` of the listing."""

    path: Path
    record: Mapping[str, Any]

    def file(self, number: int) -> Path:
        """Return the path of an output file."""
        return self.path / f"part-{number:05}-of-{self.record['files']:05}.parquet"

    def items(self, number: int) -> Iterator[Item]:
        """Yield the images of an output file."""
        with pq.ParquetFile(self.path / LISTING) as listing:
            names = listing.read_row_group(number)["path"].to_pylist()
        return images.open_items(list(map(os.fsdecode, names)), Path(self.record["working_folder"]))

    def count(self, numbers: Sequence[int]) -> int | None:
        """Return the number of images of output files; None if some are in files of records."""
        groups = pq.read_metadata(self.path / LISTING)
        return None if self.record["records"] else sum(groups.row_group(number).num_rows for number in numbers)

    def result(self) -> Result:
        """Count the rows of the finished files from their metadata."""
        rows = errors = 0
        for path in filter(Path.exists, map(self.file, range(self.record["files"]))):
            metadata = pq.read_metadata(path)
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            valid = (group.column(group.num_columns - 1).statistics.null_count for group in groups)
            rows, errors = rows + metadata.num_rows, errors + metadata.num_rows - sum(valid)
        return Result(self.path, rows, errors)


def open_folder(path: Path, facts: Mapping[str, Any], first: Mapping[str, Any]) -> Folder:
    """Return a new folder, or that of a run to be continued; a ValueError if it has another run.

    `facts` are the same whenever the run is continued; `first` holds other fields of the record of a new run.
    """
    names = images.find(facts["source"])
    found = list(itertools.islice(names, 1)) if not (path / RECORD).exists() else []
    if not found and not (path / RECORD).exists():
        raise FileNotFoundError(f"{facts['source']} has no images and no files of records")
    path.mkdir(parents=True, exist_ok=True)
    with FileLock(path / ".lock"):  # one of several shards that start together lists the images
        if (path / RECORD).exists():
            record = json.loads((path / RECORD).read_bytes())
            if wrong := [f"{name} was {record.get(name)!r}" for name in facts if record.get(name) != facts[name]]:
                raise ValueError(f"{path} has another run: {', '.join(wrong)}. Choose a new folder. Received: {facts}")
        elif any(path.glob("part-*.parquet")):
            raise ValueError(f"{path} has Parquet files, but no {RECORD} of a run: choose a new folder")
        else:
            parts = _parts(itertools.chain(found, names), facts["rows_per_file"])
            record = {**first, **facts, **_write_listing(path / LISTING, parts)}
            with replacing(path / RECORD) as file:
                file.write(json.dumps(record, indent=2).encode())
    return Folder(path, record)


def _write_listing(path: Path, parts: Iterable[list[str]]) -> dict[str, int]:
    """Write the list of images, which files that are added later do not change; return the numbers in it."""
    counts = {"files": 0, "records": 0}
    schema = pa.schema({"path": pa.binary()})  # names of files may have bytes that are no text
    with replacing(path) as file, pq.ParquetWriter(file, schema) as writer:
        for names in parts:
            writer.write_table(pa.table([list(map(os.fsencode, names))], schema=schema), row_group_size=len(names))
            counts["files"] += 1
            counts["records"] += images.is_records(names[0])
    return counts


def _parts(names: Iterable[str], rows: int) -> Iterator[list[str]]:
    """Yield the names for each output file: at most `rows` images, or one file of records."""
    for has_records, group in itertools.groupby(names, images.is_records):
        while part := list(itertools.islice(group, 1 if has_records else rows)):
            yield part
