#!/usr/bin/env bash
# Guess: every reader that links libjpeg gives the pixels that Pillow gives, within one level.
# Fact: so it is without chroma subsampling. With 4:2:0, what cameras and the web use, rasterio 1.4.4 (GDAL) and
# SimpleITK 2.5.7 repeat each colour sample over 2 x 2 pixels instead of interpolating it as Pillow 13.0.0 does:
# more than 10 levels apart at quality 95.
# Why it matters: a model that was trained on Pillow's pixels sees blocks of colour at edges when a geographic
# or medical
# program reads the same JPEG.
# Instead: decode JPEG files with Pillow or TensorFlow's INTEGER_ACCURATE, and use the other reader for its own
# formats.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pillow==13.0.0 rasterio==1.4.4 SimpleITK==2.5.7
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import warnings

import numpy as np
import PIL
import rasterio
import SimpleITK
from PIL import Image

warnings.simplefilter("ignore")
rows, columns = np.mgrid[:90, :120]
waves = [127 + 120 * np.sin(columns / (7 + 3 * i) + rows / (9 - 2 * i)) for i in range(3)]
picture = Image.fromarray(np.stack(waves, -1).clip(0, 255).astype(np.uint8))
print("rasterio", rasterio.__version__, "SimpleITK", SimpleITK.__version__, "Pillow", PIL.__version__)
for name, sampling in (("4:4:4", 0), ("4:2:0", 2)):
    path = f"{sampling}.jpg"
    picture.save(path, quality=95, subsampling=sampling)
    expected = np.asarray(Image.open(path)).astype(int)
    with rasterio.open(path) as file:
        gdal = file.read().transpose(1, 2, 0).astype(int)
    itk = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(path)).astype(int)
    errors = np.abs(gdal - expected).max(), np.abs(itk - expected).max()
    print(name, "largest difference to Pillow: rasterio", errors[0], "SimpleITK", errors[1])
    if sampling:
        assert min(errors) > 10, "the colours are interpolated now"
    else:
        assert max(errors) <= 2
PY
