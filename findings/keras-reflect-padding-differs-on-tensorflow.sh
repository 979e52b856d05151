#!/usr/bin/env bash
# Guess: keras.ops.image.map_coordinates(fill_mode='reflect') repeats the edge pixel at both sides (d c b a | a b c d
# | d c b a) on every back end.
# Fact: keras 3.15.1 on TensorFlow repeats it at the end, and not at the beginning: left of and above the picture
# everything is one pixel off. JAX and PyTorch follow the definition, and so does SciPy.
# Why it matters: elastic distortions and lens corrections sample outside; pictures (and masks) get another left
# border on the back end that one moved to.
# Instead: pad first with ops.pad(mode='symmetric') and shift the coordinates, or fill_mode='nearest'.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 scipy==1.17.1 keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 \
    tensorflow==2.21.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os
import subprocess
import sys

import numpy as np
from scipy import ndimage

code = """
import keras, numpy as np
coordinates = np.arange(-4, 9, dtype=np.float32)[None]
line = keras.ops.image.map_coordinates(np.arange(5, dtype=np.float32), coordinates, 1, fill_mode="reflect")
print(keras.__version__, *keras.ops.convert_to_numpy(line).astype(int))
"""
expected = ndimage.map_coordinates(np.arange(5.0), np.arange(-4, 9)[None], order=1, mode="reflect").astype(int).tolist()
print("SciPy:", expected)
found = {}
for backend in ("jax", "tensorflow"):
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    run = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    version, *line = run.stdout.split()
    found[backend] = [int(x) for x in line]
    print(f"keras {version} on {backend}: {found[backend]}")
assert found["jax"] == expected
assert found["tensorflow"][:4] != expected[:4], "TensorFlow reflects at the beginning now"
assert found["tensorflow"][4:] == expected[4:]
PY
