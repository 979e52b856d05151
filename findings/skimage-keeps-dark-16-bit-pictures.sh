#!/usr/bin/env bash
# Guess: img_as_ubyte divides 16 bit pictures by 256 (or 257), whatever they show.
# Fact: scikit-image 0.26.0 looks at the largest value. Up to 255 it keeps the numbers as they are; from 256 on
# it divides.
# One more grey level in one pixel makes the whole picture 200 times darker, and only a dark picture comes out
# bright.
# Why it matters: X-ray, depth and satellite pictures use a part of the 16 bits. A folder read so has two
# brightness scales.
# Instead: divide by the fixed largest value of the sensor, in float32, and round yourself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 scikit-image==0.26.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import warnings

import numpy as np
import skimage

warnings.simplefilter("ignore")
dark = np.full((8, 8), 200, np.uint16)
dark[0, 0] = 255
brighter = dark.copy()
brighter[0, 0] = 256
print("scikit-image", skimage.__version__, "numpy", np.__version__)
kept, divided = skimage.img_as_ubyte(dark), skimage.img_as_ubyte(brighter)
print("largest value 255:", kept[4, 4], kept[0, 0])
print("largest value 256:", divided[4, 4], divided[0, 0])
assert kept.dtype == divided.dtype == np.uint8
assert kept[4, 4] == 200, "the dark picture is scaled now"
assert divided[4, 4] == 0, "the brighter picture is not scaled now"
PY
