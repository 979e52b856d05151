"""Every fact of a checkpoint is exact, asked for, or taken with a warning that names it and its value."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

import facts_table
import lost_facts
from keras_vit.converters import formats
from keras_vit.converters.table import load_table


def test_every_field_stands_in_a_cell_of_every_format() -> None:
    tables = [load_table(name) for name in formats()]
    missing = {
        (table.format, name) for table in tables for name in facts_table.FIELDS if not facts_table.cell(table, name)
    }
    assert not missing, "say it in the format's table, or in [unsaid] of converters/features.toml"
    # A new field that nobody thought of stands in none.
    assert {facts_table.cell(table, "new_field") for table in tables} == {""}


def test_the_page_has_the_table_of_facts() -> None:
    page = facts_table.PAGE.read_text(encoding="utf-8")
    assert facts_table.rendered() in page, "run python tests/support/facts_table.py"


# Of each kind of file one: the others are read by the same functions.
FEW = ["hf_clip_vision", "timm_token"]


def outcomes(folders: list[Path], tmp_path: Path) -> tuple[collections.Counter[str], list[str]]:
    """Count what loading checkpoints gives that lost something, and list what is silently wrong."""
    counts: collections.Counter[str] = collections.Counter()
    silent = []
    for number, folder in enumerate(folders):
        (tmp_path / str(number)).mkdir()
        for case in lost_facts.cases(folder, tmp_path / str(number)):
            found = lost_facts.outcome(case)
            counts[found.partition(":")[0]] += 1
            silent += [f"{case.name}: {found}"] if found.startswith("silent") else []
    return counts, silent


def test_a_lost_file_or_key_is_never_silent(tmp_path: Path) -> None:
    counts, silent = outcomes([path for path in lost_facts.folders() if path.name in FEW], tmp_path)
    assert not silent
    assert min(counts[kind] for kind in ("exact", "asked", "told")) > 5


@pytest.mark.full
def test_no_reference_that_lost_something_is_silently_wrong(tmp_path: Path) -> None:
    counts, silent = outcomes(lost_facts.folders(), tmp_path)
    assert not silent
    assert sum(counts.values()) > 6000
    assert min(counts[kind] for kind in ("exact", "asked", "told")) > 300
    print(dict(counts))
