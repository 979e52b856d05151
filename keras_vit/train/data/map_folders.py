"""Open folders of images with a map for each: `images/` beside `masks/` (classes) or `depth/` (distances).

Both are in the folder itself, or in each of its split folders (train, val, validation, test). A map has the name of its
image but for the suffix: `images/0001.jpg`, `masks/0001.png`. Two files beside `images/` describe the maps:
`classes.txt` has the name of a class in each line, the first for number 0; `depth_scale.txt` has the number that stands
for one metre in a PNG of depth, 1000 where there is no such file.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_vit._util.text import abbreviated, escaped
from keras_vit.dense.task import IGNORED, Depth, Segmentation
from keras_vit.train.data import map_files
from keras_vit.train.data.dataset_files import find_damaged, is_folder, list_files
from keras_vit.train.data.folder_source import (
    EVALUATION_FOLDERS,
    TRAIN,
    Listing,
    Part,
    choose_parts,
    is_image,
    is_visible,
    leave_out,
    list_parts,
    open_listing,
    unread_files,
)
from keras_vit.train.data.split import Data, DataRequest, RandomAccess

IMAGES = "images"
CLASSES, DEPTH_SCALE = "classes.txt", "depth_scale.txt"


class MapKind(NamedTuple):
    """A kind of maps: the folder of its files, their suffixes, and what they are in an example."""

    folder: str
    suffixes: tuple[str, ...]
    task: type[Any]
    dtype: tf.DType


KINDS = (
    MapKind("masks", (".png",), Segmentation, tf.uint8),
    MapKind("depth", (".png", map_files.NPY), Depth, tf.float32),
)


def find_kind(folder: str, request: DataRequest) -> MapKind | None:
    """Return the kind of the maps in a folder or its split folders, or None if it is of another layout."""
    for split in (None, TRAIN, *EVALUATION_FOLDERS, request.train_split, request.eval_split):
        place = f"{folder}/{split}" if split else folder
        if is_folder(f"{place}/{IMAGES}"):
            found = [kind for kind in KINDS if is_folder(f"{place}/{kind.folder}")]
            if len(found) > 1:
                raise ValueError(f"{escaped(place)} must have masks/ or depth/ beside images/. Received: both")
            if found:
                return found[0]
    return None


def open_map_folder(folder: str, kind: MapKind, request: DataRequest) -> Data:
    """Return the data set in a local or remote folder."""
    train, evaluation, _ = choose_parts(folder, request)
    listings = list_parts(train, evaluation, lambda part: _list_part(folder, kind, part))
    fail = request.on_bad_image == "fail"
    if misfits := unread_files(listings):
        message = f"Files of {escaped(folder)} without a partner of the same name: {abbreviated(misfits)}."
        leave_out(message, f"{len(misfits):,}", fail=fail)
    read: Callable[[bytes], np.ndarray] = map_files.read_mask
    class_names: tuple[str, ...] = ()
    if kind.task is Depth:
        read = functools.partial(map_files.read_depth, scale=_depth_scale(folder))
    else:
        class_names = _class_names(folder, listings)
    task = kind.task(num_classes=len(class_names))

    def open_maps(listing: Listing) -> RandomAccess:
        return open_listing(
            listing,
            lambda: _find_bad(listing, task, read, fail=fail),
            labels=[os.fsencode(f"{folder}/{name}") for name in listing.labels],
            read_label=lambda path: map_files.load_in_graph(path, read, kind.dtype),
        )

    splits = [open_maps(listing) if listing else None for listing in listings]
    return Data(
        name=escaped(folder),
        train=splits[0],
        evaluation=splits[1],
        eval_split=evaluation.name if evaluation else "",
        num_classes=len(class_names),
        class_names=class_names,
        make_task=kind.task,
    )


def _list_part(folder: str, kind: MapKind, part: Part) -> Listing:
    """List the images of a part that have a map; files without a partner are unread."""
    images: list[str] = []
    maps: list[str] = []
    unread: list[str] = []
    for place in part.places:
        pairs, others = _pair(folder, f"{place}{IMAGES}", f"{place}{kind.folder}", kind.suffixes)
        images += [pair[0] for pair in pairs]
        maps += [pair[1] for pair in pairs]
        unread += others
        if not pairs:
            raise FileNotFoundError(
                f"{escaped(f'{folder}/{place}')} has no image with a map. Expected: {IMAGES}/name.jpg and "
                f"{kind.folder}/name{kind.suffixes[0]}. Received: {abbreviated(others) or 'empty folders'}"
            )
    return Listing(folder, images, np.array(maps, object), unread).of_part(part)


def _pair(folder: str, images: str, maps: str, suffixes: tuple[str, ...]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return pairs of files with the same name but for the suffix, and all other files and folders."""
    found: list[dict[str, list[str]]] = []
    others: list[str] = []
    for place, is_wanted in ((images, is_image), (maps, lambda name: name.lower().endswith(suffixes))):
        files, rest = list_files(f"{folder}/{place}")
        by_stem: dict[str, list[str]] = {}
        for name in filter(is_visible, [*files, *rest]):
            if name in rest or not is_wanted(name):
                others.append(f"{place}/{name}")
            else:
                by_stem.setdefault(PurePosixPath(name).stem, []).append(f"{place}/{name}")
        found.append(by_stem)
    stems = {stem for each in found for stem in each}
    groups = {stem: [each.get(stem, []) for each in found] for stem in sorted(stems)}
    if unclear := [name for group in groups.values() if max(map(len, group)) > 1 for names in group for name in names]:
        raise ValueError(
            f"{escaped(folder)} must have one image and one map of a name. Received: {abbreviated(unclear)}"
        )
    others += [name for group in groups.values() if not all(group) for names in group for name in names]
    return [(group[0][0], group[1][0]) for group in groups.values() if all(group)], others


def _read_text(path: str) -> str | None:
    """Return the text of a file, or None if there is none."""
    if not tf.io.gfile.exists(path):
        return None
    try:
        return bytes(tf.io.read_file(path).numpy()).decode("utf-8-sig")
    except ValueError:
        raise ValueError(f"{escaped(path)} must be text in UTF-8") from None


def _class_names(folder: str, listings: Sequence[Listing | None]) -> tuple[str, ...]:
    """Return the names in classes.txt; without it the numbers up to the largest in any mask."""
    text = _read_text(f"{folder}/{CLASSES}")
    if text is not None:
        names = tuple(line.strip() for line in text.strip().splitlines())
        if not names or not all(names) or len(set(names)) != len(names) or len(names) > IGNORED:
            raise ValueError(
                f"{escaped(folder)}/{CLASSES} must have one name in each line, 1 to {IGNORED} different ones. "
                f"Received: {abbreviated(names) or 'an empty file'}"
            )
        return names
    paths = [f"{folder}/{name}" for listing in listings if listing for name in listing.labels]

    def count(path: str) -> int:
        try:
            return Segmentation.count_classes(map_files.load(path, map_files.read_mask))
        except ValueError:  # reported when all files are checked
            return 0

    with ThreadPoolExecutor() as pool:
        return tuple(map(str, range(max(pool.map(count, paths)))))


def _depth_scale(folder: str) -> float:
    text = _read_text(f"{folder}/{DEPTH_SCALE}")
    try:
        scale = map_files.MILLIMETRES if text is None else float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale < np.inf:
        raise ValueError(
            f"{escaped(folder)}/{DEPTH_SCALE} must be a number above 0, the values per metre: 1000 for millimetres, "
            f"256 for KITTI. Received: {text!r:.100}"
        )
    return scale


def _find_bad(listing: Listing, task: Any, read: Callable[[bytes], np.ndarray], *, fail: bool) -> Sequence[int]:
    """Return the indices of images that, or whose maps, cannot be used, after a warning; or raise a ValueError.

    A map with numbers of other classes is always an error.
    """
    reasons: list[str] = []

    def check(image: str, map: str) -> bool:
        try:
            values = map_files.load(map, read)
            map_files.check_size(image, map, values)
        except ValueError as error:
            reasons.append(str(error))
            return False
        task.check_labels(escaped(map), values)
        return True

    maps = listing.labels.tolist()
    bad = find_damaged(listing.folder, listing.files, maps, check, version=f"maps of {task.num_classes} classes")
    if bad:
        names = abbreviated([listing.files[i] for i in bad])
        why = f" ({abbreviated(sorted(reasons), 2)})" if reasons else ""
        message = f"{escaped(listing.folder)} has images that cannot be used: {names}{why}."
        leave_out(message, f"{len(bad):,} of {len(listing.files):,}", fail=fail)
    return bad
