#!/usr/bin/env bash
# Guess: class_encode_column on a column of the numbers 0 to 11 makes it a ClassLabel and leaves the numbers.
# Fact: datasets 5.2.0 turns the numbers into text and sorts the text: 0, 1, 10, 11, 2, ... so class 2 becomes 4 and
# class 10 becomes 2. Up to ten classes nothing changes.
# Why it matters: one calls it to use train_test_split(stratify_by_column=...). The model then learns other numbers
# than its id2label, its head and every file that was not encoded; accuracy on the split is fine.
# Instead: cast_column('label', ClassLabel(names=[...])), which keeps numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 datasets==5.2.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = str(Path("home").absolute())
import datasets

datasets.disable_progress_bars()
print("datasets", datasets.__version__)
for count in (10, 12):
    rows = datasets.Dataset.from_dict({"label": list(range(count))})
    encoded = rows.class_encode_column("label")["label"][:]
    print(f"{count} classes:", encoded)
    assert (list(encoded) == list(range(count))) == (count == 10), "the numbers are kept now"
assert list(encoded)[2] == 4 and list(encoded)[10] == 2
names = [str(i) for i in range(12)]
kept = rows.cast_column("label", datasets.ClassLabel(names=names))["label"][:]
assert list(kept) == list(range(12))
PY
