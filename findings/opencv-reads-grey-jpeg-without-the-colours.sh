#!/usr/bin/env bash
# Guess: cv2.imread(file, IMREAD_GRAYSCALE) equals reading colours and cv2.cvtColor, within a level of rounding.
# Fact: OpenCV 5.0.0 takes the stored luma of a JPEG and skips its colours. With strong colours in small patches
# the decoded
# colours leave 0..255 and are cut, which the luma is not: the two differ by more than 10 levels.
# Why it matters: grey pictures of training (read grey) and of serving (colour, then grey) are not the same
# pictures.
# Instead: decode to RGB everywhere and convert in one place.
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

rows, columns = np.mgrid[:90, :120]
squares = np.where((columns // 4 + rows // 4) % 2, 255, 0)
stripes = np.where((columns // 6) % 2, 255, 0)
bars = np.where((rows // 5) % 2, 255, 0)
Image.fromarray(np.dstack([squares, stripes, bars]).astype(np.uint8)).save("a.jpg", quality=90)
direct = cv2.imread("a.jpg", cv2.IMREAD_GRAYSCALE).astype(int)
converted = cv2.cvtColor(cv2.imread("a.jpg"), cv2.COLOR_BGR2GRAY).astype(int)
pillow = np.asarray(Image.open("a.jpg").convert("L")).astype(int)
print("opencv", cv2.__version__, "Pillow", PIL.__version__, "numpy", np.__version__)
print("grey read - colour converted:", np.abs(direct - converted).max())
print("Pillow's convert - colour converted:", np.abs(pillow - converted).max())
assert np.abs(direct - converted).max() > 10, "both ways agree now"
assert np.abs(pillow - converted).max() <= 1
PY
