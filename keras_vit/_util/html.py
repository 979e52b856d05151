"""Render HTML pages, and tables for notebooks, from jinja2 templates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keras_vit._util.text import byte_size

if TYPE_CHECKING:  # imported in the functions that use it, because most commands render nothing
    import jinja2

COLOURS = {
    # CSS variable: (in the light scheme, in the dark scheme). Text on "page" and "card" has a contrast of at least 4.5.
    "page": ("#f5f5f1", "#14161a"),
    "card": ("#ffffff", "#1e2127"),
    "line": ("#d9d9d2", "#363b44"),
    "text": ("#1b1d21", "#eceef1"),
    "quiet": ("#5a5f68", "#a5acb8"),
    "accent": ("#0b5d6b", "#6cc7d6"),
    "other": ("#a8480a", "#f2a765"),
    "bar": ("#bcdde2", "#1f5560"),
}


@functools.cache
def environment(package: str = "keras_vit._util", **filters: Callable[..., Any]) -> jinja2.Environment:
    """Return the jinja2 environment of a package's `templates`, which may extend the `page.html` of this package."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in (package, "keras_vit._util")]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["colours"] = COLOURS
    made.filters.update(filters, byte_size=byte_size)
    return made


def table(rows: Iterable[Sequence[Any]], *, header: Sequence[Any] = (), title: str = "") -> str:
    """Return rows, shown as `str` writes them, as an HTML table; no header is shown if it is empty."""
    return environment().get_template("table.html").render(rows=rows, header=header, title=title)


def facts(title: str, values: Mapping[str, Any]) -> str:
    """Return names and values as an HTML table under a title; values that are None are left out."""
    return environment().get_template("facts.html").render(title=title, values=values)
