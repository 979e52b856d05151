"""Find the embeddings that are nearest to a query, and write a page of the images.

The search is exact, in blocks, so that memory is bounded.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_vit._util.text import needs_extra, printable, warn

with needs_extra("keras_vit.batch", "batch"):
    import pyarrow as pa
    import pyarrow.parquet as pq

from keras_vit._util import html
from keras_vit._util.checks import check_counts, expand_home
from keras_vit._util.files import writing_result
from keras_vit.batch.folder import Folder, find_folder
from keras_vit.errors import DownloadError
from keras_vit.model.classify import IMAGE_ERRORS
from keras_vit.model.config import Preprocessing
from keras_vit.model.preprocess import decode_bytes

BLOCK = 4 << 20  # numbers in a block: 16 MB in float32
SIDE = 256  # pixels of the longer side of a thumbnail

_Block = tuple[np.ndarray, np.ndarray, Any]


class Match(NamedTuple):
    """A row that a search found: its number from 0, its path (None in an array), and its cosine with the query.

    Example:
        >>> keras_vit.batch.Match(row=17, path="photos/cat.jpg", score=0.31).path
        'photos/cat.jpg'
    """

    row: int
    path: str | None
    score: float


def search(vectors: str | os.PathLike[str] | np.ndarray, queries: Any, *, top: int = 10) -> list[list[Match]]:
    """Find the rows whose cosine with a query is largest. The search is exact: every row is compared.

    A file is read in blocks of about 16 MB, however many rows it has.

    Args:
        vectors: a folder of `batch.embed` (`keras-vit embed`), a .npy file, or an array: float (rows, width), of any
            length above 0. The rows of a folder that have an error are left out.
        queries: float (queries, width) or (width,), such as `model.embed` returns.
        top: number of rows for each query, >= 1.

    Returns:
        The matches of each query, the best first, of equal ones the first row. A score is from -1 to 1.

    Raises:
        ValueError: queries and rows differ in width, are zero or not finite, or the folder has no embeddings.
        FileNotFoundError: there is no such file, or no such folder of `batch.embed`.

    Example:
        >>> index = np.eye(3, dtype="float32")
        >>> [match.row for match in keras_vit.batch.search(index, [0.1, 0.9, 0.4], top=2)[0]]
        [1, 2]
    """
    check_counts(top=top)
    wanted = np.atleast_2d(queries)
    if wanted.ndim != 2 or not wanted.size or wanted.dtype.kind in "cO" or np.ma.isMaskedArray(queries):
        kind = f"{type(queries).__name__}, {wanted.dtype} of shape {wanted.shape}"
        raise ValueError(f"queries must be numbers (queries, width), real and without a mask. Received: {kind}")
    wanted = wanted.astype(np.float32)
    wanted = wanted / _lengths(wanted, range(len(wanted)), "query")[:, None]
    found: list[list[Match]] = [[] for _ in wanted]
    for rows, numbers, paths in _blocks(vectors, wanted.shape):
        lengths = _lengths(rows, numbers, "row")  # before the product, in which infinity makes some processors warn
        scores = np.clip(wanted @ rows.T / lengths, -1, 1)  # rounded, a cosine may be 1.0000002
        for best, query_scores in zip(found, scores, strict=True):
            better = np.flatnonzero(query_scores > (best[-1].score if len(best) == top else -np.inf))
            for place in better[np.argsort(-query_scores[better], kind="stable")[:top]].tolist():
                path = None if paths is None else paths[place].as_py()
                best.append(Match(int(numbers[place]), path, float(query_scores[place])))
            best.sort(key=lambda match: -match.score)  # stable, so of equal ones the first row
            del best[top:]
    return found


def _lengths(rows: np.ndarray, numbers: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """Compute the lengths of rows; raise a ValueError with the number of one that is zero or not finite."""
    with np.errstate(over="ignore"):
        lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    if (bad := np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))).size:
        raise ValueError(f"Embeddings must be finite and not zero. Received: others, such as {name} {numbers[bad[0]]}")
    return lengths


def _blocks(vectors: Any, shape: tuple[int, ...]) -> Iterator[_Block]:
    """Yield rows as float32, their numbers, and their paths or None; `shape` is that of the queries."""
    size = max(1, BLOCK // max(shape))
    path = expand_home(vectors) if isinstance(vectors, str | os.PathLike) else None
    if path is not None and path.suffix != ".npy":
        yield from _folder_blocks(path, shape[1], size)
        return
    array = np.asarray(vectors) if path is None else _map_npy(path)
    if array.ndim != 2 or array.dtype.kind != "f" or np.ma.isMaskedArray(vectors):
        kind = f"{type(vectors).__name__}, {array.dtype} of shape {array.shape}"
        raise ValueError(f"vectors must be floats (rows, width) without a mask. Received: {kind}")
    _check_width(array.shape[1], shape[1])
    for first in range(0, len(array), size):
        # With a new memory map for each block, the file never counts as memory of the process.
        source = array if path is None else _map_npy(path)
        part = np.asarray(source[first : first + size], np.float32)
        yield part, np.arange(first, first + len(part)), None


def _map_npy(path: Path) -> np.ndarray:
    try:
        with path.open("rb") as file:
            from keras_vit.converters.containers import check_npy

            check_npy(file, path.stat().st_size)
        return np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def _folder_blocks(path: Path, width: int, size: int) -> Iterator[_Block]:
    folder, first = find_folder(path), 0
    if folder.record["what"] != "embeddings":
        raise ValueError(f"{path} has no embeddings, but {folder.record['what']}: run keras-vit embed without --what")
    files = folder.finished()
    if unfinished := folder.record["files"] - len(files):
        warn(f"{path} lacks {unfinished:,} files: its run has not finished")
    for name in files:
        try:
            with pq.ParquetFile(name) as file:
                schema = file.schema_arrow
                _check_width(schema.field("embeddings").type.list_size, width)
                if not pa.types.is_string(schema.field("path").type):
                    raise AttributeError(f"its paths are {schema.field('path').type}, not strings")
                for batch in file.iter_batches(size, columns=["path", "embeddings"]):
                    is_good = batch["embeddings"].is_valid()
                    rows = batch["embeddings"].flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
                    numbers = first + np.flatnonzero(is_good)
                    yield rows.astype(np.float32, copy=False), numbers, batch["path"].filter(is_good)
                    first += len(batch)
        except (pa.ArrowException, AttributeError, KeyError, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name} is not a file of this run, or it is damaged: {str(error)[:200]}") from None


def _check_width(width: int, wanted: int) -> None:
    if width != wanted:
        raise ValueError(
            f"The query and the vectors have different widths, {wanted} and {width}: they are of different models"
        )


def write_contact_sheet(
    path: Path, title: str, folder: Folder, found: Iterable[Match], preprocessing: Preprocessing | None = None
) -> None:
    """Write one HTML file with the images of matches in a folder, or why they cannot be read.

    `preprocessing` is that of the model, which may state the values of pictures that are not bytes.
    """
    cells = []
    for _, name, score in found:
        picture = error = ""
        try:
            pixels = decode_bytes(folder.read(name or ""), 3, preprocessing)
            picture = html.data_uri(html.thumbnail(pixels.astype(np.uint8), SIDE))
        except (*IMAGE_ERRORS, ImportError, DownloadError) as reason:
            error = printable(str(reason))
        cells.append((printable(name or ""), f"{score:.3f}", picture, error))
    template = html.environment().get_template("contact_sheet.html")
    with writing_result(path) as file:
        file.write(template.render(title=printable(title), cells=cells).encode())
