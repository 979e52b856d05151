#!/usr/bin/env bash
# Guess: asking a usearch index of 3 vectors for the best 10 gives 3 keys, for many queries as for one.
# Fact: usearch 2.26.6 gives 3 keys for one query. For several queries the array of keys has 10 columns, and what is
# missing is key 0, with a distance of 0 or of whatever was there: the first picture of the archive looks like a
# hit.
# Why it matters: small collections, filters and tests: labels[matches.keys] gives the label of picture 0 for every
# gap, and a vote among neighbours goes to its class.
# Instead: cut each row at matches.counts, or iterate over the matches; or never use 0 as a key.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 usearch==2.26.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import usearch
from usearch.index import Index

print("usearch", usearch.__version__, "numpy", np.__version__)
vectors = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
index = Index(ndim=64, metric="cos", dtype="f32")
index.add(np.array([0, 1, 2]), vectors)
one = index.search(vectors[0], 10)
many = index.search(vectors[:2], 10)
print("one query:", np.asarray(one.keys).tolist())
print("two queries:", np.asarray(many.keys).tolist(), "counts", np.asarray(many.counts).tolist())
assert len(one.keys) == 3
assert many.keys.shape == (2, 10) and list(many.counts) == [3, 3]
assert (np.asarray(many.keys)[:, 3:] == 0).all(), "gaps have another key now"
labels = np.array(["cat", "dog", "car"])
votes = labels[np.asarray(many.keys)[1].astype(int)]
print("labels of the second query's neighbours:", votes.tolist())
assert (votes == "cat").sum() == 8
PY
