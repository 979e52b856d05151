"""Find image files in lists of files, folders and patterns."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

# Files of a folder with these suffixes are images. Formats that cannot be decoded are listed too: such a file is an
# error, and not left out without a word.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".heic", ".heif", ".avif")


def image_files(paths: Iterable[str | os.PathLike[str]], *, most: int | None = None) -> list[str]:
    """Return the image files among files, folders (with their sub-folders) and patterns such as "photos/*.jpg".

    A named file is returned whatever its suffix; files of folders and patterns are sorted, hidden ones and other
    suffixes are left out. URLs are returned as they are. `most` limits the files of a folder or pattern to so many,
    evenly chosen. A FileNotFoundError or ValueError names the first path without images.
    """
    found: list[str] = []
    for path in paths:
        files = _expand(os.fspath(path))
        step = -(-len(files) // most) if most else 1
        found.extend(files[::step])
    return found


def readable_images(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the files as `image_files` does; a ValueError if all of them are empty."""
    files = image_files(paths)
    if not any("://" in file or Path(file).expanduser().stat().st_size for file in files):
        raise ValueError(f"{files[0]!r} is empty: it holds no image")
    return files


def _expand(path: str) -> list[str]:
    if "://" in path:
        if path.startswith(("http://", "https://")):
            raise ValueError(f"Images are files: download this one first. Received: {path!r}")
        return [path]
    place = Path(path).expanduser()
    if place.is_file():
        return [path]
    if place.is_dir():
        files = sorted(_images_in([place]))
    elif place.exists():
        raise ValueError(f"Expected an image file or a folder. Received: {path!r}, which is neither")
    elif glob.has_magic(path):
        matches = glob.iglob(str(place), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
        files = sorted(_images_in(map(Path, matches)))
    else:
        raise FileNotFoundError(f"There is no image file or folder {path!r}")
    if not files:
        kind = "folder" if place.is_dir() else "pattern"
        raise FileNotFoundError(f"The {kind} {path!r} has no images ({', '.join(SUFFIXES)})")
    return files


def _images_in(places: Iterable[Path]) -> Iterator[str]:
    for place in places:
        if place.is_dir():
            inside = (file for file in place.rglob("*") if not _is_hidden(file.relative_to(place)))
            yield from (str(file) for file in inside if _is_image(file))
        elif _is_image(place):
            yield str(place)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()
