"""Turn arrays and matplotlib figures into text that an HTML page contains, so that it needs no other file."""

import base64
import io
import re
import zlib
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from keras_vit._util.html import COLOURS

JPEG_QUALITY = 85


def data_uri(pixels: np.ndarray) -> str:
    """Return uint8 pixels as a data URI: as PNG, or as JPEG if that is smaller and nothing is transparent."""
    from PIL import Image

    picture = Image.fromarray(pixels)
    options: dict[str, dict[str, Any]] = {"png": {"optimize": True}}
    if picture.mode != "RGBA":
        options["jpeg"] = {"quality": JPEG_QUALITY, "optimize": True}
    files = {}
    for kind in options:
        buffer = io.BytesIO()
        picture.save(buffer, kind, **options[kind])
        files[kind] = buffer.getvalue()
    best = min(files, key=lambda kind: len(files[kind]))
    return f"data:image/{best};base64,{base64.b64encode(files[best]).decode()}"


def thumbnail(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return an image whose longer side has at most `side` pixels: the image itself if it is no larger."""
    from PIL import Image

    picture = Image.fromarray(pixels)
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return np.asarray(picture)


def svg(figure: Any, alt: str) -> Markup:
    """Return a figure in light colours as inline SVG in the page's own colours; `alt` says what it shows."""
    import matplotlib

    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Letters become shapes, because the layout depends on their widths. The salt makes the ids the same each time.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "keras_vit"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r' xmlns(:\w+)?="[^"]*"', "", drawing).replace("xlink:href", "href")
    # Each id that is referred to gets a prefix, because a page has several drawings; the others are left out.
    prefix = f"s{zlib.crc32(drawing.encode()):08x}-"
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', drawing))
    drawing = re.sub(r' id="([^"]*)"', lambda match: f' id="{prefix}{match[1]}"' if match[1] in used else "", drawing)
    drawing = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", drawing)
    for name, (light, _) in COLOURS.items():
        drawing = drawing.replace(light, f"var(--{name})")
    return Markup(drawing.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1).strip())
