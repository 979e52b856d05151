"""Write the zoo as one self-contained HTML page: all cards, with search, and a plot of accuracy against FLOPs."""

import os
from pathlib import Path

from keras_vit._util.atomic import replacing
from keras_vit.zoo.gallery.document import document
from keras_vit.zoo.gallery.entries import entries

__all__ = ["write"]


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
