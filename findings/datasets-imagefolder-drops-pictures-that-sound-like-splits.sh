#!/usr/bin/env bash
# Guess: load_dataset('imagefolder') on folders cat/ and dog/ without train/ and test/ gives one split, train, with
# all pictures.
# Fact: datasets 5.2.0 looks for words such as test, val, dev and train in file and folder names. Two names such as
# blood_test_1.png are enough: they become the split test, and all pictures without such a word are left out. A
# class folder test_strip/ alone makes class cat vanish.
# Why it matters: the classes, the counts and the accuracy are those of a few pictures, and the call reports
# nothing; it prints the splits only if one looks.
# Instead: data_files={'train': 'folder/**'}, and compare the number of rows with the number of files.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pillow==13.0.0 datasets==5.2.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = str(Path("home").absolute())
import datasets
from PIL import Image

datasets.disable_progress_bars()
print("datasets", datasets.__version__)


def pictures(folder, names):
    for name in names:
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    return folder


def counts(**options):
    return {split: rows.num_rows for split, rows in datasets.load_dataset("imagefolder", **options).items()}


files = [f"{animal}/{name}.png" for animal in ("cat", "dog") for name in ("001", "002", "blood_test_1")]
by_file = counts(data_dir=pictures("by-file", files))
print(f"{len(files)} pictures, two of them named blood_test_1:", by_file)
assert by_file == {"test": 2}, "the other pictures are kept now"
classes = [f"{name}/{i}.png" for name in ("cat", "test_strip") for i in range(3)]
by_class = datasets.load_dataset("imagefolder", data_dir=pictures("by-class", classes))
print("classes cat and test_strip:", {split: rows.num_rows for split, rows in by_class.items()})
assert {split: rows.num_rows for split, rows in by_class.items()} == {"test": 3}, "class cat is kept now"
whole = counts(data_files={"train": "by-file/**"})
print("with data_files:", whole)
assert whole == {"train": 6}
PY
