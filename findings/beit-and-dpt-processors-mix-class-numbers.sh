#!/usr/bin/env bash
# Guess: an image processor that takes segmentation_maps resizes them by nearest neighbour, as
# SegformerImageProcessor does.
# Fact: BeitImageProcessor and DPTImageProcessor of transformers resize the maps as they resize the pictures,
# bicubic: between class 0 and class 10 come classes 1 and 9. Seen in 4.57.6 here, and in 5.24.0 with torch.
# Why it matters: every border of the training masks gets a rim of classes that are not there; the loss counts them,
# and no number is out of range.
# Instead: resize the maps yourself by nearest neighbour and pass pictures and maps with do_resize=False.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pillow==12.0.0 transformers==4.57.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import numpy as np
import transformers

print("transformers", transformers.__version__, "numpy", np.__version__)
picture = np.zeros((40, 40, 3), np.uint8)
classes = np.zeros((40, 40), np.uint8)
classes[:, 20:] = 10
size = {"height": 16, "width": 16}
found = {}
for name, options in (
    ("SegformerImageProcessor", {}),
    ("BeitImageProcessor", {"do_center_crop": False}),
    ("DPTImageProcessor", {}),
):
    processor = getattr(transformers, name)(size=size, **options)
    labels = processor(picture, segmentation_maps=classes, return_tensors="np")["labels"]
    found[name] = np.unique(labels).tolist()
    print(f"{name}: classes 0 and 10 became {found[name]}")
assert found["SegformerImageProcessor"] == [0, 10]
assert set(found["BeitImageProcessor"]) > {0, 10}, "BEiT keeps the classes now"
assert set(found["DPTImageProcessor"]) > {0, 10}, "DPT keeps the classes now"
processor = transformers.BeitImageProcessor(do_resize=False, do_center_crop=False)
kept = processor(picture, segmentation_maps=classes, return_tensors="np")["labels"]
assert np.unique(kept).tolist() == [0, 10]
PY
