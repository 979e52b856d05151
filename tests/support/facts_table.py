"""Write the table of facts that formats do not state into docs/load-and-convert.md, from converters/checkpoints.

python tests/support/facts_table.py
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from keras_vit.converters import formats
from keras_vit.converters.facts import PREPARATION
from keras_vit.converters.source import read_features, tensor_fields
from keras_vit.converters.table import Table, load_table
from keras_vit.model.config import Preprocessing, ViTConfig
from places import ROOT

PAGE = ROOT / "docs" / "load-and-convert.md"
START = "<!-- facts: written by tests/support/facts_table.py, checked by make test -->\n"
END = "<!-- /facts -->"
FIELDS = [field.name for field in dataclasses.fields(ViTConfig) if field.name != "preprocessing"]
FIELDS += [f"preprocessing.{field.name}" for field in dataclasses.fields(Preprocessing)]
# What users call a fact, and its fields.
FACTS: dict[str, tuple[str, ...]] = {
    "heads": ("num_heads",),
    "activation": ("activation",),
    "epsilon": ("norm_epsilon",),
    "image size": ("image_size",),
    "positions of the class token": ("position_prefix",),
    "pooling": ("classifier",),
    "place of the last norm": ("final_norm",),
    "attention pooling": ("pool_heads", "pool_prefix"),
    "rotary positions": ("rotary_theta",),
    "other rotary fields": ("rotary_grid", "rotary_interleaved", "rotary_offset", "rotary_axes"),
    "activation of the pooler": ("representation_activation",),
    "mean, std, crop and filter": tuple(f"preprocessing.{part}" for part in PREPARATION),
    "labels": ("labels",),
}


def cell(table: Table, name: str) -> str:
    """Tell how a field of a format's files is known if no file beside them and no caller says it; "" if it is not."""
    features = read_features()
    group, _, part = name.partition(".")
    rules = [rule for rule in table.unstated if {name, group} & {*rule.get("asked", ()), *rule.get("assumed", ())}]
    if part and part not in PREPARATION:
        rules = []
    kinds = [_kind(rule, {name, group}) for rule in rules]
    if kinds:
        return ", else ".join(dict.fromkeys(kinds))
    implied = [table.config, *table.without.values(), *(dict(row.only_if) for row in table.rows)]
    if any(name in fields for fields in implied) or (
        part and part in (*PREPARATION, *features["unsaid"]["preprocessing"])
    ):
        return "always" if part or name in table.config else "tensors"
    if name in _of_tensors() or (name == "num_heads" and _has_heads(table)):
        return "tensors"
    if name in features["unsaid"]["chosen"]:
        return "beside" if table.json else "-"
    return "-" if name in features["unsaid"]["absent"] else ""


def _has_heads(table: Table) -> bool:
    """Whether the kernels have an axis of heads, relative biases a column for each head, or there is no attention."""
    has_attention = table.has_row("block_0/attention/query/kernel")
    return table.layout == "keras" or table.has_row("relative_bias_0/table") or not has_attention


@functools.cache
def _of_tensors() -> set[str]:
    return {*tensor_fields({}), "image_size", "position"}  # the grid is read as a square


def _kind(rule: Mapping[str, Any], names: set[str]) -> str:
    conditions = [f"{key}={value}" for key, value in rule.items() if key not in ("asked", "assumed")]
    kind = "asked" if names & {*rule.get("asked", ())} else "warned"
    return f"{kind} if {' and '.join(conditions)}" if conditions else kind


def rendered() -> str:
    """Return the table in Markdown; formats with the same cells share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in formats():
        table = load_table(name)
        files = [table.json.file, *table.json.others] if table.json else ["-"]
        cells = (", ".join(files), _facts(table, "asked"), _facts(table, "warned"))
        rows.setdefault(cells, []).append(f"`{name}`")
    lines = [["format", "file beside the weights", "asked for", "assumed with a warning"], ["---"] * 4]
    lines += [[", ".join(names), *cells] for cells, names in rows.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _facts(table: Table, kind: str) -> str:
    """Return the facts of a kind, "asked" or "warned", each with the models that it is for, if it is not for all."""
    found = []
    for fact, fields in FACTS.items():
        kinds = [text for field in fields for text in re.split(", (?:else )?", cell(table, field))]
        chosen = dict.fromkeys(text.removeprefix(kind) for text in kinds if text.split(" ")[0] == kind)
        conditions = [text.removeprefix(" if ") for text in chosen if text]
        if chosen:
            found.append(fact if "" in chosen else f"{fact} ({'; '.join(conditions)})")
    return ", ".join(found) or "-"


def main() -> None:
    """Replace the table."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    PAGE.write_text(before + START + rendered() + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
