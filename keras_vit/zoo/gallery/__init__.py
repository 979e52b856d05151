"""Write the zoo as one self-contained HTML page: all cards, with search, and a plot of accuracy against FLOPs.

Everything is visible without JavaScript; gallery.js adds search, sorting, and cards in a window.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from keras_vit._util import html
from keras_vit._util.atomic import replacing
from keras_vit._util.text import scaled
from keras_vit.zoo.cards import NOT_PUBLISHED
from keras_vit.zoo.gallery import plot
from keras_vit.zoo.gallery.entries import Entry, entries

__all__ = ["write"]

TITLE = "keras_vit model gallery"
COLUMNS = dict.fromkeys(("Model", "Weights", "Image", "Parameters", "GFLOPs", "ImageNet-1k top-1", "File"), "ascending")
COLUMNS["ImageNet-1k top-1"] = "descending"  # the order after the first click on the heading
PLOT_SIZES = ((1000, 440), (360, 380))  # (width, height) for wide and for narrow windows


def write(out: str | os.PathLike[str]) -> Path:
    """Write the gallery's index.html into a folder, which is created if needed, and return its path.

    An existing page is replaced when the new one is complete. Other files in the folder stay.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"The gallery is written into a folder: name another. Received: {str(folder)!r}")
    text = document(entries())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    with replacing(path) as file:
        file.write(text.encode())
    return path


def document(entries: Sequence[Entry]) -> str:
    """Return the page as HTML that needs no other file; the entries of a model follow each other."""
    models = [list(group) for _, group in itertools.groupby(entries, key=lambda entry: entry.name)]
    has_points = any(entry.point for entry in entries)
    page = html.environment("keras_vit.zoo.gallery", short_count=lambda n: scaled(n, 1000, ("", " k", " M", " G")))
    return page.get_template("gallery.html").render(
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
