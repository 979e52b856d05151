#!/usr/bin/env bash
# Guess: scikit-learn's regression metrics cast integers to float, as mean_absolute_error does.
# Fact: in scikit-learn 1.9.1 max_error and median_absolute_error subtract unsigned integers as they are. Of depth
# maps in millimetres that are at most 10 apart, max_error is 65,535 and the median error doubles; the mean error of
# the same arrays is right.
# Why it matters: a depth model is judged by them; of bytes (0..255) the numbers are wrong by less, and plausible.
# Instead: cast both arrays to float32 or int32 first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 scikit-learn==1.9.1
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import sklearn
from sklearn import metrics

print("scikit-learn", sklearn.__version__, "numpy", np.__version__)
rng = np.random.default_rng(1)
depth = rng.integers(1000, 5000, 100_000)
predicted = depth + rng.integers(-10, 11, depth.size)
for name, changes in (("mean_absolute_error", False), ("median_absolute_error", True), ("max_error", True)):
    measure = getattr(metrics, name)
    integers = float(measure(depth.astype(np.uint16), predicted.astype(np.uint16)))
    floats = float(measure(depth.astype(float), predicted.astype(float)))
    print(f"{name}: of uint16 {integers:.4g}, of float {floats:.4g}")
    assert (abs(integers - floats) > 1) == changes, f"{name} has changed"
PY
