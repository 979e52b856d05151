#!/usr/bin/env bash
# Guess: top-5 accuracy of a model that gives the same logit to all 1,000 classes (a new head of zeros) is 0 or 0.5
# %.
# Fact: It is 100 % in keras 3.15.1: a class counts if its logit is among the five largest values, and ties all are.
# Accuracy of the same logits is 0.1 %. On JAX, logits that are all NaN give 100 % too.
# Why it matters: the evaluation before the first step of a fine-tuning shows 100 %, and so does a model that has
# broken down; in float16 and bfloat16 ties are frequent and lift the number.
# Instead: count the position of the label in ops.argsort, and check that logits are finite.
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
labels = np.arange(1000)


def top5(logits):
    metric = keras.metrics.SparseTopKCategoricalAccuracy(5)
    metric.update_state(labels, logits)
    return float(metric.result())


equal = np.zeros((1000, 1000), np.float32)
accuracy = keras.metrics.SparseCategoricalAccuracy()
accuracy.update_state(labels, equal)
print("equal logits: top-5", top5(equal), "accuracy", round(float(accuracy.result()), 4))
assert top5(equal) == 1, "ties are counted otherwise now"
assert float(accuracy.result()) < 0.002
nan = np.full((1000, 1000), np.nan, np.float32)
print("logits of NaN: top-5", top5(nan))
assert top5(nan) == 1, "NaN is not a hit on JAX now"
noise = np.random.default_rng(0).normal(size=(1000, 1000)).astype(np.float32)
print("noise: top-5", round(top5(noise), 4))
assert top5(noise) < 0.02
PY
