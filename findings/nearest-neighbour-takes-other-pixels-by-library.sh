#!/usr/bin/env bash
# Guess: nearest neighbour has no parameters, so halving 8 pixels keeps the same 4 in every library.
# Fact: OpenCV's INTER_NEAREST keeps pixels 0, 2, 4, 6 (the left edge), Pillow and scikit-image 1, 3, 5, 7 (the
# centres), and scipy.ndimage.zoom 0, 2, 5, 7 (it aligns the corners).
# Why it matters: pictures are resized about the centres. Masks resized by OpenCV or SciPy are shifted against them
# by up to half a pixel of the smaller picture, which costs IoU on thin objects and cannot be seen.
# Instead: cv2.INTER_NEAREST_EXACT, and zoom(..., order=0, grid_mode=True, mode='nearest').
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 pillow==13.0.0 opencv-python-headless==5.0.0.93 scipy==1.17.1 scikit-image==0.26.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import cv2
import numpy as np
import PIL
import scipy
import skimage
from PIL import Image
from scipy import ndimage
from skimage.transform import resize

print("opencv", cv2.__version__, "pillow", PIL.__version__, "scipy", scipy.__version__, "skimage", skimage.__version__)
row = np.arange(8, dtype=np.uint8)[None]
kept = {
    "OpenCV INTER_NEAREST": cv2.resize(row, (4, 1), interpolation=cv2.INTER_NEAREST),
    "OpenCV INTER_NEAREST_EXACT": cv2.resize(row, (4, 1), interpolation=cv2.INTER_NEAREST_EXACT),
    "Pillow NEAREST": np.asarray(Image.fromarray(row).resize((4, 1), Image.Resampling.NEAREST)),
    "scikit-image order=0": resize(row, (1, 4), order=0, preserve_range=True),
    "SciPy zoom order=0": ndimage.zoom(row[0], 0.5, order=0),
    "SciPy zoom grid_mode": ndimage.zoom(row[0], 0.5, order=0, grid_mode=True, mode="nearest"),
}
kept = {name: np.ravel(pixels).astype(int).tolist() for name, pixels in kept.items()}
for name, pixels in kept.items():
    print(f"{name}: {pixels}")
assert kept["OpenCV INTER_NEAREST"] == [0, 2, 4, 6], "OpenCV takes the centres now"
assert kept["SciPy zoom order=0"] == [0, 2, 5, 7], "SciPy has another grid now"
centres = [1, 3, 5, 7]
assert kept["Pillow NEAREST"] == kept["scikit-image order=0"] == centres
assert kept["OpenCV INTER_NEAREST_EXACT"] == kept["SciPy zoom grid_mode"] == centres
PY
