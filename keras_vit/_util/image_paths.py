"""Find image files in lists of files, folders and patterns."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

READABLE = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
# Files of a folder with these suffixes are images. Formats that cannot be decoded are listed too: such a file is an
# error, and not left out without a word.
SUFFIXES = (*READABLE, ".heic", ".heif", ".avif")


def image_files(paths: Iterable[str | os.PathLike[str]], *, most: int | None = None) -> list[str]:
    """Return the image files among files, folders (with their sub-folders) and patterns such as "photos/*.jpg".

    A named file is returned whatever its suffix, and a URL as it is; files of folders and patterns are sorted, without
    hidden ones and other suffixes. `most` limits the files of a folder or pattern to so many, evenly chosen.
    """
    found: list[str] = []
    for path in paths:
        files = _expand(os.fspath(path))
        found.extend(files[:: -(-len(files) // most) if most else 1])
    return found


def readable_images(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the files as `image_files` does; a ValueError if all of them are empty."""
    files = image_files(paths)
    if not any("://" in file or Path(file).expanduser().stat().st_size for file in files):
        raise ValueError(f"{files[0]!r} is empty: it holds no image")
    return files


def _expand(path: str) -> list[str]:
    place = Path(path).expanduser()
    if "://" in path or place.is_file():
        return [path]
    if not place.exists() and not glob.has_magic(path):
        raise FileNotFoundError(f"There is no image file or folder {path!r}")
    if place.exists() and not place.is_dir():  # reading a device or a pipe might never end
        raise ValueError(f"{path!r} is not a regular file")
    # Path.glob takes no absolute patterns.
    matches = [place] if place.exists() else map(Path, glob.iglob(str(place), recursive=True))  # noqa: PTH207
    files = sorted(
        {
            str(file)
            for match in matches
            for file in (match.rglob("*") if match.is_dir() else [match])
            if file.suffix.lower() in SUFFIXES
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(match).parts)
        }
    )
    if not files:
        raise FileNotFoundError(f"{path!r} has no images ({', '.join(SUFFIXES)})")
    return files
