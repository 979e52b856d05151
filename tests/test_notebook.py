"""The notebook in examples/ runs, cell by cell, as Jupyter runs it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from html_document import Document

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_hour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def last_value(source: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last expression, which Jupyter shows; None without one."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.full
def test_the_cells_run_and_their_results_show_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    names: dict[str, Any] = {}
    shown = [last_value("".join(cell["source"]), names) for cell in CELLS if cell["cell_type"] == "code"]
    for value in shown:
        if hasattr(value, "_repr_html_"):
            Document(value._repr_html_())  # raises an error for tags that do not match
    assert sum(hasattr(value, "_repr_html_") for value in shown) == 5  # model, result, examination, evaluation, file
    assert names["probe"].metrics["accuracy"] > 0.9
    assert all((tmp_path / file).exists() for file in ("report.html", "mistakes/examination.html", "even.tflite"))


def test_the_notebook_is_without_outputs() -> None:
    assert all(cell.get("outputs", []) == [] and cell.get("execution_count") is None for cell in CELLS)
