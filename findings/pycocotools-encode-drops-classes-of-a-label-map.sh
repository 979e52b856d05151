#!/usr/bin/env bash
# Guess: mask.encode takes every value that is not zero for foreground, or refuses values other than 0 and 1.
# Fact: pycocotools 2.0.11 starts a new run wherever the value changes, and every second run is foreground. Where
# class 1 borders on class 2, class 2 becomes background. A mask of 0 and 255 is right.
# Why it matters: 'the share of the picture that is not background' and the IoU of a label map are wrong, by what lies
# beside what.
# Instead: encode (labels == number) class by class, as uint8 in Fortran order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 pycocotools==2.0.11
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import importlib.metadata

import numpy as np
from pycocotools import mask

print("pycocotools", importlib.metadata.version("pycocotools"))
labels = np.zeros((4, 6), np.uint8)
labels[0], labels[1], labels[2] = 1, 2, 3
coded = mask.encode(np.asfortranarray(labels))
byte = mask.encode(np.asfortranarray((labels > 0) * np.uint8(255)))
print("label map", labels[:, 0].tolist(), "by row; decoded", mask.decode(coded)[:, 0].tolist())
print(f"pixels that are not 0: {(labels > 0).sum()}, area {mask.area(coded)}, of a mask of 0 and 255 {mask.area(byte)}")
assert mask.decode(coded)[:, 0].tolist() == [1, 0, 1, 0] and mask.area(coded) == 12, "label maps are told now"
assert mask.area(byte) == 18
PY
