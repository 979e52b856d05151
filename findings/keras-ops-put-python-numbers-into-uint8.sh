#!/usr/bin/env bash
# Guess: keras.ops.equal(labels, -1) is False everywhere for uint8 labels, and clip(x, -3, 300) changes nothing; or
# both raise, as NumPy 2 does.
# Fact: keras 3.15.1 converts the Python number to the type of the array: -1 is 255 and 300 is 44. On JAX (and
# PyTorch) 255 equals -1, clip(5, -3, 300) is 44, and maximum(5, -1) is 255 on all back ends. On TensorFlow clip gives
# 253.
# Why it matters: label maps of bytes have 255 for 'void': a test for -1 finds them by accident on one back end, and
# bounds that are too wide destroy pictures.
# Instead: cast to int32 first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 keras==3.15.1 jax==0.10.2 jaxlib==0.10.2
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
from keras import ops

print("keras", keras.__version__, "on", keras.backend.backend(), "numpy", np.__version__)
labels = np.array([0, 5, 255], np.uint8)
equal = np.asarray(ops.equal(labels, -1)).tolist()
clipped = np.asarray(ops.clip(labels, -3, 300)).tolist()
larger = np.asarray(ops.maximum(labels, -1)).tolist()
wide = np.asarray(ops.clip(ops.cast(labels, "int32"), -3, 300)).tolist()
print(f"{labels.tolist()}: equal to -1 {equal}, clip(-3, 300) {clipped}, maximum(-1) {larger}; as int32 clip gives {wide}")
assert equal == [False, False, True], "-1 is no longer 255"
assert clipped == [44, 44, 44] and larger == [255, 255, 255], "bounds are kept or refused now"
assert wide == [0, 5, 255] and not (labels == -1).any()
try:
    np.maximum(labels, -1)
except OverflowError as error:
    print("NumPy:", error)
else:
    raise AssertionError("NumPy takes it now")
PY
