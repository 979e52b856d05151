"""Write a contact sheet: thumbnails of images with their names, in one HTML file that needs no other file."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keras_vit._util import html
from keras_vit._util.atomic import replacing
from keras_vit._util.text import printable
from keras_vit.visualize.html.inline import data_uri, thumbnail

SIDE = 256  # pixels of the longer side of a thumbnail


class Picture(NamedTuple):
    """A picture of a contact sheet: its name, a line about it, and uint8 pixels, or why they cannot be read."""

    name: str
    caption: str
    content: np.ndarray | str


def write_contact_sheet(path: str | os.PathLike[str], title: str, pictures: Iterable[Picture]) -> Path:
    """Write pictures as one HTML file, in their order; return its path. Names may contain any characters."""
    target = Path(path)
    cells = []
    for name, caption, content in pictures:
        is_read = isinstance(content, np.ndarray)
        uri = data_uri(thumbnail(content, SIDE)) if isinstance(content, np.ndarray) else None
        cells.append((printable(name), caption, uri, None if is_read else printable(str(content))))
    environment = html.environment("keras_vit.visualize.html")
    page = environment.get_template("contact_sheet.html").render(title=printable(title), cells=cells)
    with replacing(target) as file:
        file.write(page.encode(errors="backslashreplace"))
    return target
