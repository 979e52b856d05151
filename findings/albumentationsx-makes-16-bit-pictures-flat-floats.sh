#!/usr/bin/env bash
# Guess: a transform that AlbumentationsX accepts for uint16 pictures returns uint16 pictures, and one that cannot
# do it raises.
# Fact: AlbumentationsX 2.5.1 does all three: Rotate keeps uint16, Sharpen raises KeyError, and MedianBlur, CLAHE,
# Equalize, Downscale and AutoContrast take the numbers for floats in 0..1, cut them at 1 and return a float32
# picture that is 1 everywhere.
# Why it matters: such a transform with p=0.2 in a pipeline for X-ray or satellite pictures makes every fifth
# picture plain white; Normalize and the training take it without an error, and accuracy is a little lower.
# Instead: bring the picture to float32 in 0..1 (ToFloat(max_value=65535)) before everything else, and check dtype
# and spread after the pipeline.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 opencv-python-headless==5.0.0.93 torch==2.14.1 albumentationsx==2.5.1
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os
import warnings

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
warnings.simplefilter("ignore")
import albumentations
import numpy as np

print("albumentationsx", albumentations.__version__, "numpy", np.__version__)
picture = np.random.default_rng(0).integers(0, 4096, (32, 32, 3), dtype=np.uint16)
for name in ("MedianBlur", "CLAHE", "Equalize", "Downscale", "AutoContrast"):
    changed = getattr(albumentations, name)(p=1)(image=picture)["image"]
    print(f"{name}: {changed.dtype}, mean {changed.mean():.3f}, from {changed.min()} to {changed.max()}")
    assert changed.dtype == np.float32, f"{name} keeps the type now"
    assert changed.max() <= 1, f"{name} keeps the values now"
turned = albumentations.Rotate(p=1)(image=picture)["image"]
print("Rotate:", turned.dtype, "up to", turned.max())
assert turned.dtype == np.uint16 and turned.max() > 255
try:
    albumentations.Sharpen(p=1)(image=picture)
except KeyError as error:
    print("Sharpen: KeyError", error)
else:
    raise AssertionError("Sharpen takes uint16 now")
as_float = albumentations.Compose([albumentations.ToFloat(max_value=65535), albumentations.MedianBlur(p=1)])
assert as_float(image=picture)["image"].std() > 0
PY
