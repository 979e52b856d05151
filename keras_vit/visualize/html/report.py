"""A report of what a model sees: one HTML file that needs nothing beside itself."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from keras_vit._util.atomic import replacing
from keras_vit._util.page import page
from keras_vit.model.vision_transformer import VisionTransformer
from keras_vit.visualize._models import vision_transformer
from keras_vit.visualize.html import figures, image_sections, sections
from keras_vit.visualize.html.inside import look

MOST_IMAGES = 16
TIMED = 5  # calls of the model; the file says their median
PAPER = "Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021 (arXiv 2010.11929)"


def report(
    model: Any,
    images: Any,
    path: str | os.PathLike[str],
    *,
    top: int = 5,
    title: str | None = None,
    card: Any = None,
    exports: Sequence[Any] = (),
    progress: bool = False,
) -> Path:
    """Writes what a model sees in some images as one HTML file, without links to anything outside of it.

    Predictions, attention over the images, the paper's figures 6 and 7, the tokens' norms and rank, the logit lens;
    the card and the exported files where they are given. What does not apply to a model is left out and the file says
    why. A model of which the VisionTransformer is only a part is shown by that part.

    Args:
        model: a VisionTransformer or a Keras model that contains one.
        images: as `model.preprocess` takes them, MOST_IMAGES at most: paths, PIL images, arrays of 0..255, or a list.
        path: the .html file to write; one that is there is replaced when the new one is complete.
        top: classes to name for each image, from 1.
        title: heads the page; None is the model's name.
        card: what is known of the weights: `zoo.card(name)` or other text, or a dict of names and values.
        exports: `export.Report`s of files made of this model, or their dicts.
        progress: whether to show a bar on standard error.

    Returns:
        the path.

    Raises:
        ImportError: without matplotlib.
        FileNotFoundError: where an image or the folder of the file is not there.
        ValueError: for images that cannot be read, none or too many; for top; where the model computes NaN.
    """
    figures.need_matplotlib()
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder for the report: {target.parent}")
    if target.is_dir():
        raise ValueError(f"path is the .html file to write. Received: the folder {str(target)!r}")
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ValueError(f"top is the number of classes to name, from 1. Received: {top!r}")
    inner = vision_transformer(model)
    names, prepared = _prepared(inner, images)
    seen = look(inner, prepared, names, top=top, progress=progress)
    heading = title or inner.name
    parts = [_header(heading, sections.describe(inner.config, seen.parameters), part_of=model, inner=inner)]
    parts += sections.sections(seen)
    if card:
        parts.append(sections.card_section(card))
    if exports:
        rows = [one if isinstance(one, Mapping) else one.to_dict() for one in exports]
        parts.append(sections.export_section(rows, _bytes(inner), _milliseconds(inner, prepared[:1])))
    parts.append(f"<footer><p>Sections, figures and appendices are those of the paper: {escape(PAPER)}.</p></footer>")
    style = image_sections.style(seen) + sections.STYLE
    document = page(f"{heading}: what it sees", "\n".join(parts), style=style)
    with replacing(target) as file:
        file.write(document.encode())
    return target


def _header(title: str, description: str, *, part_of: Any, inner: VisionTransformer) -> str:
    note = ""
    if part_of is not inner:
        note = f"<p>It is a part of the model {escape(part_of.name)!r}; what follows is of this part alone.</p>"
    return f"<header><h1>{escape(title)}</h1>\n<p>{escape(description)}</p>{note}</header>"


def _prepared(model: VisionTransformer, images: Any) -> tuple[list[str], np.ndarray]:
    """Names of the images, and the images as the model takes them."""
    items = list(_flat(images))
    count = sum(len(item) if getattr(item, "ndim", 0) == 4 else 1 for item in items)
    if not 0 < count <= MOST_IMAGES:
        raise ValueError(f"A report shows 1 to {MOST_IMAGES} images: pass the most telling ones. Received: {count}")
    names: list[str] = []
    batches = []
    for item in items:
        batches.append(model.preprocess(item))
        given = PurePath(item).name if isinstance(item, str | os.PathLike) else None
        names += [given or f"image {len(names) + 1 + i}" for i in range(len(batches[-1]))]
    return names, np.concatenate(batches)


def _flat(images: Any) -> Iterator[Any]:
    if isinstance(images, list | tuple):
        for image in images:
            yield from _flat(image)
    else:
        yield images


def _bytes(model: VisionTransformer) -> int:
    return sum(np.asarray(weight).nbytes for weight in model.weights)


def _milliseconds(model: VisionTransformer, image: np.ndarray) -> float:
    """Median of some compiled calls with one image."""
    model.predict_on_batch(image)  # the first call compiles
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        model.predict_on_batch(image)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)
