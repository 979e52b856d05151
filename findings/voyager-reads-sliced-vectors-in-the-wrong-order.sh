#!/usr/bin/env bash
# Guess: add_items(vectors[:, :64]) stores the first 64 numbers of each row, as faiss, hnswlib and usearch do with
# such a view.
# Fact: voyager 2.2.3 takes the memory as if the rows followed each other: from the second row on it stores other
# numbers, without an error. The same happens with every second row and with an array in Fortran order.
# Why it matters: shortened embeddings (Matryoshka) and views of a memory map are slices. The index has the right
# size and finds something; only a comparison with the exact answer shows it.
# Instead: np.ascontiguousarray(vectors) before add_items and query.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 voyager==2.2.3 hnswlib==0.8.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

import hnswlib
import numpy as np
import voyager

print("voyager", version("voyager"), "hnswlib", version("hnswlib"), "numpy", np.__version__)
wide = np.random.default_rng(0).normal(size=(200, 128)).astype(np.float32)
short = np.ascontiguousarray(wide[:, :64])
inputs = {
    "contiguous": short,
    "first 64 columns": wide[:, :64],
    "every second row": short[::2],
    "Fortran order": np.asfortranarray(short),
}
for name, vectors in inputs.items():
    index = voyager.Index(voyager.Space.Euclidean, num_dimensions=64)
    index.add_items(vectors)
    error = np.abs(np.asarray(index.get_vectors(list(range(len(vectors))))) - vectors).max()
    other = hnswlib.Index("l2", 64)
    other.init_index(200)
    other.add_items(vectors)
    other_error = np.abs(np.asarray(other.get_items(np.arange(len(vectors)))) - vectors).max()
    print(f"{name}: largest difference of what is stored: voyager {error:.2f}, hnswlib {other_error:.2f}")
    assert other_error == 0
    assert (error == 0) == (name == "contiguous"), f"voyager reads {name} otherwise now"
PY
