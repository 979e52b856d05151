#!/usr/bin/env bash
# Guess: keras.metrics.MeanAbsoluteError of two uint8 pictures is that of their floats, as the loss class gives it.
# Fact: keras 3.15.1 casts the target to the type of the prediction, and subtracts and squares in it. Of uint8 the
# difference of 0 and 1 counts as 255, and 255 squared is 1: MeanSquaredError is 1 in place of 32,513. The class
# MeanSquaredError of the losses casts to float first.
# Why it matters: decoded depth maps, masks and reconstructions are bytes when one compares files, and small errors
# look large or the other way round.
# Instead: cast both to float32 before update_state.
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
target, picture = np.array([[0, 255]], np.uint8), np.array([[1, 0]], np.uint8)


def result(kind, dtype):
    metric = kind()
    metric.update_state(target.astype(dtype), picture.astype(dtype))
    return float(metric.result())


for kind, exact in ((keras.metrics.MeanAbsoluteError, 128), (keras.metrics.MeanSquaredError, 32513)):
    of_bytes, of_floats = result(kind, "uint8"), result(kind, "float32")
    print(f"{kind.__name__}: of uint8 {of_bytes}, of float32 {of_floats}")
    assert of_floats == exact
    assert of_bytes != exact, f"{kind.__name__} casts now"
loss = float(keras.losses.MeanSquaredError()(target, picture))
print("keras.losses.MeanSquaredError() of uint8:", loss)
assert loss == 32513
metric = keras.metrics.MeanAbsoluteError()
metric.update_state(np.array([0.9, 0.9], np.float32), np.array([1, 1], np.uint8))
print("targets of 0.9, predictions of 1 as uint8: mean absolute error", float(metric.result()))
assert float(metric.result()) == 255, "the targets keep their type now"
PY
