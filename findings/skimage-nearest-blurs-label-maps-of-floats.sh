#!/usr/bin/env bash
# Guess: resize(labels, size, order=0, preserve_range=True) picks pixels, so it returns only values of the input.
# Fact: scikit-image 0.26.0 does so for integer arrays. For the same labels as float32 its default
# (anti_aliasing=None) runs a Gaussian filter first, also with order=0: of 5 classes come hundreds of values.
# Why it matters: labels are floats after np.load, nibabel, a division or torch. Rounded, the blurred ones are other
# classes, and the mask still looks like a mask.
# Instead: anti_aliasing=False for labels, or labels.astype(np.uint8) first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 scikit-image==0.26.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import skimage
from skimage.transform import rescale, resize

print("scikit-image", skimage.__version__, "numpy", np.__version__)
labels = np.random.default_rng(0).integers(0, 5, (64, 64)).astype(np.uint8)
counts = {}
for dtype in (np.uint8, np.int32, np.float32, np.float64):
    smaller = resize(labels.astype(dtype), (20, 20), order=0, preserve_range=True)
    counts[dtype.__name__] = np.unique(smaller).size
print("different values after order=0:", counts)
assert counts["uint8"] == counts["int32"] == 5
assert counts["float32"] > 100 and counts["float64"] > 100, "floats are not filtered now"
assert np.unique(rescale(labels.astype(np.float32), 0.3, order=0, preserve_range=True)).size > 100
sharp = resize(labels.astype(np.float32), (20, 20), order=0, preserve_range=True, anti_aliasing=False)
assert np.unique(sharp).size == 5
whole = resize(labels, (20, 20), order=0, preserve_range=True)
blurred = resize(labels.astype(np.float32), (20, 20), order=0, preserve_range=True).round()
print("pixels of another class after rounding:", int((blurred != whole).sum()), "of 400")
assert (blurred != whole).mean() > 0.3
PY
