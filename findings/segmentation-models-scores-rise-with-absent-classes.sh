#!/usr/bin/env bash
# Guess: macro IoU of segmentation_models_pytorch is the mean over the classes that occur, and its accuracy is the
# share of right pixels.
# Fact: segmentation_models_pytorch 0.6.0 counts a class that is in neither mask with IoU 1 (zero_division=1.0), and
# accuracy counts every class that a pixel is not. Two classes with IoU 0.67 and 0.5, as 2 of 10: 0.92 and 95 %; as
# 2 of 150 still more.
# Why it matters: the same predictions score higher with a longer list of classes. Numbers cannot be compared with
# torchmetrics, Keras or a paper.
# Instead: iou_score(..., reduction='none') and the mean over classes with tp + fp + fn > 0; recall with
# reduction='micro' for the share of right pixels.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 torch==2.14.1 torchvision==0.29.1 timm==1.0.31 segmentation_models_pytorch==0.6.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")
import segmentation_models_pytorch as smp
import torch

print("segmentation_models_pytorch", smp.__version__, "torch", torch.__version__)
predicted = torch.zeros(1, 8, 8, dtype=torch.long)
predicted[0, :2] = 1
target = torch.zeros_like(predicted)
target[0, :4] = 1
scores = {}
for classes in (2, 10, 150):
    stats = smp.metrics.get_stats(predicted, target, mode="multiclass", num_classes=classes)
    iou = smp.metrics.iou_score(*stats, reduction="macro")
    accuracy = smp.metrics.accuracy(*stats, reduction="micro")
    recall = smp.metrics.recall(*stats, reduction="micro")
    scores[classes] = float(iou), float(accuracy), float(recall)
    print(f"{classes} classes: macro IoU {iou:.3f}, accuracy {accuracy:.3f}, micro recall {recall:.3f}")
right = float((predicted == target).float().mean())
print(f"by hand: IoU 0.667 and 0.5, mean 0.583; right pixels {right:.3f}")
assert abs(scores[2][0] - 7 / 12) < 1e-3 and abs(scores[2][1] - right) < 1e-3
assert scores[10][0] > 0.9 and scores[150][0] > 0.99, "absent classes are left out now"
assert scores[10][1] > 0.94 and scores[150][1] > 0.99, "accuracy is that of pixels now"
assert all(abs(score[2] - right) < 1e-3 for score in scores.values())
PY
