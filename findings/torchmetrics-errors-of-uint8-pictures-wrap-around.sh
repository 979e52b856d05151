#!/usr/bin/env bash
# Guess: torchmetrics casts integers to float before it subtracts them, as the line 'if not floating point: float()'
# in its code says.
# Fact: in torchmetrics 1.9.0 that test never casts. Mean absolute and squared error, R2 and the relative errors of
# uint8 wrap around: MSE is 2.5 in place of 16,258, and R2 is above 1. PSNR and the mean squared log error are right;
# SSIM and Pearson raise.
# Why it matters: predicted and true depth maps or reconstructions that were saved as PNG are compared so, and large
# errors become small ones.
# Instead: preds.float(), target.float().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 torchmetrics==1.9.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch
import torchmetrics
from torchmetrics import regression

print("torchmetrics", torchmetrics.__version__, "torch", torch.__version__)
predicted = torch.tensor([0, 255, 10, 20], dtype=torch.uint8)
target = torch.tensor([1, 0, 12, 18], dtype=torch.uint8)
found = {}
for name in ("MeanAbsoluteError", "MeanSquaredError", "R2Score", "MeanSquaredLogError"):
    metric = getattr(regression, name)
    found[name] = float(metric()(predicted, target)), float(metric()(predicted.float(), target.float()))
    print(f"{name}: of uint8 {found[name][0]:.3f}, of float32 {found[name][1]:.3f}")
assert found["MeanAbsoluteError"] == (191.5, 65), "integers are cast now"
assert found["MeanSquaredError"] == (2.5, 16258.5) and found["R2Score"][0] > 1 > found["R2Score"][1]
assert found["MeanSquaredLogError"][0] == found["MeanSquaredLogError"][1]
PY
