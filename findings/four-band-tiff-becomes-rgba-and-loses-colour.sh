#!/usr/bin/env bash
# Guess: a TIFF of four 8 bit bands (red, green, blue, near infrared) holds four equal bands; resizing treats
# each alone.
# Fact: tifffile 2026.3.3 marks the fourth band as alpha, unasked. Pillow 13.0.0 opens the file as RGBA, and its
# resize
# weighs colour by alpha: where near infrared is 0 (water), red, green and blue come out as 0 too.
# Why it matters: training on such pictures through Pillow sees black water, with no warning.
# Instead: write with photometric="minisblack", extrasamples=(0, 0, 0), planarconfig="contig", read with
# tifffile,
# and resize each band alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pillow==13.0.0 tifffile==2026.3.3
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import PIL
import tifffile
from PIL import Image

bands = np.zeros((8, 8, 4), np.uint8)
bands[..., :3] = 200  # bright in red, green and blue
bands[:, 4:, 3] = 255  # near infrared: 0 in the left half
tifffile.imwrite("bands.tif", bands)
print("tifffile", tifffile.__version__, "Pillow", PIL.__version__)
with tifffile.TiffFile("bands.tif") as file:
    extra = file.pages[0].extrasamples[0].name
image = Image.open("bands.tif")
small = np.asarray(image.resize((4, 4), Image.Resampling.BILINEAR))
alone = np.asarray(Image.fromarray(bands[..., :3]).resize((4, 4), Image.Resampling.BILINEAR))
print("fourth band:", extra, "mode:", image.mode)
print("left pixel of the resized file:", small[0, 0], "of three bands:", alone[0, 0])
assert extra == "UNASSALPHA" and image.mode == "RGBA"
assert np.array_equal(np.asarray(image), bands), "the stored values changed"
assert (small[0, 0, :3] == 0).all(), "colour is not weighted by the fourth band now"
assert (alone[0, 0] == 200).all()
PY
