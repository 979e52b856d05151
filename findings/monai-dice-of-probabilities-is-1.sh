#!/usr/bin/env bash
# Guess: DiceMetric takes probabilities for what they are (a soft Dice), or refuses them.
# Fact: MONAI 1.6.1 takes every value that is not zero for the class. Softmax outputs are nowhere zero, so every pixel
# counts as every class: a picture of one class scores 1.0 whatever is predicted, and two equal halves score 0.67.
# MeanIoU of the same arrays is a soft score.
# Why it matters: a forgotten argmax gives validation numbers that are high from the first epoch on, and the best
# epoch is chosen by them.
# Instead: argmax and one_hot first (AsDiscrete(argmax=True, to_onehot=n)); compare with a prediction that is known to
# be wrong.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 monai==1.6.1
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import monai
import torch
from monai.metrics import DiceMetric, MeanIoU
from monai.networks import one_hot

print("monai", monai.__version__, "torch", torch.__version__)
mask = torch.zeros(1, 3, 8, 8)
mask[:, 0] = 1
wrong = torch.full_like(mask, 0.4)
wrong[:, 0] = 0.2
classes = one_hot(wrong.argmax(1, keepdim=True), 3)


def score(metric, prediction):
    metric(prediction, mask)
    return float(metric.aggregate())


soft = score(DiceMetric(), wrong)
hard = score(DiceMetric(), classes)
iou = score(MeanIoU(), wrong)
print(f"every pixel wrong: Dice of probabilities {soft:.2f}, of classes {hard:.2f}; MeanIoU of probabilities {iou:.2f}")
assert soft == 1, "probabilities are refused or weighed now"
assert hard == 0 and iou < 0.5
PY
