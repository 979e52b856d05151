#!/usr/bin/env bash
# Guess: keras.ops.image.gaussian_blur blurs both ways and keeps the mean, on every back end.
# Fact: keras 3.15.1 on JAX (and on PyTorch) blurs along the width only, and its kernel of size 3 and sigma 1 adds up
# to 0.73: a white picture becomes grey. On TensorFlow that kernel is right, and one of size (5, 3) is not symmetric.
# The layer RandomGaussianBlur has its own code, and keeps the mean.
# Why it matters: blurred positives for contrastive learning, or a low-pass filter before subsampling, are darker
# stripes on the back end that one moved to.
# Instead: a kernel of yours with keras.ops.depthwise_conv, tested on a picture of ones (keras-nightly
# 3.16.0.dev2026102704 is right).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 \
    tensorflow==2.21.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os
import subprocess
import sys

code = """
import keras, numpy as np
blur = keras.ops.image.gaussian_blur
white = keras.ops.convert_to_numpy(blur(np.ones((1, 9, 9, 3), np.float32), (3, 3), (1.0, 1.0)))[0, 4, 4, 0]
pixel = np.zeros((1, 9, 9, 1), np.float32)
pixel[0, 4, 4] = 1
square = keras.ops.convert_to_numpy(blur(pixel, (3, 3), (1.0, 1.0)))[0, :, :, 0]
oblong = keras.ops.convert_to_numpy(blur(pixel, (5, 3), (1.0, 1.0)))[0, :, :, 0]
layer = keras.layers.RandomGaussianBlur(1.0, kernel_size=3, sigma=(1.0, 1.0), value_range=(0, 1), seed=0)
kept = keras.ops.convert_to_numpy(layer(np.ones((1, 9, 9, 3), np.float32), training=True))[0, 4, 4, 0]
print(keras.__version__, white, (square > 0).any(1).sum(), (square > 0).any(0).sum(), abs(oblong - oblong[::-1]).max(), kept)
"""
found = {}
for backend in ("jax", "tensorflow"):
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    out = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    version, *numbers = out.split()
    white, rows, columns, skew, kept = map(float, numbers)
    found[backend] = white, rows, columns, skew
    print(f"keras {version} on {backend}: white becomes {white:.3f}, by the layer {kept:.3f}; a pixel of one spreads over "
          f"{rows:.0f} rows and {columns:.0f} columns; a kernel of (5, 3) differs from its mirror image by {skew:.2f}")
    assert abs(kept - 1) < 1e-4
assert found["jax"][0] < 0.8 and found["jax"][1:3] == (1, 3), "JAX blurs both ways now"
assert abs(found["tensorflow"][0] - 1) < 1e-4 and found["tensorflow"][1:3] == (3, 3)
assert found["tensorflow"][3] > 0.01, "oblong kernels are right on TensorFlow now"
PY
