"""Open folders of images with a map for each: `images/` beside `masks/` (classes) or `depth/` (distances).

Both are in the folder itself, or in each of its split folders (train, val, validation, test). A map has the name of its
image but for the suffix: `images/0001.jpg`, `masks/0001.png`. Two files beside `images/` describe the maps:
`classes.txt` has the name of a class in each line, the first for number 0; `depth_scale.txt` has the number that stands
for one metre in a PNG of depth, 1000 where there is no such file.

| kind | file | a pixel without a label |
|---|---|---|
| masks | PNG: grey or with a palette (its colours mean nothing), 0 to 254; others: `choose_mask_values` | 255 |
| depth | PNG of 16 bits in 1/`scale` m; or .npy, floats (height, width) in metres | 0; in .npy also NaN |

TensorFlow's decoder is not used: it replaces the indices of a palette by its colours, and widens numbers of fewer bits.
"""

import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_vit._util.text import abbreviated, escaped, needs_extra, text_lines, warn
from keras_vit.converters.containers import check_npy
from keras_vit.dense.map_tasks import IGNORED, Depth, Segmentation
from keras_vit.model.images import read_header, upright_sides
from keras_vit.model.pillow import MAX_PIXELS, ORIENTATION_TAG, PIXEL_LIMITS
from keras_vit.train.data.dataset_files import is_folder, list_files, python_errors, read_image
from keras_vit.train.data.folder_source import (
    EVALUATION_FOLDERS,
    TRAIN,
    ImageList,
    Subset,
    choose_subsets,
    is_image,
    is_visible,
    leave_out,
    list_subsets,
    open_images,
    unread_files,
)
from keras_vit.train.data.label_values import (
    MOST_MAPS,
    Tally,
    add_counts,
    choose_mask_values,
    count_metres,
    count_values,
    pack_colours,
)
from keras_vit.train.data.split import Data, DataRequest, RandomAccess

IMAGES = "images"
CLASSES, DEPTH_SCALE = "classes.txt", "depth_scale.txt"
SUFFIXES = {"masks": (".png",), "depth": (".png", ".npy")}  # of maps, by the folder that they are in
MILLIMETRES = 1000.0  # values per metre of NYU Depth V2's files; KITTI's have 256
ONE_CHANNEL = ("1", "L", "P")  # Pillow's modes of 1 to 8 bits
SIXTEEN_BITS = ("I;16", "I;16B", "I")
_BIT_DEPTH, _COLOUR_TYPE = 24, 25  # their places in a PNG file
BYTE, OPAQUE = 8, 255  # bits of a channel, and its largest value


def find_kind(folder: str, request: DataRequest) -> str | None:
    """Detect "masks" or "depth" in a folder or its split folders; None for another layout."""
    for split in (None, TRAIN, *EVALUATION_FOLDERS, request.train_split, request.eval_split):
        place = f"{folder}/{split}" if split else folder
        if is_folder(f"{place}/{IMAGES}"):
            found = [kind for kind in SUFFIXES if is_folder(f"{place}/{kind}")]
            if len(found) > 1:
                raise ValueError(f"{escaped(place)} must have masks/ or depth/ beside images/. Received: both")
            if found:
                return found[0]
    return None


def open_map_folder(folder: str, kind: str, request: DataRequest) -> Data:
    """Open a local or remote folder of images and maps as a data set."""
    train, evaluation, _ = choose_subsets(folder, request)
    image_lists = list_subsets(train, evaluation, lambda subset: _list_subset(folder, kind, subset))
    if misfits := unread_files(image_lists):
        message = f"Files of {escaped(folder)} without a partner of the same name: {abbreviated(misfits)}."
        leave_out(message, f"{len(misfits):,}", fail=request.on_bad_image == "fail")
    maps = _read_depths(folder, image_lists) if kind == "depth" else _read_masks(folder, image_lists, request)
    task, dtype = maps.task, tf.float32 if kind == "depth" else tf.uint8

    def open_maps(image_list: ImageList, tally: Tally) -> RandomAccess:
        files = [f"{folder}/{name}" for name in image_list.labels]
        return open_images(
            image_list,
            request,
            labels=list(map(os.fsencode, files)),
            tally=tally,
            read_label=lambda path: _read_map_in_graph(path, maps.read, dtype),
            check_label=lambda index: _check_map(image_list, index, task, maps.read),
            label_files=[*files, f"{folder}/{DEPTH_SCALE}"],
        )

    splits = [
        open_maps(image_list, tally) if image_list else None
        for image_list, tally in zip(image_lists, maps.tallies, strict=True)
    ]
    return Data(
        name=escaped(folder),
        train=splits[0],
        evaluation=splits[1],
        eval_split=evaluation.name if evaluation else "",
        num_classes=task.num_classes,
        class_names=maps.class_names,
        make_task=type(task),
    )


class _Maps(NamedTuple):
    """How the maps of a folder are read, and what they hold; a tally for each list of images."""

    read: Callable[[bytes], np.ndarray]
    task: Any
    class_names: tuple[str, ...]
    tallies: Sequence[Tally]


def _read_masks(folder: str, image_lists: Sequence[ImageList | None], request: DataRequest) -> _Maps:
    """Find the classes of masks: by classes.txt and some masks, or without it by all of them."""
    names = _class_names(folder)
    most = MOST_MAPS if names else sys.maxsize  # the largest number decides how many classes there are
    raw = [_tally(image_list, read_mask, count_values, most=most) for image_list in image_lists]
    values = set().union(*(tally.counts for tally in raw))
    if not values and (unread := [tally for tally in raw if tally.problem and tally.is_complete]):
        raise ValueError(f"None of the masks in {escaped(folder)} can be read. The first: {unread[0].problem}")
    mask_values = choose_mask_values(
        escaped(folder), values, stated=request.values_of_masks, num_classes=len(names) if names else None
    )
    tallies = [tally.renumbered(mask_values) for tally in raw]
    names = names or mask_values.class_names(tallies)

    def read(data: bytes) -> np.ndarray:
        return mask_values.numbers(read_mask(data))

    task = Segmentation(num_classes=len(names), labels=names)
    return _Maps(read, task, names, tallies)


def _read_depths(folder: str, image_lists: Sequence[ImageList | None]) -> _Maps:
    has_png = any(str(name).endswith(".png") for image_list in image_lists if image_list for name in image_list.labels)
    read = functools.partial(read_depth, scale=_depth_scale(folder, is_needed=has_png))
    tallies = [_tally(image_list, read, count_metres, most=MOST_MAPS) for image_list in image_lists]
    return _Maps(read, Depth(), (), tallies)


def _tally(
    image_list: ImageList | None,
    read: Callable[[bytes], np.ndarray],
    count: Callable[[np.ndarray], dict[int, int]],
    *,
    most: int,
) -> Tally:
    """Count the values of at most `most` maps, spread over a list. A map that cannot be read is a problem of it."""
    if image_list is None:
        return Tally(counts={}, read=0, total=0)
    total = len(image_list.labels)
    chosen = np.unique(np.linspace(0, total - 1, min(most, total)).astype(np.int64))

    def count_file(name: str) -> dict[int, int] | str:
        try:
            return count(_read_map(f"{image_list.folder}/{name}", read))
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(count_file, image_list.labels[chosen]))
    counts = [one for one in found if isinstance(one, dict)]
    problem = next((one for one in found if isinstance(one, str)), "")
    return Tally(counts=add_counts(counts), read=len(chosen), total=total, problem=problem)


def _list_subset(folder: str, kind: str, subset: Subset) -> ImageList:
    """List the images of a subset that have a map; files without a partner are unread."""
    images: list[str] = []
    maps: list[str] = []
    unread: list[str] = []
    for place in subset.places:
        pairs, others = _pair(folder, f"{place}{IMAGES}", f"{place}{kind}", SUFFIXES[kind])
        images += [pair[0] for pair in pairs]
        maps += [pair[1] for pair in pairs]
        unread += others
        if not pairs:
            raise FileNotFoundError(
                f"{escaped(f'{folder}/{place}')} has no image with a map. Expected: {IMAGES}/name.jpg and "
                f"{kind}/name.png. Received: {abbreviated(others) or 'empty folders'}"
            )
    return ImageList(folder, images, np.array(maps, object), unread).select(subset)


def _pair(folder: str, images: str, maps: str, suffixes: tuple[str, ...]) -> tuple[list[tuple[str, str]], list[str]]:
    """Pair files with the same name but for the suffix; also list all other files and folders."""
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
    stems = {stem for by_stem in found for stem in by_stem}
    groups = {stem: [by_stem.get(stem, []) for by_stem in found] for stem in sorted(stems)}
    if unclear := [name for group in groups.values() if max(map(len, group)) > 1 for names in group for name in names]:
        raise ValueError(
            f"{escaped(folder)} must have one image and one map of a name. Received: {abbreviated(unclear)}"
        )
    others += [name for group in groups.values() if not all(group) for names in group for name in names]
    return [(group[0][0], group[1][0]) for group in groups.values() if all(group)], others


def _read_lines(path: str) -> list[str] | None:
    """Read the lines of a text file; None if there is none."""
    if not tf.io.gfile.exists(path):
        return None
    return text_lines(bytes(tf.io.read_file(path).numpy()), escaped(path))


def _class_names(folder: str) -> tuple[str, ...] | None:
    """Read the names in classes.txt; None without it."""
    lines = _read_lines(f"{folder}/{CLASSES}")
    if lines is None:
        return None
    names = tuple(lines)
    if not names or not all(names) or len(set(names)) != len(names) or len(names) > IGNORED:
        raise ValueError(
            f"{escaped(folder)}/{CLASSES} must have one name in each line from the first, 1 to {IGNORED} different "
            f"ones. Received: {abbreviated([name or 'an empty line' for name in names]) or 'an empty file'}"
        )
    return names


def _depth_scale(folder: str, *, is_needed: bool) -> float:
    """Read the values per metre; without the file they are taken for millimetres, with a warning where it matters."""
    text = _read_lines(f"{folder}/{DEPTH_SCALE}")
    if text is None and is_needed:
        warn(
            f"keras_vit: {escaped(folder)} has no {DEPTH_SCALE}: the values of depth/*.png are taken for millimetres, "
            "1000 per metre. Write the number per metre into this file"
        )
    try:
        scale = MILLIMETRES if text is None else float(" ".join(text))
    except ValueError:
        scale = 0.0
    if not 0 < scale < np.inf:
        raise ValueError(
            f"{escaped(folder)}/{DEPTH_SCALE} must be a number above 0, the values per metre: 1000 for millimetres, "
            f"256 for KITTI. Received: {text!r:.100}"
        )
    return scale


def _check_map(image_list: ImageList, index: int, task: Any, read: Callable[[bytes], np.ndarray]) -> str | None:
    """Explain why a map cannot be used, if so; raise a ValueError for a map with numbers of other classes."""
    image, map = (f"{image_list.folder}/{names[index]}" for names in (image_list.files, image_list.labels))
    try:
        values = _read_map(map, read)
        _check_size(image, map, values)
    except ValueError as error:
        return f"has a map that does not fit: {error}"
    task.check_labels(escaped(map), values)
    return None


def read_mask(data: bytes) -> np.ndarray:
    """Decode the values of a mask in a PNG file, int32 (height, width): numbers, and colours as `label_values` has."""
    mode, values = _decode_png(data)
    bits, kind = data[_BIT_DEPTH], data[_COLOUR_TYPE]
    if mode in ("LA", "RGBA"):
        if bits > BYTE or (values[..., -1] != OPAQUE).any():
            raise ValueError(f"must be a PNG without transparent pixels and of 8 bits. Received: {mode} of {bits} bits")
        mode, values = (mode[:-1], values[..., 0] if mode == "LA" else values[..., :-1])
    if mode == "RGB" and bits <= BYTE:
        return pack_colours(values)
    if mode not in (*ONE_CHANNEL, *SIXTEEN_BITS):
        raise ValueError(
            f"must be a PNG with one channel, the numbers of classes, or with colours of 8 bits. Received: {mode} of "
            f"{bits} bits"
        )
    if mode == "L" and bits < BYTE and kind == 0:
        values = values // (OPAQUE // (2**bits - 1))  # Pillow widens grey values
    return values.astype(np.int32)


def read_depth(data: bytes, scale: float = MILLIMETRES) -> np.ndarray:
    """Decode the distances in a PNG or .npy file, float32 (height, width) in metres; 0 where they are not known."""
    if data.startswith(b"\x93NUMPY"):
        check_npy(io.BytesIO(data), len(data))
        values = np.load(io.BytesIO(data), allow_pickle=False)
        if values.ndim != 2 or values.dtype.kind != "f":
            raise ValueError(f"must be floats (height, width) in metres. Received: {values.dtype} {values.shape}")
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and refused below
            metres = np.where(np.isnan(values), 0, values).astype(np.float32)
    else:
        mode, values = _decode_png(data)
        if mode not in SIXTEEN_BITS:
            raise ValueError(f"must be a PNG with one channel of 16 bits, or .npy. Received: {mode}")
        metres = values.astype(np.float32) / np.float32(scale)
    if not (np.isfinite(metres).all() and metres.min(initial=0) >= 0):
        raise ValueError("must have distances of 0 m or more, NaN or 0 for none. Received: negative or infinite ones")
    return metres


def _decode_png(data: bytes) -> tuple[str, np.ndarray]:
    """Decode a PNG file into Pillow's mode and its values."""
    with needs_extra("Reading maps", "train"):
        from PIL import Image
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            width, height = image.size
            if height * width > MAX_PIXELS:
                raise ValueError(f"{PIXEL_LIMITS} Received: height and width {height} x {width}")
            orientation = image.getexif().get(ORIENTATION_TAG, 1)
            mode, values = image.mode, np.asarray(image)
    except Exception as error:  # Pillow's readers raise errors of many types
        raise ValueError(f"cannot be decoded as PNG: {str(error) or type(error).__name__}") from None
    if orientation != 1:  # programs that write it differ in what they have turned
        raise ValueError(f"must be saved upright, without an EXIF orientation. Received: orientation {orientation}")
    return mode, values


def _read_map(path: str, read: Callable[[bytes], np.ndarray]) -> np.ndarray:
    """Read a local or remote file of a map; the ValueError about its content names it."""
    with python_errors(path):
        data = tf.io.read_file(os.fsencode(path)).numpy()
    try:
        return read(data)
    except ValueError as error:
        raise ValueError(f"{escaped(path)} {error}") from None


def _read_map_in_graph(path: Any, read: Callable[[bytes], np.ndarray], dtype: tf.DType) -> Any:
    """Read the file of a map in a graph: (height, width)."""

    def in_python(name: Any) -> np.ndarray:
        return _read_map(os.fsdecode(np.asarray(name, object).item()), read)

    return tf.ensure_shape(tf.numpy_function(in_python, [path], dtype, stateful=False), (None, None))


def _check_size(image: str, map: str, values: np.ndarray) -> None:
    """Raise a ValueError unless a map has the height and width of its image as a viewer shows it."""
    header = read_header(read_image(os.fsencode(image)))
    height, width = upright_sides(tf.cast(header.sides, tf.int32), header.orientation).numpy()
    if values.shape != (height, width):
        received = " x ".join(str(side) for side in values.shape)
        raise ValueError(f"{escaped(map)} must have the size of its image, {height} x {width}. Received: {received}")
