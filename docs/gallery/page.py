"""Write the zoo as one HTML page: all cards, with search, and a plot of accuracy against FLOPs.

python docs/gallery/page.py build/gallery

Everything is visible without JavaScript; gallery.js adds search, sorting, and cards in a window.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

import plot
from entries import Entry, entries
from keras_vit._util import html
from keras_vit._util.text import scaled
from keras_vit.zoo.cards import NOT_PUBLISHED

TEMPLATES = Path(__file__).parent / "templates"
TITLE = "keras_vit model gallery"
COLUMNS = dict.fromkeys(("Model", "Weights", "Image", "Parameters", "GFLOPs", "ImageNet-1k top-1", "File"), "ascending")
COLUMNS["ImageNet-1k top-1"] = "descending"  # the order after the first click on the heading
PLOT_SIZES = ((1000, 440), (360, 380))  # (width, height) for wide and for narrow windows


def write(folder: Path) -> Path:
    """Write index.html into a folder, which is created if needed, and return its path. Other files in it stay."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(document(entries()), encoding="utf-8")
    return path


def document(entries: Sequence[Entry]) -> str:
    """Return the page as HTML that needs no other file; the entries of a model follow each other."""
    models = [list(group) for _, group in itertools.groupby(entries, key=lambda entry: entry.name)]
    has_points = any(entry.point for entry in entries)
    return (
        _templates()
        .get_template("gallery.html")
        .render(
            title=TITLE,
            entries=entries,
            models=models,
            num_hybrids=sum(model[0].is_hybrid for model in models),
            example=min(entries, key=lambda entry: (entry.is_hybrid, not entry.is_default)).load,
            plots=[plot.layout(entries, width=width, height=height) for width, height in PLOT_SIZES if has_points],
            columns=COLUMNS,
            families=list(dict.fromkeys(entry.family for entry in entries)),
            tags=sorted({entry.weights.tag for entry in entries}),
            not_published=NOT_PUBLISHED,
        )
    )


def _templates() -> jinja2.Environment:
    """Return the environment of the package's pages, with the templates of this folder before its own."""
    shared = html.environment(short_count=lambda number: scaled(number, 1000, ("", " k", " M", " G")))
    return shared.overlay(loader=jinja2.ChoiceLoader([jinja2.FileSystemLoader(TEMPLATES), shared.loader]))


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
