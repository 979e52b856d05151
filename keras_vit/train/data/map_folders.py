"""Open folders of images with a map for each: `images/` beside `masks/` (classes) or `depth/` (distances).

Both are in the folder itself, or in each of its split folders (train, val, validation, test). A map has the name of its
image but for the suffix: `images/0001.jpg`, `masks/0001.png`. Two files beside `images/` describe the maps:
`classes.txt` has the name of a class in each line, the first for number 0; `depth_scale.txt` has the number that stands
for one metre in a PNG of depth, 1000 where there is no such file.

| kind | file | a pixel without a label |
|---|---|---|
| masks | PNG with one channel, grey or with a palette (its colours mean nothing): 0 to 254 | 255 |
| depth | PNG of 16 bits in 1/`scale` m; or .npy, floats (height, width) in metres | 0; in .npy also NaN |

TensorFlow's decoder is not used: it replaces the indices of a palette by its colours, and widens numbers of fewer bits.
"""

import functools
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit._util.text import abbreviated, escaped, needs_extra, text_lines
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
from keras_vit.train.data.split import Data, DataRequest, RandomAccess

IMAGES = "images"
CLASSES, DEPTH_SCALE = "classes.txt", "depth_scale.txt"
SUFFIXES = {"masks": (".png",), "depth": (".png", ".npy")}  # of maps, by the folder that they are in
MILLIMETRES = 1000.0  # values per metre of NYU Depth V2's files; KITTI's have 256
ONE_CHANNEL = ("1", "L", "P")  # Pillow's modes of 1 to 8 bits
SIXTEEN_BITS = ("I;16", "I;16B", "I")
_BIT_DEPTH, _COLOUR_TYPE = 24, 25  # their places in a PNG file


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
    read: Callable[[bytes], np.ndarray] = read_mask
    make_task: type[Any] = Segmentation
    class_names: tuple[str, ...] = ()
    if kind == "depth":
        make_task, read = Depth, functools.partial(read_depth, scale=_depth_scale(folder))
    else:
        class_names = _class_names(folder, image_lists)
    task, dtype = make_task(num_classes=len(class_names)), tf.float32 if kind == "depth" else tf.uint8

    def open_maps(image_list: ImageList) -> RandomAccess:
        maps = [f"{folder}/{name}" for name in image_list.labels]
        return open_images(
            image_list,
            request,
            labels=list(map(os.fsencode, maps)),
            read_label=lambda path: _read_map_in_graph(path, read, dtype),
            check_label=lambda index: _check_map(image_list, index, task, read),
            label_files=[*maps, f"{folder}/{DEPTH_SCALE}"],
        )

    splits = [open_maps(image_list) if image_list else None for image_list in image_lists]
    return Data(
        name=escaped(folder),
        train=splits[0],
        evaluation=splits[1],
        eval_split=evaluation.name if evaluation else "",
        num_classes=len(class_names),
        class_names=class_names,
        make_task=make_task,
    )


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


def _class_names(folder: str, image_lists: Sequence[ImageList | None]) -> tuple[str, ...]:
    """Read the names in classes.txt; without it they are the numbers up to the largest in any mask."""
    lines = _read_lines(f"{folder}/{CLASSES}")
    if lines is not None:
        names = tuple(lines)
        if not names or not all(names) or len(set(names)) != len(names) or len(names) > IGNORED:
            raise ValueError(
                f"{escaped(folder)}/{CLASSES} must have one name in each line from the first, 1 to {IGNORED} different "
                f"ones. Received: {abbreviated([name or 'an empty line' for name in names]) or 'an empty file'}"
            )
        return names
    paths = [f"{folder}/{name}" for image_list in image_lists if image_list for name in image_list.labels]

    def count(path: str) -> int:
        try:
            return Segmentation.count_classes(_read_map(path, read_mask))
        except ValueError:  # reported when the map is read
            return 0

    with ThreadPoolExecutor() as pool:
        return tuple(map(str, range(max(pool.map(count, paths)))))


def _depth_scale(folder: str) -> float:
    text = _read_lines(f"{folder}/{DEPTH_SCALE}")
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
    """Decode the numbers of classes in a PNG file, uint8 (height, width)."""
    mode, values = _decode_png(data)
    if mode not in ONE_CHANNEL:
        raise ValueError(
            f"must be a PNG with one channel of 8 bits, the numbers of classes. Received: {mode}"
            f"{', colours: replace each by the number of its class' if mode.startswith('RGB') else ''}"
        )
    bits = data[_BIT_DEPTH]
    if mode == "L" and bits < 8 and data[_COLOUR_TYPE] == 0:
        values = values // (255 // (2**bits - 1))  # Pillow widens grey values
    return values.astype(np.uint8)


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
