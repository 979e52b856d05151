#!/usr/bin/env bash
# Guess: a cast to float8_e4m3fn treats 1,000 the same way in every library, as it is one format.
# Fact: PyTorch 2.14.1 saturates: 1,000 and infinity become 448. ml_dtypes 0.6.0, and JAX and Keras on JAX with it,
# give NaN from 465 on. float8_e5m2 overflows to infinity in both.
# Why it matters: weights or activations quantized without a scale in PyTorch look fine, and the same code on JAX is
# full of NaN; a comparison in PyTorch hides that the scale is missing.
# Instead: divide by amax / 448 first, and clip before the cast.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 ml_dtypes==0.6.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import ml_dtypes
import numpy as np
import torch

print("torch", torch.__version__, "ml_dtypes", ml_dtypes.__version__)
values = np.array([448, 464, 465, 1000, -1e9, np.inf], np.float32)
found = {}
for name in ("float8_e4m3fn", "float8_e5m2"):
    in_torch = torch.from_numpy(values).to(getattr(torch, name)).float().tolist()
    with np.errstate(all="ignore"):
        in_numpy = values.astype(getattr(ml_dtypes, name)).astype(np.float32).tolist()
    found[name] = in_torch, in_numpy
    print(f"{name} of {values.tolist()}: torch {in_torch}, ml_dtypes {in_numpy}")
assert found["float8_e4m3fn"][0] == [448, 448, 448, 448, -448, 448], "torch no longer saturates"
assert found["float8_e4m3fn"][1][:2] == [448, 448] and np.isnan(found["float8_e4m3fn"][1][2:]).all()
assert str(found["float8_e5m2"][0]) == str(found["float8_e5m2"][1]) and found["float8_e5m2"][0][5] == np.inf
PY
