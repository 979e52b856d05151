#!/usr/bin/env bash
# Guess: what safetensors.numpy.save_file accepts, load_file of the same package reads.
# Fact: safetensors 0.8.0 writes float8_e4m3fn arrays of ml_dtypes, and load_file raises AttributeError: it
# looks for
# np.float8_e4m3fn. bfloat16, which NumPy does not have either, goes both ways.
# Why it matters: a float8 checkpoint written on a machine without torch can't be read on it, and one such
# tensor stops the
# whole file, also for who wants the others.
# Instead: read the header and view the bytes as ml_dtypes.float8_e4m3fn, or store float8 as uint8 with the type
# in the metadata.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 ml_dtypes==0.6.0 safetensors==0.8.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

print("safetensors", safetensors.__version__, "numpy", np.__version__, "ml_dtypes", ml_dtypes.__version__)
save_file({"a": np.ones(2, ml_dtypes.bfloat16)}, "bfloat16.safetensors")
print("bfloat16:", load_file("bfloat16.safetensors")["a"].dtype)
assert load_file("bfloat16.safetensors")["a"].dtype == ml_dtypes.bfloat16
save_file({"a": np.ones(2, ml_dtypes.float8_e4m3fn)}, "float8.safetensors")
try:
    loaded = load_file("float8.safetensors")
except AttributeError as error:
    print("float8:", error)
    assert "float8_e4m3fn" in str(error)
else:
    raise AssertionError(f"float8 is read now: {loaded['a'].dtype}")
PY
