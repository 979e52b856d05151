"""Draw docs/images/folders.svg: the folders of the package, by floor, and the imports between them.

python tests/support/folder_picture.py
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from package_source import FLOORS, MODULES, PACKAGE, imported_modules
from places import ROOT

PICTURE = ROOT / "docs" / "images" / "folders.svg"
MAIN_COLUMN = 2
# What each folder (or module at the top of the package) is for, and the column it is drawn in.
CONTENT = {
    "__main__": ("python -m keras_vit", 2),
    "cli": ("the command keras-vit", 2),
    "__init__": ("the public names", 2),
    "batch": ("rows of any number of images", 2),
    "train": ("recipes, data, training, evaluation", 1),
    "zoo": ("model cards; load by name", 1),
    "dense": ("a class or distance for every pixel", 2),
    "text": ("text towers and tokenizers", 1),
    "converters": ("read and write checkpoints", 1),
    "export": ("LiteRT and SavedModel, verified", 2),
    "visualize": ("arrays and the HTML report", 3),
    "model": ("config, layers, preprocessing", 2),
    "digits": ("the data set that works offline", 0),
    "position": ("resize position embeddings", 3),
    "_util": ("downloads, files, text, checks", 2),
    "errors": ("all public exceptions", 2),
}
COLUMN, ROW = 240, 82  # pixels from one box to the next
WIDTH, HEIGHT = 212, 46  # of a box
APART = 10  # pixels: lines leave a side this far below its middle, and arrive this far above


class Box(NamedTuple):
    """A folder in the picture: the centre of its box, in pixels."""

    name: str
    x: int
    y: int


def boxes() -> dict[str, Box]:
    """Return the box of every folder: a row for each floor, the highest floor first."""
    found = {}
    for row, names in enumerate(reversed(FLOORS)):
        for name in sorted(names):
            column = CONTENT[name][1]
            found[name] = Box(name, COLUMN * column + COLUMN // 2, ROW * row + ROW // 2)
    return found


def imports() -> set[tuple[str, str]]:
    """Return all pairs of folders in which the first imports from the second."""
    pairs = {
        (module.partition(".")[0], other.partition(".")[0]) for module in MODULES for other in imported_modules(module)
    }
    return {(importer, imported) for importer, imported in pairs if importer != imported}


def arrows() -> set[tuple[str, str]]:
    """Return the imports without those that follow from others: a -> c where there are a -> b and b -> c."""
    pairs = imports()
    return {pair for pair in pairs if pair[1] not in reachable(pair[0], pairs - {pair})}


def reachable(start: str, pairs: set[tuple[str, str]]) -> set[str]:
    """Return all folders that one folder reaches along pairs."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        folder = waiting.pop()
        new = {end for begin, end in pairs if begin == folder} - found
        found |= new
        waiting += new
    return found


def rendered() -> str:
    """Return the picture as SVG."""
    size = (COLUMN * 4, ROW * len(FLOORS))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif">',
            "<title>The folders of keras_vit and the imports between them</title>",
            '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
            '<path d="M0 0 L9 4 L0 8 z" fill="#46606a"/></marker></defs>',
            f'<rect width="{size[0]}" height="{size[1]}" fill="#ffffff"/>',
            *_lines(),
            "</svg>\n",
        ]
    )


def _lines() -> Iterator[str]:
    places = boxes()
    for importer, imported in sorted(arrows()):
        path = _path(places[importer], places[imported])
        yield f'<path d="{path}" fill="none" stroke="#46606a" stroke-width="1.5" marker-end="url(#head)"/>'
    for name, (_, x, y) in places.items():
        left, top = x - WIDTH // 2, y - HEIGHT // 2
        label = f"{name}/" if (PACKAGE / name).is_dir() else f"{name}.py"
        yield f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#e8f1f2" stroke="#46606a"/>'
        yield f'<text x="{x}" y="{y - 3}" text-anchor="middle" font-size="14" font-weight="bold">{escape(label)}</text>'
        text = escape(CONTENT[name][0])
        yield f'<text x="{x}" y="{y + 14}" text-anchor="middle" font-size="11.5" fill="#333333">{text}</text>'


def _path(start: Box, end: Box) -> str:
    """Return a line with at most one corner: outward first across and then down, inward first down and then across."""
    if start.x == end.x:
        return f"M{start.x} {start.y + HEIGHT // 2} V{end.y - HEIGHT // 2}"
    side = 1 if end.x > start.x else -1
    main = COLUMN * MAIN_COLUMN + COLUMN // 2
    if abs(end.x - main) > abs(start.x - main):
        return f"M{start.x + side * WIDTH // 2} {start.y + APART} H{end.x} V{end.y - HEIGHT // 2}"
    return f"M{start.x} {start.y + HEIGHT // 2} V{end.y - APART} H{end.x - side * WIDTH // 2}"


if __name__ == "__main__":
    PICTURE.write_text(rendered(), encoding="utf-8")
