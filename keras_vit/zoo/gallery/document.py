"""Render the gallery's page: a plot, a table with a row for each file of weights, and a card for each model.

Everything is visible without JavaScript; gallery.js adds search, sorting, and cards in a window.
"""

import itertools
from collections.abc import Sequence

from keras_vit._util import html
from keras_vit._util.text import scaled
from keras_vit.zoo.cards import NOT_PUBLISHED
from keras_vit.zoo.gallery import plot
from keras_vit.zoo.gallery.entries import Entry

TITLE = "keras_vit model gallery"
COLUMNS = {
    # name: order after the first click on the heading
    "Model": "ascending",
    "Weights": "ascending",
    "Image": "ascending",
    "Parameters": "ascending",
    "GFLOPs": "ascending",
    "ImageNet-1k top-1": "descending",
    "File": "ascending",
}
PLOT_SIZES = ((1000, 440), (360, 380))  # (width, height) for wide and for narrow windows


def document(entries: Sequence[Entry]) -> str:
    """Return the page as HTML that needs no other file; the entries of a model follow each other."""
    models = [list(group) for _, group in itertools.groupby(entries, key=lambda entry: entry.name)]
    has_points = any(entry.point for entry in entries)
    page = html.environment("keras_vit.zoo.gallery", short_count=_short_count)
    return page.get_template("gallery.html").render(
        title=TITLE,
        entries=entries,
        models=models,
        num_hybrids=sum(model[0].is_hybrid for model in models),
        example=min(entries, key=lambda entry: (entry.is_hybrid, not entry.is_default)).load,
        plots=[plot.layout(entries, width=width, height=height) for width, height in PLOT_SIZES if has_points],
        columns=COLUMNS,
        tags=sorted({entry.weights.tag for entry in entries}),
        not_published=NOT_PUBLISHED,
    )


def _short_count(number: int) -> str:
    return scaled(number, 1000, ("", " k", " M", " G"))
