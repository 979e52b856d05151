#!/usr/bin/env bash
# Guess: a uint16 NumPy array becomes a 16 bit PNG, as with Pillow and OpenCV.
# Fact: pyvips 3.2.0 (libvips 8.18) calls such an array "b-w", an 8 bit interpretation, and pngsave writes 8
# bits:
# every value above 255 becomes 255. No warning.
# Why it matters: masks with more than 255 classes or objects, depth maps and X-ray pictures are destroyed when
# saved.
# Instead: array.copy(interpretation="grey16") (colours: "rgb16") before pngsave, or pngsave(bitdepth=16), and
# read it back once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pyvips==3.2.0 pyvips-binary==8.18.7 pillow==13.0.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import pyvips
from PIL import Image

depth = np.array([[0, 200, 256, 300], [1000, 5000, 40000, 65535]], np.uint16)
image = pyvips.Image.new_from_array(depth)
image.pngsave("plain.png")
image.copy(interpretation="grey16").pngsave("grey16.png")
plain, grey16 = (np.asarray(Image.open(name)) for name in ("plain.png", "grey16.png"))
print("pyvips", pyvips.__version__, "libvips", *(pyvips.version(i) for i in range(3)))
print("interpretation:", image.interpretation, "format:", image.format)
print("as it is:", plain.dtype, plain.tolist())
print("as grey16:", grey16.dtype, grey16.tolist())
assert image.format == "ushort" and image.interpretation == "b-w"
assert plain.dtype == np.uint8, "16 bits are written now"
assert np.array_equal(plain, depth.clip(0, 255))
assert np.array_equal(grey16, depth)
PY
