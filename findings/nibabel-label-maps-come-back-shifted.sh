#!/usr/bin/env bash
# Guess: labels 0 to 7, read by get_fdata, changed and saved with the header of the uint8 file, come back as 0
# to 7.
# Fact: get_fdata gives float64, and nibabel 5.4.2 saves floats into an integer header by spreading them over
# all 256 steps
# with a slope: 1 comes back as 0.988, and astype(np.uint8) makes class 1 to 0, 3 to 2 and 4 stays 4.
# Why it matters: segmentation labels of medical pictures lose classes between two steps of a pipeline, quietly.
# Instead: np.asarray(image.dataobj) to read, and save integers: Nifti1Image(labels.astype(np.uint8), affine).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 nibabel==5.4.2
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import nibabel as nib
import numpy as np

labels = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
nib.save(nib.Nifti1Image(labels, np.eye(4)), "labels.nii")
loaded = nib.load("labels.nii")
flipped = loaded.get_fdata()[::-1]
nib.save(nib.Nifti1Image(flipped, loaded.affine, loaded.header), "flipped.nii")
again = nib.load("flipped.nii")
values = again.get_fdata()[::-1].ravel()
print("nibabel", nib.__version__, "numpy", np.__version__)
print("stored type:", again.get_data_dtype(), "slope:", again.dataobj.slope)
print("values:", values.round(3).tolist())
print("as uint8:", values.astype(np.uint8).tolist())
assert again.get_data_dtype() == np.uint8
assert values.astype(np.uint8)[1] == 0, "class 1 survives now"
assert values.astype(np.uint8)[3] == 2
nib.save(nib.Nifti1Image(flipped.astype(np.uint8), loaded.affine), "whole.nii")
assert np.array_equal(np.asarray(nib.load("whole.nii").dataobj)[::-1], labels)
PY
