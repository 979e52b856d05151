#!/usr/bin/env bash
# Guess: np.std and np.var of float16 use float32 inside, as np.mean does.
# Fact: NumPy 2.4.6 computes only mean in float32. var and std add up squares in float16: with 2,000 embeddings
# the spread is
# wrong in the second digit, with 50,000 it is infinite, and so is np.linalg.norm.
# Why it matters: embeddings are kept in float16; whitening and normalising with their mean and std gives zeros,
# without an error
# (NumPy may warn of an overflow).
# Instead: x.std(axis=0, dtype=np.float32), or convert to float32 first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import warnings

import numpy as np

warnings.simplefilter("ignore")
print("numpy", np.__version__)
for count in (2_000, 50_000):
    half = np.random.default_rng(0).normal(3, 1, (count, 4)).astype(np.float16)
    exact = half.astype(np.float64)
    print(count, "rows: mean", half.mean(0), "std", half.std(0), "exact", exact.std(0).round(4))
    assert np.allclose(half.mean(0), exact.mean(0), rtol=1e-3), "mean is not exact"
    assert np.allclose(half.std(0, dtype=np.float32), exact.std(0), rtol=1e-3)
    relative = np.abs(half.std(0) / exact.std(0) - 1).max()
    assert relative > 2e-3, "std is exact now"
assert np.isinf(half.std(0)).all(), "std of 50,000 rows is finite now"
assert np.isinf(np.linalg.norm(half, axis=0)).all(), "norm is finite now"
PY
