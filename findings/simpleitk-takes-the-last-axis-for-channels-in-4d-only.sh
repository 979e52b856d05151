#!/usr/bin/env bash
# Guess: GetImageFromArray treats every array alike: all axes are space, unless isVector says that the last one
# holds channels.
# Fact: SimpleITK 2.5.7 decides by the number of axes. (5, 6, 3) is a volume of 5 slices with 3 columns, and (4,
# 5, 6, 3) is a
# volume of 4 slices whose pixels have 3 channels: a series of 4 volumes with 3 columns is no series any more.
# Why it matters: an RGB picture is smoothed across its colours as if they were space, and a time series across
# space only.
# Instead: always pass isVector=True or False, and compare GetSize() and GetNumberOfComponentsPerPixel().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 SimpleITK==2.5.7
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import SimpleITK as sitk

print("SimpleITK", sitk.__version__, "numpy", np.__version__)
colour = sitk.GetImageFromArray(np.zeros((5, 6, 3), np.float32))
series = sitk.GetImageFromArray(np.zeros((4, 5, 6, 3), np.float32))
for name, image in (("(5, 6, 3)", colour), ("(4, 5, 6, 3)", series)):
    print(name, "-> size", image.GetSize(), "channels", image.GetNumberOfComponentsPerPixel())
assert colour.GetSize() == (3, 6, 5) and colour.GetNumberOfComponentsPerPixel() == 1
assert series.GetSize() == (6, 5, 4) and series.GetNumberOfComponentsPerPixel() == 3
picture = np.zeros((5, 6, 3), np.float32)
picture[..., 0] = 100  # pure red
smooth = sitk.GetArrayFromImage(sitk.DiscreteGaussian(sitk.GetImageFromArray(picture), 1.0))
print("pure red after a blur of space:", smooth[2, 3].round(1).tolist())
assert smooth[2, 3, 1] > 10, "red does not spread into green now"
told = sitk.GetImageFromArray(picture, isVector=True)
assert told.GetSize() == (6, 5) and told.GetNumberOfComponentsPerPixel() == 3
PY
