#!/usr/bin/env bash
# Guess: imageio.v3.imread gives the type of the file: uint16 for a 16 bit PNG, grey or colour.
# Fact: imageio 2.38.1 (through Pillow 13.0.0) gives uint16 for grey and uint8 for colour: Pillow has no 16 bit
# colour.
# The values of a colour picture are the high bytes, so one factor of 1/65535 is right for one kind and 257
# times too dark for the other.
# Why it matters: a data set of raw exports mixes both kinds, and scaling by the type that one file had is wrong
# for the rest.
# Instead: read 16 bit PNG with imagecodecs or cv2.IMREAD_UNCHANGED, and scale by the dtype of each picture.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 imageio==2.38.1 imagecodecs==2026.3.6 pillow==13.0.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import imagecodecs
import imageio
import imageio.v3 as iio
import numpy as np
import PIL

values = np.random.default_rng(0).integers(0, 65536, (16, 16, 3)).astype(np.uint16)
for name, picture in (("grey.png", values[..., 0].copy()), ("colour.png", values)):
    with open(name, "wb") as file:
        file.write(imagecodecs.png_encode(picture))
grey, colour = iio.imread("grey.png"), iio.imread("colour.png")
with open("colour.png", "rb") as file:
    whole = imagecodecs.png_decode(file.read())
print("imageio", imageio.__version__, "Pillow", PIL.__version__, "imagecodecs", imagecodecs.__version__)
print("grey:", grey.dtype, "colour:", colour.dtype, "colour by imagecodecs:", whole.dtype)
assert grey.dtype == np.uint16 and np.array_equal(grey, values[..., 0])
assert colour.dtype == np.uint8, "16 bit colour is read now"
assert np.array_equal(colour, values >> 8)
assert np.array_equal(whole, values)
PY
