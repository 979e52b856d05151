"""Every fact of a checkpoint is exact, asked for, or taken with a warning that names it and its value."""

from __future__ import annotations

import facts_table
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
    assert facts_table.rendered() in page, "run python tests/facts_table.py"
