#!/usr/bin/env bash
# Guess: a CMYK JPEG without a profile gives about the same RGB everywhere, within a few levels.
# Fact: Pillow 13.0.0 and OpenCV 5.0.0 compute (255 - C) * (255 - K) / 255. libvips 8.18 assumes a printer's
# profile that it
# brings along: colours differ by more than 50 levels, as pure cyan is not (0, 255, 255) in print.
# Why it matters: scans and photos of print shops are CMYK. Thumbnails made by libvips (many web servers) and
# pictures read by
# Pillow get other embeddings.
# Instead: convert to RGB once, with the profile that the data's owner names, before anything is trained.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pillow==13.0.0 pyvips==3.2.0 pyvips-binary==8.18.7 opencv-python-headless==5.0.0.93
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import cv2
import numpy as np
import PIL
import pyvips
from PIL import Image

rows, columns = np.mgrid[:64, :64]
picture = np.dstack([columns * 4, rows * 4, 255 - columns * 4]).astype(np.uint8)
Image.fromarray(picture).convert("CMYK").save("print.jpg", quality=95)
pillow = np.asarray(Image.open("print.jpg").convert("RGB")).astype(int)
opencv = cv2.imread("print.jpg")[..., ::-1].astype(int)
vips = pyvips.Image.new_from_file("print.jpg").colourspace("srgb").numpy()[..., :3].astype(int)
print("Pillow", PIL.__version__, "opencv", cv2.__version__, "libvips", *(pyvips.version(i) for i in range(3)))
print("OpenCV - Pillow:", np.abs(opencv - pillow).max())
print("libvips - Pillow: largest", np.abs(vips - pillow).max(), "mean", round(np.abs(vips - pillow).mean(), 1))
assert np.abs(opencv - pillow).max() <= 2
assert np.abs(vips - pillow).max() > 50, "libvips computes without a profile now"
PY
