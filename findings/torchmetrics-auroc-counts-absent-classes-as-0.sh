#!/usr/bin/env bash
# Guess: the macro AUROC leaves out a class that has no picture, as torchmetrics' average precision does, or raises as
# scikit-learn does.
# Fact: torchmetrics 1.9.0 counts it as 0: with perfect scores for 6 of 10 classes the macro AUROC is 0.6. The warning
# speaks of a 'true positive score', not of the mean, and comes once. MulticlassAveragePrecision gives NaN for these
# classes and a mean of 1.
# Why it matters: a validation folder without some of the 1,000 classes lowers the AUROC by their share.
# Instead: average=None, and the mean over the classes that occur.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 torchmetrics==1.9.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import warnings

import torch
import torchmetrics
from torchmetrics.classification import MulticlassAUROC, MulticlassAveragePrecision

warnings.simplefilter("ignore")
print("torchmetrics", torchmetrics.__version__, "torch", torch.__version__)
labels = torch.arange(6).repeat(5)
perfect = torch.nn.functional.one_hot(labels, 10).float()
area = float(MulticlassAUROC(10)(perfect, labels))
each = MulticlassAUROC(10, average=None)(perfect, labels)
precision = float(MulticlassAveragePrecision(10)(perfect, labels))
print(f"perfect scores, 6 of 10 classes occur: AUROC {area:.2f}, by class {each.tolist()}, average precision {precision:.2f}")
assert abs(area - 0.6) < 1e-6, "absent classes are left out now"
assert precision == 1 and float(each[labels.unique()].mean()) == 1
PY
