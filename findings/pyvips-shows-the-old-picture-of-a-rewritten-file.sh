#!/usr/bin/env bash
# Guess: new_from_file reads the file that is there now.
# Fact: pyvips 3.2.0 (libvips 8.18) caches operations by their arguments. The same name gives the picture of the
# first call,
# also after the file was replaced by another picture; thumbnail of the same file shows the new one.
# Why it matters: a server that saves each upload under one name embeds the first picture again and again; a
# script that
# rewrites and checks its files checks the old ones.
# Instead: new_from_file(path, revalidate=True), new_from_buffer(bytes, ""), or pyvips.cache_set_max(0).
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

Image.new("RGB", (64, 64), (255, 0, 0)).save("upload.png")
first = pyvips.Image.new_from_file("upload.png").numpy()[0, 0].tolist()
Image.new("RGB", (64, 64), (0, 0, 255)).save("upload.png")
second = pyvips.Image.new_from_file("upload.png").numpy()[0, 0].tolist()
thumbnail = pyvips.Image.thumbnail("upload.png", 64).numpy()[0, 0].tolist()
fresh = pyvips.Image.new_from_file("upload.png", revalidate=True).numpy()[0, 0].tolist()
print("pyvips", pyvips.__version__, "libvips", *(pyvips.version(i) for i in range(3)), "numpy", np.__version__)
print("red file:", first, "replaced by a blue one:", second)
print("thumbnail:", thumbnail, "with revalidate:", fresh)
assert first == [255, 0, 0]
assert second == [255, 0, 0], "the new file is read now"
assert thumbnail == [0, 0, 255]
assert fresh == [0, 0, 255]
PY
