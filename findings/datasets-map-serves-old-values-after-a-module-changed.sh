#!/usr/bin/env bash
# Guess: Dataset.map computes anew when the code of its function has changed, as its fingerprint promises.
# Fact: datasets 5.2.0 fingerprints a function of an imported module by its name alone. Edit prepare.py, run again,
# and the values of the old code come from the cache without a word. A function of the script itself is computed anew.
# Why it matters: a changed mean and std, crop or embedding model has no effect, and both runs agree to the last
# digit.
# Instead: pass new_fingerprint= with a version of the code, load_from_cache_file=False, or keep the function in the
# script.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 datasets==5.2.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os
import pathlib
import subprocess
import sys

import datasets

print("datasets", datasets.__version__)
datasets.disable_progress_bars()
datasets.Dataset.from_dict({"pixel": [0.0, 255.0]}).save_to_disk("pixels")
module = pathlib.Path("prepare.py")
before = "def scale(row):\n    return {'x': row['pixel'] / 255}\n"
after = "def scale(row):\n    return {'x': row['pixel'] / 127.5 - 1}\n"
head = """
import datasets
datasets.disable_progress_bars()
rows = datasets.load_from_disk("pixels")
"""
found = {}
for version, text in (("before", before), ("after", after)):
    module.write_text(text)
    for kind, code in (("module", "from prepare import scale\n"), ("script", text)):
        run = [sys.executable, "-B", "-c", head + code + 'print(list(rows.map(scale)["x"]))']
        out = subprocess.run(run, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."})
        found[version, kind] = out.stdout.strip()
        print(f"{version} the edit, function of the {kind}: {found[version, kind]}")
assert found["before", "module"] == "[0.0, 1.0]" == found["after", "module"], "an edited module is seen now"
assert found["before", "script"] == "[0.0, 1.0]" and found["after", "script"] == "[-1.0, 1.0]"
PY
