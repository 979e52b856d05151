#!/usr/bin/env bash
# Guess: log_loss of the same probabilities is the same number in float16, float32 and float64, up to rounding.
# Fact: scikit-learn 1.9.1 cuts probabilities at the machine epsilon of their type. One of three pictures predicted
# wrong with probability 1 gives 2.3 in float16, 5.3 in float32 and 12.0 in float64, all exactly representable 0s
# and 1s.
# Why it matters: the same model scored from torch (float32) and from a CSV file or pandas (float64) gets twice the
# loss; float16 outputs win every comparison.
# Instead: astype(np.float64) before scoring, and clip by a number that you choose and report.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 scikit-learn==1.9.1
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import sklearn
from sklearn.metrics import log_loss

print("scikit-learn", sklearn.__version__, "numpy", np.__version__)
labels = [0, 1, 1]
probabilities = np.array([[1, 0], [0, 1], [1, 0]])
losses = {t.__name__: log_loss(labels, probabilities.astype(t)) for t in (np.float16, np.float32, np.float64)}
print("log loss:", {name: round(float(loss), 3) for name, loss in losses.items()})
expected = {t: -np.log(np.finfo(t).eps) / 3 for t in losses}
print("-log(epsilon) / 3:", {name: round(float(loss), 3) for name, loss in expected.items()})
for name, loss in losses.items():
    assert abs(loss - expected[name]) < 0.01, f"{name} is cut elsewhere now"
assert losses["float64"] > 2 * losses["float32"] > 4 * losses["float16"]
PY
