#!/usr/bin/env bash
# Guess: sklearn.preprocessing.normalize of float16 embeddings gives vectors of length 1 to three digits.
# Fact: scikit-learn 1.9.1 keeps float16 and sums the squares in it: from a length of 256 on the sum is infinite and
# every vector becomes zero, without an error. Shorter vectors come out right, and its cosine_similarity widens to
# float64 and is right at any length.
# Why it matters: features before a last layer norm have such lengths, and float16 is how they are stored. All
# similarities are then 0, and a probe on them learns the most frequent class.
# Instead: normalize(x.astype(np.float32)).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 scikit-learn==1.9.1
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import sklearn
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.preprocessing import normalize

print("scikit-learn", sklearn.__version__, "numpy", np.__version__)
single = np.random.default_rng(0).normal(size=(4, 768)).astype(np.float32)
single /= np.linalg.norm(single, axis=1, keepdims=True)
for length in (1, 200, 300):
    half = (single * length).astype(np.float16)
    unit = normalize(half)
    lengths = np.linalg.norm(unit.astype(np.float64), axis=1)
    print(f"length {length}: type {unit.dtype}, normalized to {lengths.round(4).tolist()}")
    assert unit.dtype == np.float16, "float16 is widened now"
    assert (lengths == 0).all() == (length == 300), "the limit is another one now"
    assert np.allclose(np.linalg.norm(normalize(half.astype(np.float32)), axis=1), 1)
    assert np.allclose(np.diag(cosine_similarity(half)), 1)
PY
