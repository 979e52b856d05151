#!/usr/bin/env bash
# Guess: cv2.integral of an 8 bit picture is exact; it chooses a type that holds the sum.
# Fact: OpenCV 5.0.0 sums bytes in int32. From 2**31 / 255 = 8.4 million white pixels on the sum is negative or too
# small, without a word. Sums of boxes in between stay right only as long as one adds them in int32 as well.
# Why it matters: local means, contrast and 'share of background' of slides, aerial pictures and bright photos of 12
# megapixels are computed from it.
# Instead: cv2.integral(picture, sdepth=cv2.CV_64F).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 opencv-python-headless==5.0.0.93
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import cv2
import numpy as np

print("opencv", cv2.__version__, "numpy", np.__version__)
found = {}
for side in (2900, 3000, 6000):
    white = np.full((side, side), 255, np.uint8)
    plain, double = cv2.integral(white), cv2.integral(white, sdepth=cv2.CV_64F)
    found[side] = float(plain[-1, -1]) / (255 * side * side)
    print(f"{side} x {side} white: sum {plain[-1, -1]} ({plain.dtype}), exact {255 * side * side}, with sdepth {double[-1, -1]:.0f}")
    assert double[-1, -1] == 255 * side * side
assert found[2900] == 1
assert found[3000] < 0 and 0 < found[6000] < 0.1, "the sum is exact now"
PY
