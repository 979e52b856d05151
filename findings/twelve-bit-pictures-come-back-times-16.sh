#!/usr/bin/env bash
# Guess: the 12 bit values 0 to 4095 of a JPEG 2000 or TIFF file come back as 0 to 4095.
# Fact: Pillow 13.0.0 multiplies those of JPEG 2000 by 16 and leaves those of TIFF; OpenCV 5.0.0 multiplies those of
# TIFF by 16 and leaves those of JPEG 2000. imagecodecs and tifffile leave both.
# Why it matters: CT and microscope pictures have 12 bits. One folder in two formats, or training with one reader
# and serving with another, differs in brightness by 16, and Hounsfield numbers or thresholds are wrong.
# Instead: read both with imagecodecs or tifffile, or compare one pixel with the number of bits in the header before
# scaling.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 pillow==13.0.0 opencv-python-headless==5.0.0.93 imagecodecs==2026.3.6 tifffile==2026.3.3
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import io

import cv2
import imagecodecs
import numpy as np
import PIL
import tifffile
from PIL import Image

print("pillow", PIL.__version__, "opencv", cv2.__version__, "imagecodecs", imagecodecs.__version__)
values = np.arange(4096, dtype=np.uint16).reshape(64, 64)
jpeg2000 = bytes(imagecodecs.jpeg2k_encode(values, level=0, bitspersample=12, reversible=True))
stream = io.BytesIO()
tifffile.imwrite(stream, values, bitspersample=12)
tiff = stream.getvalue()
largest = {}
for name, data, reference in (
    ("JPEG 2000", jpeg2000, imagecodecs.jpeg2k_decode(jpeg2000)),
    ("TIFF", tiff, tifffile.imread(io.BytesIO(tiff))),
):
    assert np.array_equal(reference, values)
    largest["Pillow", name] = int(np.asarray(Image.open(io.BytesIO(data))).max())
    largest["OpenCV", name] = int(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED).max())
for (reader, name), value in largest.items():
    print(f"{name} by {reader}: largest value {value}")
assert largest["Pillow", "JPEG 2000"] == 4095 * 16, "Pillow leaves JPEG 2000 now"
assert largest["Pillow", "TIFF"] == 4095
assert largest["OpenCV", "JPEG 2000"] == 4095
assert largest["OpenCV", "TIFF"] == 4095 * 16, "OpenCV leaves TIFF now"
PY
