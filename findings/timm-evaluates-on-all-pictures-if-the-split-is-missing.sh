#!/usr/bin/env bash
# Guess: create_dataset with the split 'test' of a folder that has only train/ and val/ raises, or is empty.
# Fact: timm 1.0.31 then takes the whole folder: the pictures of train and val together, with the right classes and no
# word. Only 'train', 'val', 'validation' and the like are looked up under a second name.
# Why it matters: a run on --split test reports the accuracy on the training pictures: 99 % instead of 80 %.
# Instead: check that the folder exists, and the number of pictures, before evaluating.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 pillow==13.0.0 torch==2.14.1 torchvision==0.29.1 timm==1.0.31
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import pathlib

import timm
from PIL import Image
from timm.data import create_dataset

print("timm", timm.__version__)
for split, count in (("train", 5), ("val", 2)):
    for name in ("cat", "dog"):
        folder = pathlib.Path("pictures", split, name)
        folder.mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8), (40 * i, 0, 0)).save(folder / f"{i}.png")
sizes = {}
for split in ("train", "val", "validation", "test"):
    pictures = create_dataset("", root="pictures", split=split)
    sizes[split] = len(pictures)
    print(f"split {split!r}: {len(pictures)} pictures of the classes {sorted(pictures.reader.class_to_idx)}")
assert sizes["train"] == 10 and sizes["val"] == sizes["validation"] == 4
assert sizes["test"] == 14, "a missing split is told now"
assert sorted(pictures.reader.class_to_idx) == ["cat", "dog"]
PY
