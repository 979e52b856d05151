"""The gallery's HTML: the plot, a table with a row for each file of weights, and a card for each model.

Everything is visible without JavaScript; gallery.js adds search, sorting and the card as a window of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from keras_vit._util import page
from keras_vit.zoo.cards import NOT_PUBLISHED
from keras_vit.zoo.gallery import plot
from keras_vit.zoo.gallery.card import card
from keras_vit.zoo.gallery.entries import Entry

TITLE = "keras_vit model gallery"
HERE = Path(__file__).parent
NOTHING = f'<span class="none" title="{NOT_PUBLISHED}">–</span>'


class Cell(NamedTuple):
    """One field of the table: its HTML, and the number that rows are sorted by; None is last, either way round."""

    html: str
    key: float | None


# Heading, and the direction of the first click.
COLUMNS = {
    "Model": "ascending",
    "Weights": "ascending",
    "Image": "ascending",
    "Parameters": "ascending",
    "GFLOPs": "ascending",
    "ImageNet-1k top-1": "descending",
    "File": "ascending",
}


def document(entries: Sequence[Entry]) -> str:
    """The whole page.

    Args:
        entries: one a file of weights, the files of a model one after the other.

    Returns:
        HTML that needs no other file.
    """
    style = (HERE / "gallery.css").read_text("utf-8")
    script = (HERE / "gallery.js").read_text("utf-8")
    body = f"{_opening(entries)}<main>{_figure(entries)}{_catalogue(entries)}{_cards(entries)}</main>"
    return page.page(TITLE, body, script=script, style=style)


def _opening(entries: Sequence[Entry]) -> str:
    models = len({entry.name for entry in entries})
    hybrids = len({entry.name for entry in entries if entry.hybrid})
    example = min(entries, key=lambda entry: (entry.hybrid, not entry.default))
    return (
        f"<header><h1>{TITLE}</h1><p>{models} Vision Transformers, {hybrids} of them behind a ResNet, and their "
        f"{len(entries)} files of published weights. Each loads with one line, such as "
        f"<code>{escape(example.load)}</code>.</p></header>"
    )


def _figure(entries: Sequence[Entry]) -> str:
    shown = [entry for entry in entries if entry.point]
    if not shown:
        return ""
    keys = "".join(
        f'<li><svg viewBox="-8 -8 16 16" aria-hidden="true">{plot.mark(number)}</svg>{escape(tag)}</li>'
        for number, tag in enumerate(plot.series(shown))
    )
    hollow = "".join(
        f'<li><svg viewBox="-8 -8 16 16" aria-hidden="true">{plot.mark(None, hollow=is_hybrid)}</svg>{text}</li>'
        for is_hybrid, text in ((False, "filled: pure"), (True, "hollow: hybrid"))
    )
    return (
        '<section aria-labelledby="plot-title"><h2 id="plot-title">Accuracy against arithmetic</h2><figure>'
        f"{plot.drawing(shown, width=1000, height=440, css_class='plot-wide')}"
        f"{plot.drawing(shown, width=360, height=380, css_class='plot-narrow')}"
        f'<ul class="legend">{keys}{hollow}</ul>'
        f"<figcaption>ImageNet-1k top-1 of the {len(shown)} files for which it is reported, each as it is, by those "
        "whom its card names: not all were measured by the same people or in the same way. GFLOPs are those of one "
        "image of the size at which the accuracy was measured, which differs from file to file. A multiply-add counts "
        "as two: papers and timm mostly print half of it.</figcaption></figure></section>"
    )


def _catalogue(entries: Sequence[Entry]) -> str:
    heads = "".join(
        f'<th role="columnheader" scope="col" data-first="{first}">{escape(text)}</th>'
        for text, first in COLUMNS.items()
    )
    tags = sorted({entry.weights.tag for entry in entries})
    rows = "".join(_row(entry, tags.index(entry.weights.tag)) for entry in entries)
    options = "".join(f'<option value="{number}">{escape(text)}</option>' for number, text in enumerate(COLUMNS))
    return (
        '<section aria-labelledby="weights-title"><h2 id="weights-title">Weights</h2>'
        '<form id="controls" role="search" hidden>'
        '<label class="field search">Search<input id="search" type="search" autocomplete="off" spellcheck="false" '
        'placeholder="b/16 augreg"></label>'
        '<label class="field">Kind<select id="kind"><option value="">all</option>'
        '<option value="pure">pure</option><option value="hybrid">hybrid</option></select></label>'
        f'<label class="field by">Sort by<select id="by">{options}</select></label>'
        '<label class="check"><input id="measured" type="checkbox">with ImageNet-1k accuracy</label>'
        f'</form><p id="count" role="status">{len(entries)} files</p>'
        f'<table role="table" id="catalogue"><thead role="rowgroup"><tr role="row">{heads}</tr></thead>'
        f'<tbody role="rowgroup">{rows}</tbody></table></section>'
    )


def _row(entry: Entry, tag: int) -> str:
    texts = zip(COLUMNS, _cells(entry, tag), strict=True)
    cells = "".join(
        f'<td role="cell" data-label="{escape(head)}" data-key="{"" if cell.key is None else cell.key}">'
        f"{cell.html}</td>"
        for head, cell in texts
    )
    about = {"for": entry.anchor, "kind": "hybrid" if entry.hybrid else "pure", "words": entry.words}
    data = "".join(f' data-{name}="{escape(text)}"' for name, text in about.items())
    return f'<tr role="row"{data}>{cells}</tr>'


def _cells(entry: Entry, tag: int) -> Iterator[Cell]:
    """In the order of COLUMNS."""
    default = ' <span class="badge">default</span>' if entry.default else ""
    yield Cell(f'<a href="#{escape(entry.anchor)}">{escape(entry.name)}</a>', entry.rank)
    yield Cell(f"{escape(entry.weights.tag)}{default}", tag)
    yield Cell(f"{entry.weights.image_size} px", entry.weights.image_size)
    yield Cell(f"{_short(entry.parameters / 1e6)} M", entry.parameters)
    yield Cell(_short(entry.gflops), entry.gflops)
    point, size = entry.point, entry.file_mib
    yield Cell(f"{point.accuracy.value:.2f} %" if point else NOTHING, point.accuracy.value if point else None)
    yield Cell(f"{size:,.{1 if size < 10 else 0}f} MiB" if size else NOTHING, size)


def _short(value: float) -> str:
    """To a digit behind the point, and small numbers to two digits."""
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _cards(entries: Sequence[Entry]) -> str:
    groups = itertools.groupby(entries, key=lambda entry: entry.name)
    return (
        '<section id="cards" aria-labelledby="cards-title"><h2 id="cards-title">Models</h2>'
        f"{''.join(card(list(group)) for _, group in groups)}</section>"
        '<dialog id="window"><div class="bar"><button type="button" id="close">Close</button></div></dialog>'
    )
