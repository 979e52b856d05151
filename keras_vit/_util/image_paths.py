"""Find image files in lists of files, folders and patterns, and read them."""

import glob
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from keras_vit._util.checks import as_path
from keras_vit._util.text import abbreviated

READABLE = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
# Files of a folder with these suffixes are images. Formats that cannot be decoded are listed too: such a file raises an
# error, instead of being left out silently.
SUFFIXES = (*READABLE, ".heic", ".heif")
MAX_BYTES = 200_000_000  # of an image file: those of the largest images, 50 million pixels, with no compression at all
CHUNK = 1 << 20


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
    place = Path(as_path(path, "an image file")).expanduser()
    if "://" in path or place.is_file():
        return [path]
    if not place.exists() and not glob.has_magic(path):
        raise FileNotFoundError(f"There is no image file or folder {path!r}")
    if not place.is_dir():
        check_regular(place)
    # Path.glob takes no absolute patterns.
    matches = [place] if place.exists() else map(Path, glob.iglob(str(place), recursive=True))  # noqa: PTH207
    files = sorted(set(walk(matches, is_wanted)))
    if not files:
        raise FileNotFoundError(f"{path!r} has no images ({', '.join(SUFFIXES)})")
    return files


def walk(places: Iterable[Path], is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield the wanted, visible files of folders, sorted, and files themselves; warn about what is left out."""
    left_out: list[str] = []
    for folder, inner, names in itertools.chain.from_iterable(map(_visible, places)):
        wanted = [folder / name for name in names if is_wanted(name)]
        left_out += [str(folder / name) for name in inner if (folder / name).is_symlink()]
        if is_wanted(folder.name) and not (inner or wanted):
            left_out.append(str(folder))
        for path in wanted:
            if path.is_file():
                yield str(path)
            else:
                left_out.append(str(path))
    if left_out:
        reason = (
            "links to folders, broken links, pipes or folders, not image files. Pass their paths to include folders"
        )
        warnings.warn(f"Left out: {len(left_out):,} ({abbreviated(left_out)}), {reason}", stacklevel=2)


def _visible(place: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder as `os.walk` does, sorted and without hidden names; a file as the only one of its folder."""
    if not place.is_dir():
        yield place.parent, [], [place.name]
        return
    for folder, inner, names in os.walk(place, onerror=_raise):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield Path(folder), inner, sorted(name for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error  # os.walk leaves a folder out that it may not read


def read_file(name: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a local image file; raise an error if it is a folder, a device, too large or missing."""
    path = Path(as_path(name, "an image file")).expanduser()
    if path.is_dir():
        raise ValueError(f"{name!r} is a folder, not an image file; pass a list of the files in it")
    check_regular(path)
    try:
        size = path.stat().st_size
        if not size:
            return b""  # files of /proc have no size, and reading some of them does not end
        _check_size(name, size, max_bytes)
        with path.open("rb") as file:
            return read_limited(file, name, max_bytes)
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no image file {name!r}") from None


def read_limited(file: Any, name: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the rest of an open file in binary mode; raise a ValueError if it has more bytes."""
    parts, size = [], 0
    while part := file.read(CHUNK):
        parts.append(bytes(part))
        size += len(part)
        _check_size(name, size, max_bytes)
    return b"".join(parts)


def check_regular(path: Path) -> None:
    """Raise a ValueError for a device, a pipe or a folder: reading a device or a pipe might never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{str(path)!r} is not a regular file")


def _check_size(name: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise ValueError(f"{name!r} has {size:,} bytes or more. An image file has at most {max_bytes:,}")
