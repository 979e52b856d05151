"""Search in a million random vectors of 512 numbers: seconds beside reading them, peak memory, and NumPy's result.

    python benchmarks/search.py        # writes 4 GB of files to a temporary folder

The folder is like those of `keras-vit embed`: Parquet files of 4,096 rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keras_vit import batch

WIDTH, ROWS_PER_FILE, TOP = 512, 4096, 20


def write_vectors(folder: Path, rows: int) -> None:
    """Write random vectors of length 1 as a finished folder of `keras-vit embed`, and as the .npy file beside it."""
    folder.mkdir()
    random, count = np.random.default_rng(0), -(-rows // ROWS_PER_FILE)
    listing = pa.schema({"path": pa.binary()})
    array = np.lib.format.open_memmap(folder.with_suffix(".npy"), "w+", np.float32, (rows, WIDTH))
    with pq.ParquetWriter(folder / "_images.parquet", listing) as images:
        for number in range(count):
            names = [f"{row}.jpg" for row in range(number * ROWS_PER_FILE, min(rows, (number + 1) * ROWS_PER_FILE))]
            values = random.normal(size=(len(names), WIDTH)).astype(np.float32)
            values /= np.linalg.norm(values, axis=1, keepdims=True)
            array[number * ROWS_PER_FILE :][: len(names)] = values
            columns = [
                names,
                pa.FixedSizeListArray.from_arrays(values.ravel(), WIDTH),
                pa.nulls(len(names), pa.string()),
            ]
            table = pa.table(columns, ["path", "embeddings", "error"])
            pq.write_table(table, folder / f"part-{number:05}-of-{count:05}.parquet", row_group_size=ROWS_PER_FILE)
            images.write_table(pa.table([[name.encode() for name in names]], schema=listing))
    array.flush()
    facts = {"working_folder": "/", "what": "embeddings", "weights": "random"}
    (folder / "_run.json").write_text(json.dumps({**facts, "files": count, "images": rows, "records": 0}))


def read(folder: Path) -> None:
    """Read what a search reads, and nothing else."""
    for file in sorted(folder.glob("part-*")):
        with pq.ParquetFile(file) as table:
            for _ in table.iter_batches(ROWS_PER_FILE, columns=["path", "embeddings"]):
                pass


def timed(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function, print its seconds and those of processor time, and return its result."""
    start, used = time.perf_counter(), time.process_time()
    result = function(*arguments, **options)
    print(f"{name:<24} {time.perf_counter() - start:.2f} s, {time.process_time() - used:.2f} s of a core")
    return result


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "vectors"
        writer = multiprocessing.get_context("spawn").Process(target=write_vectors, args=(folder, rows))
        writer.start()  # in a process of its own, whose memory does not count
        writer.join()
        queries = np.random.default_rng(1).normal(size=(100, WIDTH)).astype(np.float32)
        batch.search(folder, queries[0], top=TOP)  # imports, and puts the files into the page cache
        for name, place, count in (
            ("folder, 1 query", folder, 1),
            ("folder, 100 queries", folder, 100),
            (".npy file, 1 query", folder.with_suffix(".npy"), 1),
        ):
            found = timed(name, batch.search, place, queries[:count], top=TOP)
        timed("reading the folder alone", read, folder)
        print(
            f"{'peak memory':<24} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MB, with TensorFlow"
        )
        array = np.load(folder.with_suffix(".npy"), mmap_mode="r")
        cosines = np.concatenate([array[n : n + 50_000] @ queries[0] for n in range(0, rows, 50_000)])
        best = np.argsort(-cosines, kind="stable")[:TOP].tolist()
        print(f"{'rows as NumPy finds them':<24} {[match.row for match in found[0]] == best}")


if __name__ == "__main__":
    main()
