"""Finding the damaged images of a folder before training, so that no step stops at one.

Every file is decoded once. What was found whole is remembered in the cache folder under the file's name, length and
time of change; only new and changed files, and the damaged ones, are decoded again.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from keras_vit._util.atomic import replacing
from keras_vit._util.download import cache_folder
from keras_vit.train.data.split import decodes

CHUNK = 4096  # files at a time: a pool keeps a record of each that it was given

Item = TypeVar("Item")
Result = TypeVar("Result")


def damaged(folder: str, files: Sequence[str]) -> list[int]:
    """Looks for images that cannot be decoded.

    Args:
        folder: local or `gs://`.
        files: paths in it.

    Returns:
        the places in `files` of those that are damaged, ascending.

    Raises:
        PermissionError: for a file that may not be read.
        FileNotFoundError: for a file that is no longer there.
    """
    memory = _memory(folder)
    with ThreadPoolExecutor(max_workers=2 * (os.cpu_count() or 1)) as pool:
        prints = np.fromiter(_each(pool, lambda file: _fingerprint(folder, file), files), np.uint64, len(files))
        new = np.flatnonzero(~np.isin(prints, _recall(memory)))
        whole = list(_each(pool, lambda number: _whole(folder, files[number]), new.tolist(), "checking images"))
    bad = new[~np.asarray(whole, bool)]
    if len(new) > len(bad):
        _remember(
            memory, np.union1d(_recall(memory), np.delete(prints, bad))
        )  # other parts of the folder are there too
    return bad.tolist()


def opened(action: Callable[[str], Result], path: str) -> Result:
    """Does something with a path of TensorFlow's file systems; Python's errors where it may not or there is none."""
    try:
        return action(path)
    except tf.errors.PermissionDeniedError as error:
        raise PermissionError(f"{path} may not be read: change its permissions, or the user.") from error
    except (tf.errors.NotFoundError, tf.errors.FailedPreconditionError) as error:
        raise FileNotFoundError(f"{path} is not there, or not what its name says: {error.message}") from error


def _each(
    pool: ThreadPoolExecutor, action: Callable[[Item], Any], items: Sequence[Item], title: str | None = None
) -> Iterator[Any]:
    from tqdm import tqdm

    look: dict[str, Any] = {"desc": title, "file": sys.stderr, "disable": None if title and items else True}
    with tqdm(total=len(items), **look) as bar:
        for start in range(0, len(items), CHUNK):
            for result in pool.map(action, items[start : start + CHUNK]):
                bar.update()
                yield result


def _whole(folder: str, file: str) -> bool:
    return decodes(opened(tf.io.read_file, f"{folder}/{file}"))


def _fingerprint(folder: str, file: str) -> int:
    """64 bits that change when the file does."""
    state = opened(tf.io.gfile.stat, f"{folder}/{file}")
    text = f"{file} {state.length} {state.mtime_nsec}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _memory(folder: str) -> Path:
    """Where the fingerprints of a folder's whole images are kept."""
    name = folder if "://" in folder else os.path.realpath(folder)
    return cache_folder() / "checked-images" / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.npy"


def _recall(memory: Path) -> np.ndarray:
    if not memory.exists():
        return np.zeros(0, np.uint64)
    try:
        return np.load(memory)
    except (OSError, ValueError) as error:
        warnings.warn(f"{memory} cannot be read ({error}): all images are checked again.", stacklevel=2)
        return np.zeros(0, np.uint64)


def _remember(memory: Path, prints: np.ndarray) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with replacing(memory) as file:
            np.save(file, prints)
    except OSError as error:
        warnings.warn(
            f"That the images were checked cannot be kept in {memory.parent} ({error}): the next run will check them"
            " again. Set KERAS_VIT_CACHE to a folder that can be written.",
            stacklevel=2,
        )
