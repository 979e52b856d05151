"""Tables as HTML, for notebooks and for pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


def table(header: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table.

    Args:
        header: of the columns; an empty one draws none.
        rows: of one value a column. All are shown as `str` has them, escaped.
    """
    head = f"<thead>{_row('th', header)}</thead>" if header else ""
    return f"<table>{head}<tbody>{''.join(_row('td', row) for row in rows)}</tbody></table>"


def facts(title: str, values: Mapping[str, Any]) -> str:
    """A title over a table of two columns: names and what they are; what is None is left out."""
    body = "".join(
        f"<tr><th scope='row' style='text-align: left'>{escape(name)}</th>"
        f"<td style='text-align: left'>{escape(str(value))}</td></tr>"
        for name, value in values.items()
        if value is not None
    )
    return f"<p><b>{escape(title)}</b></p><table><tbody>{body}</tbody></table>"


def _row(kind: str, cells: Sequence[Any]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(str(cell))}</{kind}>' for cell in cells)}</tr>"
