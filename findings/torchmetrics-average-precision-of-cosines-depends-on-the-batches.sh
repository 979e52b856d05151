#!/usr/bin/env bash
# Guess: average precision and AUROC depend on the order of the scores, so cosine similarities can be given in batches
# of any size.
# Fact: torchmetrics 1.9.0 decides batch by batch whether it got logits: if a score is below 0 or above 1, the whole
# batch goes through a sigmoid, and otherwise none of it. Small batches mix numbers around 0.55 with numbers around
# 0.2: an average precision of 0.94 becomes 0.83.
# Why it matters: zero-shot and retrieval scores of CLIP are such cosines, and the last or the only batch size decides
# the result.
# Instead: give (1 + cosine) / 2, or collect all scores and update once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 torchmetrics==1.9.0 scikit-learn==1.9.1
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import sklearn.metrics
import torch
import torchmetrics
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

print("torchmetrics", torchmetrics.__version__, "torch", torch.__version__)
rng = np.random.default_rng(0)
labels = rng.integers(0, 2, 2000)
cosines = np.clip(0.25 * labels + rng.normal(0.15, 0.12, 2000), -0.99, 0.99).astype(np.float32)


def score(kind, values, size):
    metric = kind()
    for i in range(0, len(values), size):
        metric.update(torch.from_numpy(values[i : i + size]), torch.from_numpy(labels[i : i + size]))
    return float(metric.compute())


exact = sklearn.metrics.average_precision_score(labels, cosines)
found = {size: score(BinaryAveragePrecision, cosines, size) for size in (2000, 20, 1)}
area = {size: score(BinaryAUROC, cosines, size) for size in (2000, 20, 1)}
moved = {size: score(BinaryAveragePrecision, (1 + cosines) / 2, size) for size in (2000, 20, 1)}
print(f"average precision: scikit-learn {exact:.3f}; by batch size {found}; of (1 + cosine) / 2 {moved}")
print(f"AUROC by batch size {area}")
assert abs(found[2000] - exact) < 1e-3 and all(abs(value - exact) < 1e-3 for value in moved.values())
assert found[20] < exact - 0.05 and found[1] < exact - 0.05, "the batches no longer matter"
assert area[20] < area[2000] - 0.05
PY
