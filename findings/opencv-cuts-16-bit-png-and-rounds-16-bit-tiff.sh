#!/usr/bin/env bash
# Guess: the same 16 bit picture, read by cv2.imread with its default flag, gives the same 8 bit pixels from PNG
# and from TIFF.
# Fact: OpenCV 5.0.0 keeps the high byte of a PNG (value // 256) and rounds a TIFF (value / 257): a quarter of
# all values differ by one level. Pillow 13.0.0 keeps the high byte of the PNG, too.
# Why it matters: a bit-exact test of a pipeline, or a cache by the hash of the pixels, breaks when the
# container changes.
# Instead: IMREAD_UNCHANGED, and one conversion of your own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pillow==13.0.0 opencv-python-headless==5.0.0.93
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import cv2
import numpy as np
import PIL
from PIL import Image

values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
picture = np.dstack([values] * 3)
cv2.imwrite("a.png", picture)
cv2.imwrite("a.tif", picture)
assert np.array_equal(cv2.imread("a.png", cv2.IMREAD_UNCHANGED), picture)
assert np.array_equal(cv2.imread("a.tif", cv2.IMREAD_UNCHANGED), picture)
png, tif = cv2.imread("a.png").astype(int), cv2.imread("a.tif").astype(int)
print("opencv", cv2.__version__, "Pillow", PIL.__version__)
print("share of pixels that differ:", (png != tif).mean().round(3), "by", np.abs(png - tif).max())
assert np.array_equal(png, picture // 256)
assert np.array_equal(tif, np.floor(picture / 257 + 0.5)), "TIFF is not rounded now"
assert (png != tif).mean() > 0.2
assert np.array_equal(np.asarray(Image.open("a.png")), picture // 256)
PY
