"""Write the table of models into README.md: parameters, reported accuracy and measured time.

python tests/model_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from keras_vit import zoo

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "edge.txt"
START, END = "<!-- models: written by tests/model_table.py, checked by make test -->\n", "<!-- /models -->"
MODELS = ("ViT-Ti/16", "ViT-S/16", "R26+ViT-S/32", "ViT-B/16", "ViT-L/16")
WEIGHTS = "augreg-imagenet21k+imagenet2012"  # the recommended ones


def rendered() -> str:
    """Return the table in Markdown."""
    lines = ["| model | parameters | px | ImageNet top-1 | int8 file, 224 px |\n", "|---|---|---|---|---|\n"]
    for name in MODELS:
        (row,) = [row for row in zoo.table(name) if row["weights"] == WEIGHTS]
        (accuracy,) = row["accuracy"]
        assert accuracy["dataset"] == "imagenet2012" and accuracy["image_size"] == row["image_size"]
        parameters = f"{row['parameters'] / 1e6:.1f} M"
        pixels, percent = f"{row['image_size']}", f"{accuracy['value']:.2f} %"
        lines.append(f"| `{name}` | {parameters} | {pixels} | {percent} | {milliseconds(name)} |\n")
    return "".join(lines)


def milliseconds(name: str) -> str:
    """Return the time of a model's dynamic int8 file for one image, as the results file has it."""
    results = RESULTS.read_text(encoding="utf-8")
    short = re.escape(name.replace("ViT-", ""))
    compared = re.search(rf"^{short}: .*?^dynamic int8.*?^keras_vit +([\d.]+)", results, re.MULTILINE | re.DOTALL)
    alone = re.search(rf"^{short}, dynamic int8: .* run in (\d+) ms", results, re.MULTILINE)
    if compared:
        return f"{float(compared[1]):.1f} ms"
    assert alone, f"{RESULTS.name} has no time of {name}"
    return f"{alone[1]} ms"


def main() -> None:
    """Replace the table in README.md."""
    before, _, rest = README.read_text(encoding="utf-8").partition(START)
    README.write_text(before + START + rendered() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
