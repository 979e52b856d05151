"""Write the tables of models into README.md: parameters, reported accuracy and measured time; one model of each family.

python tests/support/model_table.py
"""

from __future__ import annotations

import re

from keras_vit import zoo
from places import ROOT

README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "edge.txt"
START = "<!-- models: written by tests/support/model_table.py, checked by make test -->\n"
END = "<!-- /models -->"
MODELS = ("ViT-Ti/16", "ViT-S/16", "R26+ViT-S/32", "ViT-B/16", "ViT-L/16")
FAMILIES_START, FAMILIES_END = START.replace("models", "families", 1), "<!-- /families -->"
FAMILIES = {  # a model of each family -> what it is for
    "DINOv2-S/14": "features: linear probes, search, patches",
    "DINOv3-B/16": "the same, also of large images",
    "SigLIP2-B/16": "classes from texts, search by words",
    "CLIP-B/16": "the same, and what others compare with",
    "DeiT3-B/16": "ImageNet's classes at 224 px",
    "EVA02-B/14": "ImageNet's classes as well as possible",
    "FlexiViT-B": "one file at many speeds",
    "MAE-B/16": "to fine-tune (not for commercial use)",
    "Mixer-B/16": "without attention",
    "BiT-R50x1": "a ResNet, for devices that like convolutions",
}
WEIGHTS = "augreg-imagenet21k+imagenet2012"  # the recommended ones


def rendered() -> str:
    """Return the table in Markdown."""
    lines = ["| model | parameters | px | ImageNet top-1 | `dynamic` file, 224 px |\n", "|---|---|---|---|---|\n"]
    for name in MODELS:
        (row,) = [row for row in zoo.table(name) if row["weights"] == WEIGHTS]
        (accuracy,) = row["accuracy"]
        assert accuracy["dataset"] == "imagenet2012" and accuracy["image_size"] == row["image_size"]
        parameters = f"{row['parameters'] / 1e6:.1f} M"
        pixels, percent = f"{row['image_size']}", f"{accuracy['value']:.2f} %"
        lines.append(f"| `{name}` | {parameters} | {pixels} | {percent} | {milliseconds(name)} |\n")
    return "".join(lines)


def rendered_families() -> str:
    """Return the table of families in Markdown."""
    lines = ["| family, such as | parameters | px | ImageNet | license | for |\n", "|---|---|---|---|---|---|\n"]
    for name, purpose in FAMILIES.items():
        row = zoo.table(name)[0]
        found = [each for each in row["accuracy"] if each["dataset"] == "imagenet2012"]
        how = found[-1]["metric"].replace("top-1", "").strip(" ,") if found else ""
        accuracy = f"{found[-1]['value']:.1f} %{f' ({how})' if how else ''}" if found else "-"
        facts = (f"`{name}`", f"{row['parameters'] / 1e6:.0f} M", str(row["image_size"]), accuracy, row["license"])
        lines.append(f"| {' | '.join((*facts, purpose))} |\n")
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
    """Replace the tables in README.md."""
    text = README.read_text(encoding="utf-8")
    for start, table, end in ((START, rendered(), END), (FAMILIES_START, rendered_families(), FAMILIES_END)):
        before, _, rest = text.partition(start)
        text = before + start + table + end + rest.partition(end)[2]
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
