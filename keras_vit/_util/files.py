"""Find, check and write files: images by paths and patterns, data files of the package, results that appear whole."""

import contextlib
import errno
import glob
import hashlib
import itertools
import json
import os
import secrets
import stat
import struct
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from keras_vit._util.checks import as_path, check_depth, expand_home
from keras_vit._util.text import abbreviated, warn
from keras_vit.errors import VerificationError


def cache_folder() -> Path:
    """Folder for downloaded files and for notes of results, which may not exist yet."""
    if folder := os.environ.get("KERAS_VIT_CACHE"):
        return expand_home(folder)
    try:
        return expand_home(os.environ.get("KERAS_HOME") or "~/.keras") / "keras_vit"
    except ValueError:
        raise ValueError(
            "Downloads are kept in ~/.keras, and this user has no home directory: set KERAS_VIT_CACHE to a folder"
        ) from None


def check_results(paths: Iterable[str | os.PathLike[str]], *, inputs: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Raise an error unless results can be written to all of these paths. Call it before any work.

    A path may be free, a device, a pipe, empty, or an earlier result that nobody has changed since, see `is_own`; but
    none of the inputs, which are files or folders of them.

    Raises:
        FileExistsError: there is an input, or a file that keras_vit has not written, or that was changed since.
        FileNotFoundError, IsADirectoryError: a path cannot be a file.
    """
    places = [place for path in inputs for place in (path, *_files_of(path))]
    sources = {(found.st_dev, found.st_ino) for found in map(_status, places) if found}
    for path in map(Path, paths):
        if not path.name or path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "A file cannot be written over a folder", str(path))
        if not path.resolve().parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "There is no folder for the file", str(path))
        status = _status(path)
        if status and (status.st_dev, status.st_ino) in sources:
            raise FileExistsError(
                errno.EEXIST, "The result would replace an input; choose another path than", str(path)
            )
        if status and path.is_file() and status.st_size and not is_own(path):
            reason = (
                "This file was not written by keras-vit in this place (it may be a copy), or was changed since, and is "
                "not replaced; remove it, or choose another path"
            )
            raise FileExistsError(errno.EEXIST, reason, str(path))


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    try:
        return expand_home(path).stat()
    except (OSError, ValueError):  # no file: a URL, a pattern, a text
        return None


def _files_of(path: str | os.PathLike[str]) -> list[Path]:
    """List the files of a folder; none of a file, a URL or a pattern."""
    return [*expand_home(path).iterdir()] if _status(path) and expand_home(path).is_dir() else []


def is_own(path: Path) -> bool:
    """True if keras_vit wrote this file, and its content is still what was written.

    The cache folder has the hash of each result, by its path. A file that was moved, or comes from another machine, is
    its owner's.
    """
    note = _note_of(path)
    return path.is_file() and note is not None and note.is_file() and note.read_text() == _hash_content(path)


def record_results(*paths: Path) -> None:
    """Note the content of finished results in the cache folder, so that a later command may replace them.

    A process that is killed before it leaves results that no command replaces, which is the safe side.
    """
    for path in paths:
        note = _note_of(path)
        if path.is_file() and note is not None:  # no device, no pipe
            with contextlib.suppress(OSError):  # a cache that cannot be written: then nothing is replaced
                note.parent.mkdir(parents=True, exist_ok=True)
                with replacing(note) as file:
                    file.write(_hash_content(path).encode())


def _note_of(path: Path) -> Path | None:
    """Find the file in the cache folder with the hash of a result; None without a home directory."""
    try:
        return cache_folder() / "results" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    except ValueError:
        return None


@contextlib.contextmanager
def writing_result(path: Path) -> Iterator[BinaryIO]:
    """Open a result, which `check_results` has accepted, as `replacing` does, and record it."""
    with replacing(path) as file:
        yield file
    record_results(path)


def _hash_content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` for binary writing, which replaces `path` only if the block succeeds.

    A link stays and its target is replaced; a device or a pipe is written into.
    """
    path = path.resolve()
    if path.exists() and not (path.is_file() or path.is_dir()):
        with path.open("wb") as file:
            yield file
        return
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(path)  # the system does not say which disk is full
        raise
    finally:
        partial.unlink(missing_ok=True)


PACKAGE = Path(__file__).resolve().parents[1]


def data_folder(name: str) -> Path:
    """Find the data folder "zoo" or "converters" of the installed package, or else of the checkout."""
    places = [PACKAGE / "_installed" / name, PACKAGE.parent / name]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"keras_vit's data folder {name!r} was expected in one of {[str(place) for place in places]}. "
        "The installation is incomplete: install keras-vit-zoo again, or run from a full checkout."
    )


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file in UTF-8; if it is malformed, raise a ValueError that names the line."""
    data = Path(path).read_bytes()
    try:
        table = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} is not UTF-8 text (at line {line}). Save it as UTF-8.") from error
    except ValueError as error:  # a TOMLDecodeError, or an integer of thousands of digits
        raise ValueError(f"{path} is not valid TOML: {error}. Fix that line.") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read.") from error
    return dict(check_depth(table, str(path)))


MAX_JSON_BYTES = 10 << 20  # of a config.json; an id2label of 21,843 classes takes 1.5 MB


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise a ValueError if it is not valid or nested too deeply."""
    try:
        return check_depth(json.loads(text), "it")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {str(error)[:200]}") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; raise a ValueError if it is something else."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"is a {type(value).__name__}, not an object")
    return value


READABLE = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
# Files of a folder with these suffixes are images. Formats that cannot be decoded are listed too: such a file raises an
# error, instead of being left out silently.
SUFFIXES = (*READABLE, ".heic", ".heif")
MAX_BYTES = 200_000_000  # of an image file: those of the largest images, 50 million pixels, with no compression at all
CHUNK = 1 << 20


def is_image(name: str) -> bool:
    """Recognise an image file by its name."""
    return name.lower().endswith(SUFFIXES)


def image_files(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """List the image files among files, folders (with their sub-folders) and patterns such as "photos/*.jpg".

    A named file is returned whatever its suffix, and a URL as it is; files of folders and patterns are sorted, without
    hidden ones and other suffixes.
    """
    return [file for path in paths for file in expand(os.fspath(path))]


def readable_images(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """List files as `image_files` does; raise a ValueError if all of them are empty."""
    files = image_files(paths)
    if not any("://" in file or expand_home(file).stat().st_size for file in files):
        raise ValueError(f"{files[0]!r} is empty: it contains no image")
    return files


def expand(path: str, is_wanted: Callable[[str], bool] = is_image) -> list[str]:
    """List the files of a path or pattern as `image_files` does; `is_wanted` takes the name of a file."""
    place = expand_home(as_path(path, "an image file"))
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
    """Iterate over the wanted, visible files of folders, sorted, and files themselves; warn about those left out."""
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
        warn(f"Left out: {len(left_out):,} ({abbreviated(left_out)}), {reason}")


def _visible(place: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk folders as `os.walk` does, sorted and without hidden names; a file is the only one of its folder."""
    if not place.is_dir():
        yield place.parent, [], [place.name]
        return
    for folder, inner, names in os.walk(place, onerror=_raise):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield Path(folder), inner, sorted(name for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error  # os.walk leaves a folder out that it may not read


def read_file(name: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a local image file; raise an error if it is a folder, a device, too large or missing."""
    path = expand_home(as_path(name, "an image file"))
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
    """Read the rest of an open file in binary mode; raise a ValueError if it has more bytes."""
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


def hash_files(names: Iterable[str], base: Path = Path()) -> str:
    """Hash the names, sizes, times and inodes of files, which tells whether they are the same as in an earlier run.

    Copied files are others: the times include that of the last change, which no program can set. The inode tells files
    of one size that were written in the same instant and changed places. Of URLs only the names count.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        digest.update(b"\0" + os.fsencode(name))
        try:
            facts = None if "://" in name else (base / name).stat()
        except (OSError, ValueError):  # there is no such file
            facts = None
        if facts is not None and stat.S_ISREG(facts.st_mode):
            digest.update(f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_ino}".encode())
    return digest.hexdigest()


HEAD, TAIL = 12, 4  # bytes before a record (its length, and a checksum) and after it (a checksum)


def count_records(path: str) -> tuple[int, str | None]:
    """Count the records that fit into the file; return the error of the next one as well, if there is one."""
    opened: Any
    if "://" in path:
        import tensorflow as tf

        opened = tf.io.gfile.GFile(path, "rb")
    else:
        opened = open(path, "rb")  # noqa: PTH123, SIM115
    with opened as file:
        file.seek(0, 2)
        size, place, count = file.tell(), 0, 0
        while place < size:
            file.seek(place)
            head = file.read(HEAD)
            length = struct.unpack("<Q", head[:8])[0] if len(head) == HEAD else 0
            if len(head) < HEAD or length > size - place - HEAD - TAIL:
                rest = f"{size - place:,} bytes are left in the file"
                return count, f"{path!r}: record {count} states a length of {length:,} bytes, and {rest}"
            place += HEAD + length + TAIL
            count += 1
    return count, None


MAX_PREFIX = 32  # letters of the final name in the temporary one, so that this is not too long


@contextlib.contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Make a temporary folder beside `path`, from which the block moves its result.

    The folder is removed at the end. A VerificationError and the error of a full disk name the final path.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name[:MAX_PREFIX]}.", dir=path.parent) as folder:
            work = Path(folder) / "export"
            yield work
    except VerificationError as error:
        raise VerificationError(str(error).replace(str(work), str(path))) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, "The disk is full; nothing was written to", str(path)) from error


def check_no_file_in_way(path: Path) -> None:
    """Raise a NotADirectoryError if a file is in the way of a folder."""
    found = next((place for place in (path, *path.parents) if place.exists()), None)
    if found is not None and not found.is_dir():
        raise NotADirectoryError(f"{path} must be a folder. Received: {found} is a file")


def check_folder_path(path: Path) -> None:
    """Raise an OSError if there is something at the path of a SavedModel's folder, or a file above it."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} already exists: remove it, or write the next version beside it")
    check_no_file_in_way(path)
