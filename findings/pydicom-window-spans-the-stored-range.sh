#!/usr/bin/env bash
# Guess: apply_windowing maps the window to 0..255 or 0..1, or at least from 0 up: it prepares a picture for
# display.
# Fact: pydicom 3.0.2 maps it to the range that the stored bits can have after the rescale. A CT of 12 bits with
# intercept -1024
# gives -1024..3071, the same scan in signed 16 bits -33792..31743; so one window has as many scales as files
# have bit depths.
# Why it matters: astype(np.uint8) wraps these numbers, and dividing by the largest value of each file mixes
# scales in one data set.
# Instead: take Hounsfield units from apply_rescale and compute clip((hu - (center - width / 2)) / width, 0, 1)
# yourself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pydicom==3.0.2
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import pydicom
from pydicom.dataset import Dataset
from pydicom.pixels import apply_rescale, apply_windowing

print("pydicom", pydicom.__version__, "numpy", np.__version__)
hounsfield = np.array([-1024, -160, 40, 240, 1000])
ranges = {}
for name, bits, signed, intercept in (("12 bit", 12, 0, -1024), ("16 bit signed", 16, 1, -1024)):
    scan = Dataset()
    scan.BitsAllocated, scan.BitsStored, scan.PixelRepresentation = 16, bits, signed
    scan.PhotometricInterpretation = "MONOCHROME2"
    scan.RescaleSlope, scan.RescaleIntercept = 1, intercept
    scan.WindowCenter, scan.WindowWidth = 40, 400
    stored = (hounsfield - intercept).astype(np.int16 if signed else np.uint16)
    units = apply_rescale(stored, scan)
    shown = apply_windowing(units, scan)
    ranges[name] = shown.min(), shown.max()
    print(name, units.tolist(), "->", shown.round(1).tolist())
assert ranges["12 bit"] == (-1024, 3071), "another range"
assert ranges["16 bit signed"] == (-33792, 31743), "another range"
PY
