"""One HTML page that needs nothing beside itself: its shell, its style in light and dark, and the parts it is made of.

The page forbids itself the network (Content-Security-Policy). Everything that is not `Html` is escaped.
"""

from __future__ import annotations

import base64
import io
import re
import zlib
from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

COLOURS = {
    # name: in light, in dark. Each is legible on its scheme's page and card: 4.5:1 and more, "line" and "bar" aside.
    "page": ("#f5f5f1", "#14161a"),
    "card": ("#ffffff", "#1e2127"),
    "line": ("#d9d9d2", "#363b44"),
    "text": ("#1b1d21", "#eceef1"),
    "quiet": ("#5a5f68", "#a5acb8"),
    "accent": ("#0b5d6b", "#6cc7d6"),
    "other": ("#a8480a", "#f2a765"),
    "bar": ("#bcdde2", "#1f5560"),
}
JPEG_QUALITY = 85
_STYLE = """
* { box-sizing: border-box; }
body {
  max-width: 72rem; margin: 0 auto; padding: clamp(1rem, 4vw, 2.5rem);
  font: 1rem/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  overflow-wrap: break-word;
}
h1 { margin: 0 0 0.5rem; font-size: clamp(1.5rem, 5vw, 2.1rem); line-height: 1.2; letter-spacing: -0.01em; }
h2 { margin: 0 0 0.5rem; font-size: 1.2rem; line-height: 1.3; }
h3 { margin: 1rem 0 0.5rem; font-size: 1rem; }
p { margin: 0 0 0.75rem; max-width: 46rem; }
a { color: var(--accent); }
header { margin-bottom: 1.5rem; }
.quiet, figcaption, footer { color: var(--quiet); }
figure { margin: 0; }
figcaption { font-size: 0.875rem; }
img, svg { display: block; max-width: 100%; height: auto; }
svg { stroke-linejoin: round; stroke-linecap: butt; }
section {
  margin: 0 0 1rem; padding: clamp(0.9rem, 3vw, 1.4rem);
  border: 1px solid var(--line); border-radius: 0.75rem; background: var(--card);
}
section > :last-child { margin-bottom: 0; }
.wide { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.6rem 0.35rem 0; border-bottom: 1px solid var(--line); text-align: left; }
th { font-weight: 600; color: var(--quiet); }
td { vertical-align: top; }
tbody tr:last-child > * { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; }
pre { margin: 0; font-size: 0.875rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.how { max-width: 52rem; }
.cite { color: var(--quiet); }
.bar { display: block; padding: 0 0.3rem; border-radius: 0.2rem; print-color-adjust: exact;
  background: linear-gradient(var(--bar) 0 0) 0 / calc(100% * var(--part)) 100% no-repeat; }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
"""


class Html(str):
    """Text that is HTML already, and is not escaped again."""

    __slots__ = ()


def text(value: Any) -> Html:
    """A value as HTML: `Html` as it is, None as a dash, everything else escaped."""
    if isinstance(value, Html):
        return value
    return Html("–" if value is None else escape(str(value)))


def page(title: str, body: str, *, script: str = "", style: str = "") -> str:
    """A whole HTML document.

    Args:
        title: of the window; escaped.
        body: HTML.
        script: JavaScript to run behind the body. Without one the page allows none.
        style: CSS behind the common one.

    Returns:
        the document, which loads nothing: neither from the network nor from files.
    """
    scripts = f"<script>{script}</script>\n" if script else ""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    if script:
        policy += "; script-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_colours()}{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n{body}\n{scripts}</body>\n</html>\n"
    )


def _colours() -> str:
    """The colours as CSS variables, those of the dark scheme where the reader asks for it."""
    light, dark = ("".join(f" --{name}: {pair[side]};" for name, pair in COLOURS.items()) for side in (0, 1))
    return (
        f":root {{ color-scheme: light dark;{light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{{dark} }} }}\n"
        f"@media print {{ :root {{{light} }} }}\n"
    )


def table(
    header: Sequence[Any],
    rows: Iterable[Sequence[Any]],
    *,
    right: Collection[int] = (),
    caption: str = "",
    framed: bool = True,
) -> Html:
    """A table, by default in a frame that scrolls where the window is too narrow.

    Args:
        header: of the columns.
        rows: cells: `Html` as it is, None as a dash, everything else escaped.
        right: places of the columns that stand at the right, such as numbers; those with an int or float do anyway.
        caption: what it shows, for those who do not see it.
        framed: False for a table that fits any window.
    """
    lines = [list(row) for row in rows]
    numbers = {place for row in lines for place, cell in enumerate(row) if isinstance(cell, int | float)}.union(right)
    head = "".join(_cell("th", name, place in numbers, ' scope="col"') for place, name in enumerate(header))
    body = "".join(
        f"<tr>{''.join(_cell('td', cell, place in numbers) for place, cell in enumerate(row))}</tr>\n" for row in lines
    )
    label = escape(caption or " ".join(map(str, header)))
    frame = (
        ("", "") if not framed else (f'<div class="wide" role="region" tabindex="0" aria-label="{label}">', "</div>")
    )
    return Html(
        f'{frame[0]}<table aria-label="{label}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table>{frame[1]}"
    )


def _cell(tag: str, value: Any, right: bool, attributes: str = "") -> str:
    kind = ' class="number"' if right else ""
    return f"<{tag}{kind}{attributes}>{text(value)}</{tag}>"


def bar(content: str, part: float) -> Html:
    """A cell that is filled from the left by so much of it.

    Args:
        content: HTML.
        part: 0..1.
    """
    return Html(f'<span class="bar" style="--part: {part:.4f}">{content}</span>')


def section(title: str, how: str, content: str, *, source: str = "", kind: str = "") -> Html:
    """A part of a page under a heading.

    Args:
        title: the heading; escaped.
        how: a sentence on how to read it; escaped.
        content: HTML.
        source: where it comes from, behind the sentence; escaped.
        kind: the section's class.
    """
    cite = f' <span class="cite">({escape(source)})</span>' if source else ""
    attributes = f' class="{kind}"' if kind else ""
    explained = f'<h2>{escape(title)}</h2>\n<p class="how">{escape(how)}{cite}</p>'
    return Html(f"<section{attributes}>{explained}\n{content}</section>")


def data_uri(pixels: np.ndarray) -> str:
    """An image in a line: PNG, or JPEG where it is smaller and nothing is transparent. Needs Pillow.

    Args:
        pixels: uint8 (height, width) grey, (height, width, 3) or, with transparency, (height, width, 4).
    """
    from PIL import Image

    picture = Image.fromarray(pixels)
    kinds: dict[str, dict[str, Any]] = {"png": {"optimize": True}}
    if picture.mode != "RGBA":
        kinds["jpeg"] = {"quality": JPEG_QUALITY, "optimize": True}
    files = {}
    for kind, options in kinds.items():
        buffer = io.BytesIO()
        picture.save(buffer, kind, **options)
        files[kind] = buffer.getvalue()
    best = min(files, key=lambda kind: len(files[kind]))
    return f"data:image/{best};base64,{base64.b64encode(files[best]).decode()}"


def image(pixels: np.ndarray, *, alt: str, attributes: str = "") -> Html:
    """An <img> that carries its pixels.

    Args:
        pixels: as for `data_uri`.
        alt: what it shows, in words.
        attributes: further ones, as HTML.
    """
    return Html(f'<img src="{data_uri(pixels)}" alt="{escape(alt)}"{attributes and " "}{attributes}>')


def svg(figure: Any, *, alt: str) -> Html:
    """A matplotlib figure as inline SVG that takes the page's colours, in light and in dark.

    Args:
        figure: a `matplotlib.figure.Figure` drawn in the light scheme's COLOURS.
        alt: what it shows, in words.
    """
    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Letters as shapes: the drawing has measured them. The salt makes the same names, and so the same file, each time.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "keras_vit"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r' xmlns(:\w+)?="[^"]*"', "", drawing).replace("xlink:href", "href")
    drawing = _own_names(drawing, f"s{zlib.crc32(drawing.encode()):08x}-")
    for name, (light, _) in COLOURS.items():
        drawing = drawing.replace(light, f"var(--{name})")
    label = f'<svg role="img" aria-label="{escape(alt)}"'
    return Html(drawing.replace("<svg", label, 1).strip())


def _own_names(drawing: str, prefix: str) -> str:
    """The drawing with names that no other on the page has; those that nothing refers to are left out."""
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', drawing))
    drawing = re.sub(r' id="([^"]*)"', lambda match: f' id="{prefix}{match[1]}"' if match[1] in used else "", drawing)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", drawing)
