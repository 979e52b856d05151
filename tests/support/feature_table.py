"""Write the table of formats and features into docs/load-and-convert.md, from the tables in converters/checkpoints.

python tests/support/feature_table.py
"""

from __future__ import annotations

import re
from typing import Any

from keras_vit.converters.table import Row, Table, load_table
from keras_vit.errors import CheckpointError
from places import ROOT
from tiny_models import tiny

PAGE = ROOT / "docs" / "load-and-convert.md"
START = "<!-- features: written by tests/support/feature_table.py, checked by make test -->\n"
END = "<!-- /features -->"

FORMATS = ("big_vision", "google", "huggingface", "keras_hub", "timm")  # the others are for one family each
# feature: a variable of a model that has it, and the number of classes
BY_VARIABLE = {
    "class token": ("prefix/cls", 1000),
    "ResNet hybrids": ("root/conv/kernel", 1000),
    "pre_logits and a head": ("pre_logits/kernel", 1000),
    "pre_logits, no head": ("pre_logits/kernel", 0),
    "attention pooling (map)": ("pool/probe", 1000),
    "registers": ("prefix/registers", 1000),
    "LayerScale": ("block_0/scale1/gamma", 1000),
    "pre-norm (CLIP)": ("pre_norm/gamma", 1000),
    "gated MLP (SwiGLU)": ("block_0/mlp/gate/kernel", 1000),
    "norms in attention and MLP (BEiT-3)": ("block_0/attention/norm/gamma", 1000),
    "distillation token": ("prefix/distillation", 1000),
    "2-D positions": ("position/x_embedding", 1000),
    "relative positions": ("position_0/relative_embedding", 1000),
    "positions at every block": ("position_0/embedding", 1000),
}
# feature: a field of ViTConfig, and values of which the format must allow one
BY_FIELD: dict[str, tuple[str, set[object]]] = {
    "no class token (gap)": ("class_token", {False}),
    "norm after pooling (fc_norm)": ("final_norm", {"pooled"}),
    "no qkv bias": ("qkv_bias", {False}),
    "sin-cos positions": ("position", {"sincos2d"}),
    "GELU: tanh": ("activation", {"gelu_tanh"}),
    "GELU: erf": ("activation", {"gelu_erf"}),
    "GELU: quick": ("activation", {"gelu_quick"}),
}


def rendered() -> str:
    """Return the table in Markdown."""
    tables = [load_table(name) for name in FORMATS]
    lines = [["", *(table.format for table in tables)], ["---"] * (len(tables) + 1)]
    lines.append(["read / written", *("both" if table.writable else "read" for table in tables)])
    for feature, (variable, classes) in BY_VARIABLE.items():
        lines.append([feature, *(_mark(any(_fits(row, variable, classes) for row in table.rows)) for table in tables)])
    for feature, (field, values) in BY_FIELD.items():
        lines.append([feature, *(_mark(_allows(table, field, values)) for table in tables)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _mark(holds: bool) -> str:
    return "yes" if holds else "-"


def _fits(row: Row, variable: str, classes: int) -> bool:
    """Return whether a row of a format's table is for this variable, in a model with this number of classes."""
    if row.beside and not classes:  # such rows need a head
        return False
    if any(field == "num_classes" and value != classes for field, value in row.only_if):
        return False
    return re.fullmatch(re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(row.variable)), variable) is not None


def _allows(table: Table, field: str, values: set[object]) -> bool:
    """Return whether the format has one of the values by default, by its tensors or by its config.json."""
    if field in ("final_norm",) and any(("final_norm", "pooled") in row.only_if for row in table.rows):
        return True
    absent = {facts[field] for facts in table.without.values() if field in facts}
    said = {value for value in values if _says(table, field, value)}
    means = {table.config[field]} if field in table.config else set() if said else values
    return bool(values & (means | said | absent))


def _says(table: Table, field: str, value: Any) -> bool:
    """Return whether the format's config.json says that a field has a value."""
    if table.json is None or table.json.write is None:
        return False
    try:
        return bool(table.json.read(table.json.write(tiny(**{field: value}))).get(field) == value)
    except (CheckpointError, ValueError):  # not in this config.json, or not in a tiny model
        return False


def main() -> None:
    """Replace the table."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    PAGE.write_text(before + START + rendered() + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
