#!/usr/bin/env bash
# Guess: the ids of annotations are names; COCOeval gives 1.0 to predictions that equal the truth.
# Fact: pycocotools 2.0.11 marks a match by the id, and takes 0 for 'no match'. If ids start at 0, as a loop with
# enumerate makes them, the first annotation counts as missed and its prediction as false. The class that has only
# this one gets an AP of 0.
# Why it matters: boxes and masks exported from a segmenter for evaluation lose up to one class, and nobody looks for
# it in the ids.
# Instead: start annotation ids at 1 (image and category ids may be 0).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 pycocotools==2.0.11
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import contextlib
import importlib.metadata
import io

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

print("pycocotools", importlib.metadata.version("pycocotools"))
boxes = [[0, 0, 4, 4], [5, 0, 4, 4]]


def precision(first):
    truth = COCO()
    truth.dataset = {
        "info": {},
        "images": [{"id": 0, "width": 10, "height": 10}],
        "categories": [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}],
        "annotations": [
            {"id": first + i, "image_id": 0, "category_id": i, "bbox": box, "area": 16, "iscrowd": 0}
            for i, box in enumerate(boxes)
        ],
    }
    truth.createIndex()
    equal = [{"image_id": 0, "category_id": i, "bbox": box, "score": 0.9} for i, box in enumerate(boxes)]
    result = COCOeval(truth, truth.loadRes(equal), "bbox")
    result.evaluate()
    result.accumulate()
    result.summarize()
    return float(result.stats[0])


found = {}
for first in (0, 1):
    with contextlib.redirect_stdout(io.StringIO()):
        found[first] = precision(first)
    print(f"annotation ids from {first} on: AP of the truth itself {found[first]:.2f}")
assert abs(found[0] - 0.5) < 1e-6, "id 0 is found now"
assert abs(found[1] - 1) < 1e-6
PY
