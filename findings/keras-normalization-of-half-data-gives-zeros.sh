#!/usr/bin/env bash
# Guess: Normalization().adapt(x) on float16 features gives mean and variance to about three digits, since the
# layer's own numbers are float32.
# Fact: keras 3.15.1 computes the moments in the type of the data: with a mean of 100 and a spread of 10 the
# variance is infinite, and the layer returns 0 for every input. With a mean of 0.5 and a spread of 0.1 the variance
# is 1.6 times too large.
# Why it matters: stored embeddings are float16. A head on such a layer sees constants; the loss falls to that of
# the class frequencies and stays.
# Instead: adapt(x.astype('float32')), and check that layer.variance is finite.
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

print("keras", keras.__version__, "on", keras.backend.backend())


def adapted(mean, spread, dtype):
    values = np.random.default_rng(0).normal(mean, spread, (5000, 3)).astype(dtype)
    layer = keras.layers.Normalization()
    layer.adapt(values)
    return layer, float(np.asarray(layer.variance).ravel()[0])


for mean, spread in ((100, 10), (0.5, 0.1)):
    print(f"variance {spread**2:.4g}:", {t: adapted(mean, spread, t)[1] for t in ("float16", "float32")})
layer, variance = adapted(100, 10, "float16")
assert np.isinf(variance), "float16 is widened now"
result = np.asarray(layer(np.array([[80, 100, 140]], np.float32)))
print("80, 100 and 140 become", result.tolist())
assert (result == 0).all()
assert adapted(0.5, 0.1, "float16")[1] > 0.013
assert abs(adapted(100, 10, "float32")[1] - 100) < 5
PY
