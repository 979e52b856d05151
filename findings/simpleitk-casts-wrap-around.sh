#!/usr/bin/env bash
# Guess: sitk.Cast to uint8 limits values to 0..255 and rounds, as saving a picture does, and uint8 + uint8 does not
# wrap in a library for medical pictures.
# Fact: SimpleITK 2.5.7 wraps and cuts: 300 becomes 44, -5 becomes 251, 3.7 becomes 3. Sums of uint8 images wrap too
# (200 + 200 is 144), and in uint8 image * 1.5 the factor is cut to 1 (200 stays 200).
# Why it matters: bright bone becomes dark and air becomes bright in 8 bit previews and training pictures, in a few
# pixels of each.
# Instead: sitk.Clamp(image, sitk.sitkUInt8, 0, 255) or IntensityWindowing before the cast, and arithmetic in
# float32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 SimpleITK==2.5.7
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import SimpleITK as sitk

print("SimpleITK", sitk.Version_VersionString(), "numpy", np.__version__)
values = np.array([[300.0, -5.0, 3.7, 256.0]])
cast = sitk.GetArrayFromImage(sitk.Cast(sitk.GetImageFromArray(values), sitk.sitkUInt8))[0].tolist()
print("Cast to uint8:", values[0].tolist(), "->", cast)
assert cast == [44, 251, 3, 0], "Cast limits or rounds now"
image = sitk.GetImageFromArray(np.full((2, 2), 200, np.uint8))
total, scaled = image + image, image * 1.5
print("200 + 200:", total[0, 0], "200 * 1.5:", scaled[0, 0], scaled.GetPixelIDTypeAsString())
assert total[0, 0] == 144 and scaled[0, 0] == 200, "arithmetic is limited or widened now"
clamped = sitk.GetArrayFromImage(sitk.Clamp(sitk.GetImageFromArray(values), sitk.sitkUInt8, 0, 255))[0].tolist()
print("Clamp:", clamped)
assert clamped[0] == 255 and clamped[1] == 0
PY
