#!/usr/bin/env bash
# Guess: a (h, w, 3) array of uint16 in an Image column is kept, scaled to 8 bits, or refused.
# Fact: datasets 5.2.0 converts it to uint8 by dropping the upper byte: 300 becomes 44, 256 becomes 0. A grey uint16
# array is kept with 16 bits, and a float32 array of three channels raises.
# Why it matters: colour pictures of cameras, microscopes and satellites have 10 to 16 bits; the stored PNG looks
# like a contour map, and the original numbers are gone.
# Instead: (array // 257).astype(np.uint8), or an Array3D column of uint16.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pillow==13.0.0 datasets==5.2.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = str(Path("home").absolute())
warnings.simplefilter("ignore")
import datasets
import numpy as np

datasets.disable_progress_bars()
print("datasets", datasets.__version__, "numpy", np.__version__)
features = datasets.Features(image=datasets.Image())
colour = np.array([[[255, 256, 300], [40000, 65535, 512]]], np.uint16)
stored = np.asarray(datasets.Dataset.from_dict({"image": [colour]}, features=features)[0]["image"])
print("colour:", colour.tolist(), "->", stored.tolist(), stored.dtype)
assert np.array_equal(stored, colour % 256), "the values are scaled, kept or refused now"
grey = np.array([[255, 256], [300, 40000]], np.uint16)
kept = np.asarray(datasets.Dataset.from_dict({"image": [grey]}, features=features)[0]["image"])
print("grey:", kept.tolist(), kept.dtype)
assert np.array_equal(kept, grey)
PY
