"""Write the zoo as one HTML page that needs no other file: all cards, searchable, and accuracy against arithmetic."""

from __future__ import annotations

import os
from pathlib import Path

from keras_vit._util.atomic import replacing
from keras_vit.zoo.gallery.document import document
from keras_vit.zoo.gallery.entries import entries

__all__ = ["write"]


def write(out: str | os.PathLike[str]) -> Path:
    """Write the gallery: every model of the zoo and its weights.

    Args:
        out: the folder, created if it does not exist. Other files in it stay as they are.

    Returns:
        The path of its index.html, which is replaced when the new one is complete.

    Raises:
        NotADirectoryError: if `out` is a file.
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
