#!/usr/bin/env bash
# Guess: readers agree on a grey TIFF in which 0 means white (fax, scanners, X-ray film): all invert it or none
# does.
# Fact: Pillow 13.0.0 inverts 8 bit files and leaves 16 bit files; OpenCV 5.0.0 does the same with
# IMREAD_UNCHANGED, and
# inverts 16 bit files with IMREAD_GRAYSCALE; tifffile 2026.3.3 never inverts.
# Why it matters: the same film, saved with 8 and with 16 bits, is a positive and a negative for the model.
# Instead: read with tifffile and invert where page.photometric is MINISWHITE.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pillow==13.0.0 tifffile==2026.3.3 opencv-python-headless==5.0.0.93
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import cv2
import numpy as np
import PIL
import tifffile
from PIL import Image

print("Pillow", PIL.__version__, "opencv", cv2.__version__, "tifffile", tifffile.__version__)
seen = {}
for bits, dtype in ((8, np.uint8), (16, np.uint16)):
    path, top = f"{bits}.tif", np.iinfo(dtype).max
    tifffile.imwrite(path, np.array([[0, top // 4], [top // 2, top]], dtype), photometric="miniswhite")
    readers = {
        "tifffile": tifffile.imread(path),
        "Pillow": np.asarray(Image.open(path)),
        "OpenCV unchanged": cv2.imread(path, cv2.IMREAD_UNCHANGED),
        "OpenCV grey": cv2.imread(path, cv2.IMREAD_GRAYSCALE),
    }
    for name, pixels in readers.items():
        seen[name, bits] = bool(pixels[0, 0] > pixels[1, 1])
        print(f"{bits} bit, {name}: {pixels.ravel().tolist()}, inverted: {seen[name, bits]}")
assert [seen[name, 8] for name in readers] == [False, True, True, True]
assert [seen[name, 16] for name in readers] == [False, False, False, True]
PY
