#!/usr/bin/env bash
# Guess: keras.ops.cast(x, 'uint8') of values beyond 0..255 does one thing on one back end.
# Fact: keras 3.15.1 on JAX makes 255 of 300 and 0 of -1 if x is a JAX array, and 44 and 255 if x is a NumPy array,
# which is cast by NumPy. TensorFlow and PyTorch wrap like the latter.
# Why it matters: bicubic resizing and augmentation overshoot white; code that was tested under jit writes black
# specks into white areas when it is fed NumPy arrays, or on another back end.
# Instead: keras.ops.clip(keras.ops.round(x), 0, 255) before the cast (keras.ops.saturate_cast).
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
import warnings

import keras
import numpy as np

warnings.simplefilter("ignore")
print("keras", keras.__version__, "on", keras.backend.backend())
pixels = np.array([300.0, -1.0, 256.5, 128.0], np.float32)
own = np.asarray(keras.ops.cast(keras.ops.convert_to_tensor(pixels), "uint8")).tolist()
given = np.asarray(keras.ops.cast(pixels, "uint8")).tolist()
saturated = np.asarray(keras.ops.saturate_cast(pixels, "uint8")).tolist()
print(f"{pixels.tolist()}: as JAX array {own}, as NumPy array {given}, saturate_cast {saturated}")
assert own == [255, 0, 255, 128], "JAX wraps now"
assert given == [44, 255, 0, 128], "NumPy arrays saturate now"
assert saturated == [255, 0, 255, 128]
PY
