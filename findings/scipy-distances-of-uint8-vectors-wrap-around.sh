#!/usr/bin/env bash
# Guess: scipy.spatial.distance computes in float, as cdist does.
# Fact: SciPy 1.17.1 subtracts and multiplies in the type of the vectors. Of uint8 vectors euclidean, cityblock and
# chebyshev wrap around without a word (3,400 in place of 217), and cosine of int8, uint8 or int16 is 0 or raises from
# a square root. cdist, sqeuclidean and correlation are right.
# Why it matters: embeddings quantized to bytes and grey pictures are compared so; the nearest picture becomes the
# farthest.
# Instead: cast to float32 first, or use cdist.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 scipy==1.17.1
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import warnings

import numpy as np
import scipy
from scipy.spatial import distance

print("scipy", scipy.__version__, "numpy", np.__version__)
warnings.simplefilter("ignore", RuntimeWarning)  # of cosine alone: the others say nothing
rng = np.random.default_rng(1)
first = rng.integers(0, 100, 384).astype(np.uint8)
second = np.clip(first.astype(int) + rng.integers(-20, 20, 384), 0, 100).astype(np.uint8)
for name in ("euclidean", "cityblock", "chebyshev", "cosine"):
    measure = getattr(distance, name)
    bytes_, floats = float(measure(first, second)), float(measure(first.astype(float), second.astype(float)))
    table = float(distance.cdist(first[None], second[None], name)[0, 0])
    print(f"{name}: of uint8 {bytes_:.4f}, of float {floats:.4f}, cdist of uint8 {table:.4f}")
    assert abs(bytes_ - floats) > 0.5 * floats, f"{name} is computed in float now"
    assert abs(table - floats) < 1e-6 * max(1, floats)
PY
