"""Render HTML pages, which need no other file, and tables for notebooks from jinja2 templates."""

from __future__ import annotations

import base64
import functools
import io
import re
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from keras_vit._util.text import byte_size

if TYPE_CHECKING:  # imported in the functions that use it, because most commands render nothing
    import jinja2
    import numpy as np

JPEG_QUALITY = 85
COLOURS = {
    # CSS variable: (in the light scheme, in the dark scheme). Text on "page" and "card" has a contrast of at least 4.5.
    "page": ("#f5f5f1", "#14161a"),
    "card": ("#ffffff", "#1e2127"),
    "line": ("#d9d9d2", "#363b44"),
    "text": ("#1b1d21", "#eceef1"),
    "quiet": ("#5a5f68", "#a5acb8"),
    "accent": ("#0b5d6b", "#6cc7d6"),
    "other": ("#a8480a", "#f2a765"),
    "bar": ("#bcdde2", "#1f5560"),
}


@functools.cache
def environment(**filters: Callable[..., Any]) -> jinja2.Environment:
    """Jinja2 environment of the templates beside this module, with filters."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("keras_vit._util"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["colours"] = COLOURS
    made.filters.update(filters, byte_size=byte_size)
    return made


def facts(title: str, values: Mapping[str, Any]) -> str:
    """Format names and values as an HTML table under a title, without those that are None."""
    return environment().get_template("facts.html").render(title=title, values=values)


def data_uri(pixels: np.ndarray) -> str:
    """Encode uint8 pixels as a data URI: as PNG, or as JPEG if that is smaller and nothing is transparent."""
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
    """Shrink an image until its longer side has at most `side` pixels."""
    import numpy as np
    from PIL import Image

    picture = Image.fromarray(pixels)
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return np.asarray(picture)


def svg(figure: Any, alt: str) -> Markup:
    """Convert a figure in light colours to inline SVG in the page's own colours, with an `alt` text."""
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
