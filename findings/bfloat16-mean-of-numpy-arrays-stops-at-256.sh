#!/usr/bin/env bash
# Guess: the mean of a bfloat16 array (as read from safetensors or a JAX checkpoint) is right to two digits.
# Fact: NumPy 2.4.6 adds bfloat16 of ml_dtypes 0.6.0 in bfloat16, and 256 + 1 is 256 there: the sum of 4,000
# ones is 256 and
# their mean is 0.064. float16 is widened by np.mean; this type is not.
# Why it matters: "mean and std of every tensor" is how one compares two checkpoints; such a report says nothing
# for bfloat16.
# Instead: x.astype(np.float32) before any sum, mean, norm or dot product.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import ml_dtypes
import numpy as np

print("numpy", np.__version__, "ml_dtypes", ml_dtypes.__version__)
ones = np.ones(4_000, ml_dtypes.bfloat16)
half = np.ones(4_000, np.float16)
print("bfloat16: sum", ones.sum(), "mean", ones.mean(), "float16: mean", half.mean())
assert float(ones.sum()) == 256, "the sum is not taken in bfloat16 now"
assert float(ones.mean()) < 0.07, "the mean is not taken in bfloat16 now"
assert float(half.mean()) == 1
assert ones.astype(np.float32).mean() == 1
weights = np.random.default_rng(0).normal(1, 0.1, (768, 768)).astype(ml_dtypes.bfloat16)
print("a kernel around 1: mean", weights.mean(), "exact", weights.astype(np.float32).mean())
assert float(weights.mean()) < 0.5
PY
