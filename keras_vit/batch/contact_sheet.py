"""Write a contact sheet: the images that a search has found, in one HTML file that needs no other file."""

from collections.abc import Iterable
from pathlib import Path

from keras_vit._util import html
from keras_vit._util.atomic import replacing
from keras_vit._util.text import printable
from keras_vit.batch._search import Match
from keras_vit.batch.folder import Folder
from keras_vit.errors import DownloadError
from keras_vit.model.classify import IMAGE_ERRORS
from keras_vit.model.preprocess import decode_bytes
from keras_vit.visualize.html.inline import data_uri, thumbnail

SIDE = 256  # pixels of the longer side of a thumbnail


def write_contact_sheet(path: Path, title: str, folder: Folder, found: Iterable[Match]) -> None:
    """Write the images of matches in a folder, or why they cannot be read. Names may contain any characters."""
    cells = []
    for _, name, score in found:
        picture = error = ""
        try:
            picture = data_uri(thumbnail(decode_bytes(folder.read(name or ""), 3), SIDE))
        except (*IMAGE_ERRORS, ImportError, DownloadError) as reason:
            error = printable(str(reason))
        cells.append((printable(name or ""), f"{score:.3f}", picture, error))
    template = html.environment("keras_vit.visualize.html").get_template("contact_sheet.html")
    with replacing(path) as file:
        file.write(template.render(title=printable(title), cells=cells).encode())
