"""Find image files in lists of files, folders and patterns."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

READABLE = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
# Files of a folder with these suffixes are images. Formats that cannot be decoded are listed too: such a file raises an
# error, instead of being left out silently.
SUFFIXES = (*READABLE, ".heic", ".heif", ".avif")


def is_image(name: str) -> bool:
    """Return whether a file with this name is an image."""
    return name.lower().endswith(SUFFIXES)


def image_files(paths: Iterable[str | os.PathLike[str]], *, most: int | None = None) -> list[str]:
    """Return the image files among files, folders (with their sub-folders) and patterns such as "photos/*.jpg".

    A named file is returned whatever its suffix, and a URL as it is; files of folders and patterns are sorted, without
    hidden ones and other suffixes. `most` limits the files of a folder or pattern to so many, evenly chosen.
    """
    found: list[str] = []
    for path in paths:
        files = expand(os.fspath(path))
        found.extend(files[:: -(-len(files) // most) if most else 1])
    return found


def readable_images(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the files as `image_files` does; raise a ValueError if all of them are empty."""
    files = image_files(paths)
    if not any("://" in file or Path(file).expanduser().stat().st_size for file in files):
        raise ValueError(f"{files[0]!r} is empty: it contains no image")
    return files


def expand(path: str, is_wanted: Callable[[str], bool] = is_image) -> list[str]:
    """Return the files of a path or pattern as `image_files` does; `is_wanted` takes the name of a file."""
    place = Path(path).expanduser()
    if "://" in path or place.is_file():
        return [path]
    if not place.exists() and not glob.has_magic(path):
        raise FileNotFoundError(f"There is no image file or folder {path!r}")
    if place.exists() and not place.is_dir():  # reading a device or a pipe might never end
        raise ValueError(f"{path!r} is not a regular file")
    # Path.glob takes no absolute patterns.
    matches = [place] if place.exists() else map(Path, glob.iglob(str(place), recursive=True))  # noqa: PTH207
    files = sorted({file for match in matches for file in walk(match, is_wanted)})
    if not files:
        raise FileNotFoundError(f"{path!r} has no images ({', '.join(SUFFIXES)})")
    return files


def walk(place: Path, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield the wanted files that are not hidden of a folder and its sub-folders, each sorted; or the file `place`."""
    if place.is_file() and is_wanted(place.name):
        yield str(place)
    for folder, inner, names in os.walk(place, onerror=_raise) if place.is_dir() else ():
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        visible = (Path(folder, name) for name in sorted(names) if is_wanted(name) and not name.startswith("."))
        yield from (str(path) for path in visible if path.is_file())


def _raise(error: OSError) -> None:
    raise error  # os.walk leaves a folder out that it may not read
