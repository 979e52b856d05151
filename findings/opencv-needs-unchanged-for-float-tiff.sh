#!/usr/bin/env bash
# Guess: cv2.imread with its default flag converts a float32 TIFF to 8 bits, by scaling or by cutting.
# Fact: OpenCV 5.0.0 returns None with IMREAD_COLOR and IMREAD_GRAYSCALE, as for a file that is not there, also
# for a TIFF that
# cv2.imwrite wrote; IMREAD_UNCHANGED reads it. So does IMREAD_GRAYSCALE | IMREAD_ANYDEPTH.
# Why it matters: depth maps, height models and reflectance are float TIFF; a loader that skips None skips them
# all.
# Instead: cv2.imread(path, cv2.IMREAD_UNCHANGED), and raise on None.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 tifffile==2026.3.3 opencv-python-headless==5.0.0.93
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import cv2
import numpy as np
import tifffile

depth = np.linspace(0, 12, 64, dtype=np.float32).reshape(8, 8)
cv2.imwrite("opencv.tif", depth)
tifffile.imwrite("tifffile.tif", depth)
print("opencv", cv2.__version__, "tifffile", tifffile.__version__)
for path in ("opencv.tif", "tifffile.tif"):
    colour, grey = cv2.imread(path), cv2.imread(path, cv2.IMREAD_GRAYSCALE)
    unchanged = cv2.imread(path, cv2.IMREAD_UNCHANGED)
    any_depth = cv2.imread(path, cv2.IMREAD_GRAYSCALE | cv2.IMREAD_ANYDEPTH)
    print(path, "colour:", type(colour), "grey:", type(grey), "unchanged:", unchanged.dtype)
    assert colour is None and grey is None, "float TIFF is read with the default flag now"
    assert np.array_equal(unchanged, depth)
    assert np.array_equal(any_depth, depth)
PY
