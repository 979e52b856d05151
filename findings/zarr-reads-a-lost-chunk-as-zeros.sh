#!/usr/bin/env bash
# Guess: an array whose chunk file was not copied, or was deleted, raises when that part is read.
# Fact: Zarr 3.1.6 gives the fill value, 0, for every chunk that is not there, in both file formats: a lost file and
# a chunk of zeros are the same. Nothing in the metadata says how many chunks there should be.
# Why it matters: A copy that was interrupted, or a bucket that listed too few objects, gives black tiles with
# labels; embeddings become zero vectors. Means and shapes look fine.
# Instead: compare array.nchunks_initialized with array.nchunks, write with config={'write_empty_chunks': True}, and
# use a fill value that cannot occur (NaN).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 zarr==3.1.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
from pathlib import Path

import numpy as np
import zarr

print("zarr", zarr.__version__, "numpy", np.__version__)
for number in (2, 3):
    path = Path(f"pictures-{number}.zarr")
    array = zarr.create_array(path, shape=(8, 8), chunks=(4, 4), dtype="f4", zarr_format=number)
    array[:] = 1
    chunks = sorted(p for p in path.rglob("*") if p.is_file() and "zarr" not in p.name and ".z" not in p.name)
    assert len(chunks) == 4
    chunks[0].unlink()
    again = zarr.open_array(path, mode="r")
    there = f"{again.nchunks_initialized} of {again.nchunks}"
    print(f"format {number}: sum {again[:].sum()} of 64, corner {again[0, 0]}, chunks there: {there}")
    assert again[:].sum() == 48 and again[0, 0] == 0, "a lost chunk is noticed now"
    assert (again.nchunks_initialized, again.nchunks) == (3, 4)
PY
