#!/usr/bin/env bash
# Guess: xr.open_zarr gives the numbers that zarr gives; only an attribute _FillValue masks any.
# Fact: in Zarr format 2, xarray 2026.9.0 takes the fill_value of an array for 'missing'. zarr 3.1.6 sets it to 0 by
# default, so every 0 becomes NaN and uint8 becomes float32, silently. In format 3 the same array keeps its zeros.
# Why it matters: background class, black pixels and zero features vanish from means (which skip NaN) and from masks;
# most published rasters are format 2.
# Instead: open_zarr(mask_and_scale=False), or write with fill_value=None.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 xarray==2026.9.0 zarr==3.1.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import warnings

import numpy as np
import xarray
import zarr

warnings.simplefilter("ignore")
print("xarray", xarray.__version__, "zarr", zarr.__version__)
mask = np.array([[0, 1], [2, 0]], np.uint8)
found = {}
for version in (2, 3):
    group = zarr.open_group(f"v{version}", mode="w", zarr_format=version)
    names = {"dimension_names": ["y", "x"]} if version == 3 else {}
    array = group.create_array("mask", data=mask, **names)
    if version == 2:
        array.attrs["_ARRAY_DIMENSIONS"] = ["y", "x"]
    opened = xarray.open_zarr(f"v{version}", consolidated=False)["mask"]
    found[version] = opened
    print(f"format {version}: zarr {array[:].tolist()}, xarray {opened.values.tolist()} {opened.dtype}, mean {opened.mean().item()}")
assert np.isnan(found[2].values[0, 0]) and found[2].mean().item() == 1.5, "zeros are kept now"
assert found[3].values.tolist() == mask.tolist() and found[3].dtype == np.uint8
raw = xarray.open_zarr("v2", consolidated=False, mask_and_scale=False)["mask"]
assert raw.values.tolist() == mask.tolist()
PY
