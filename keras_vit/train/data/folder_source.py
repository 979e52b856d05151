"""Open folders of images with one sub-folder per class, and choose the subsets to train and evaluate on.

The layout is `folder/class/image.jpg` or `folder/{train,val,validation,test}/class/image.jpg`. Classes are numbered by
the sorted names of their folders. Files with other suffixes than `READABLE`, and folders inside class folders, are not
read; a warning counts and names them. Hidden files are ignored.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_vit._util.files import READABLE, hash_files
from keras_vit._util.text import abbreviated, escaped, warn
from keras_vit.model.config import Preprocessing
from keras_vit.model.images import check_deep
from keras_vit.model.preprocess import check_file_channels
from keras_vit.train.data.dataset_files import decoding_problem, has_opacity, hash64, is_folder, list_files, read_image
from keras_vit.train.data.label_values import Tally, tally_labels
from keras_vit.train.data.split import Damage, Data, DataRequest, Example, RandomAccess

TRAIN, ALL, HELD_OUT, REST = "train", "all", "held-out", "all but held-out"
EVALUATION_FOLDERS = ("val", "validation", "test")  # the first that exists is the evaluation split
SYNONYMS = {"heldout": HELD_OUT, "hold-out": HELD_OUT, "holdout": HELD_OUT, "validation": "val", "val": "validation"}
IGNORED = ("thumbs.db", "desktop.ini", "__macosx", "@eadir")  # of Windows, macOS' zip files, network drives
HELD_OUT_SHARE = 10  # one image of this many


class Subset(NamedTuple):
    """Images of some split folders: all of them, those that are held out (True) or the others (False)."""

    name: str
    folders: tuple[str, ...]  # names of split folders; "" is the folder itself
    is_held_out: bool | None = None

    @property
    def places(self) -> list[str]:
        """Paths of the folders below the whole folder, such as "train/"."""
        return [f"{folder}/" if folder else "" for folder in self.folders]


@dataclass(frozen=True)
class ImageList:
    """Image files of a subset, with their labels."""

    folder: str
    files: list[str]  # "class/image.jpg" or "train/class/image.jpg", below the folder
    labels: np.ndarray  # one per file: int64, or for maps the path of a file below the folder
    unread: list[str]  # other files, and folders, of the whole folder that are not read

    def select(self, subset: Subset) -> ImageList:
        """Select the files that are held out, or the others, if the subset has only these."""
        if subset.is_held_out is None:
            return self
        # By "class/image.jpg" alone, so that an image stays held out when others are added or the folder is moved.
        hashes = [hash64("/".join(file.split("/")[-2:])) for file in self.files]
        held_out = np.array([number % HELD_OUT_SHARE == 0 for number in hashes], bool)
        if self.labels.dtype.kind == "i":  # a class of which all would be held out is trained on
            held_out &= np.isin(self.labels, self.labels[~held_out])
        chosen = np.flatnonzero(held_out == subset.is_held_out)
        return replace(self, files=[self.files[i] for i in chosen], labels=self.labels[chosen])


def open_folder(folder: str, request: DataRequest) -> Data:
    """Open a local or remote folder of images as a data set."""
    if not (request.needs_labels or subfolders(folder)):
        return _open_unlabelled(folder, request)
    train, evaluation, naming_split = choose_subsets(folder, request)
    classes = _class_names(f"{folder}/{naming_split}".rstrip("/"))
    image_lists = list_subsets(train, evaluation, lambda subset: _list_subset(folder, subset, classes))
    _warn_unread(folder, unread_files(image_lists))
    splits = [_open_classes(found, request) if found else None for found in image_lists]
    return Data(
        name=escaped(folder),
        train=splits[0],
        evaluation=splits[1],
        eval_split=evaluation.name if evaluation else "",
        num_classes=len(classes),
        class_names=tuple(classes),
    )


def _open_unlabelled(folder: str, request: DataRequest) -> Data:
    """Open a folder without class folders; all of its images are for training."""
    if request.train_split or request.eval_split:
        raise ValueError(
            f"{escaped(folder)} has no class folders, so it has no splits. Received: train_split="
            f"{request.train_split!r:.200}, eval_split={request.eval_split!r:.200}"
        )
    images, unread = _list_class(folder)
    if not images:
        raise FileNotFoundError(f"{escaped(folder)} has no images. Expected: files that end in {', '.join(READABLE)}")
    _warn_unread(folder, unread)
    image_list = ImageList(folder, images, np.zeros(len(images), np.int64), unread)
    split = _open_classes(image_list, request)
    return Data(name=escaped(folder), train=split, evaluation=None, num_classes=1, class_names=(), is_labelled=False)


def choose_subsets(folder: str, request: DataRequest) -> tuple[Subset | None, Subset | None, str]:
    """Choose the subsets to train and to evaluate on, and the split folder whose sub-folders name the classes."""
    splits = _split_folders(folder, request)
    subsets = _named_subsets(splits, request.train_split)
    train, evaluation = (
        _find_subset(folder, subsets, name) if name else None for name in (request.train_split, request.eval_split)
    )
    if not request.training:
        evaluation = evaluation or subsets.get(HELD_OUT if splits else ALL)
    elif not train:
        is_divided = REST in subsets and evaluation in (None, subsets[HELD_OUT])
        train = subsets.get(REST if is_divided else TRAIN)
        evaluation = evaluation or subsets.get(HELD_OUT)
    elif not evaluation and REST not in subsets and train.name != ALL:
        evaluation = subsets.get(HELD_OUT)
    first = train or evaluation
    naming_split = TRAIN if TRAIN in splits or not first else first.folders[0]
    return train, evaluation, naming_split


def _split_folders(folder: str, request: DataRequest) -> list[str]:
    """List the sub-folders that are splits, the usual ones and those that the user names."""
    found = subfolders(folder)
    splits = [name for name in (TRAIN, *EVALUATION_FOLDERS) if name in found and subfolders(f"{folder}/{name}")]
    # Without "train", a folder such as "test" may be a class: it is a split only if all folders are splits.
    if TRAIN not in splits and set(splits) != set(found):
        splits = []
    named = [name for name in (request.train_split, request.eval_split) if name in found]
    return list(dict.fromkeys(splits + named))


def _named_subsets(splits: list[str], train_split: str | None) -> dict[str, Subset]:
    """Name the subsets that a user can choose, and the rest of the images where some are held out."""
    whole = tuple(splits) or ("",)
    subsets = {name: Subset(name, (name,)) for name in splits}
    subsets[ALL] = Subset(ALL, whole)
    if held_out := [name for name in EVALUATION_FOLDERS if name in splits and name != train_split]:
        subsets[HELD_OUT] = subsets[held_out[0]]
    elif set(splits) <= {TRAIN}:
        subsets[HELD_OUT] = Subset(HELD_OUT, whole, is_held_out=True)
        subsets[REST] = Subset(REST, whole, is_held_out=False)
        subsets.setdefault(TRAIN, subsets[REST])
    return subsets


def _find_subset(folder: str, subsets: dict[str, Subset], given: str) -> Subset:
    """Find the subset that a user names, in any spelling, or by the path of a split folder."""
    name = given.strip().removeprefix(f"{folder}/").rstrip("/")
    for word in (name, normalize_name(name), SYNONYMS.get(normalize_name(name))):
        if found := [known for known in subsets if word in (known, normalize_name(known))]:
            return subsets[found[0]]
    raise ValueError(
        f"{escaped(folder)} has no split {given!r:.200}. Received folders: {abbreviated(subfolders(folder))}. A split"
        f" is one of: {', '.join(name for name in subsets if name != REST)}"
    )


def normalize_name(word: str) -> str:
    """Convert the name of a subset to lower case with hyphens."""
    return word.strip().casefold().replace("_", "-").replace(" ", "-")


def _class_names(root: str) -> list[str]:
    names = subfolders(root)
    if runs := sorted({*_visible_folders(root)} - {*names}):
        warn(f"{escaped(root)}: no classes, because they hold training runs: {abbreviated(runs)}")
    if not names:
        images = sum(map(is_image, list_files(root)[0]))
        content = f"{images:,} images, but no folders" if images else "no folders"
        raise FileNotFoundError(
            f"{escaped(root)} holds {content}. Expected: folder/class/image.jpg, or folder/train/class/image.jpg and"
            " folder/val/class/image.jpg"
        )
    if wrong := [name for name in names if escaped(name) != name]:
        raise ValueError(
            f"The names of class folders become class names and must be UTF-8: rename {abbreviated(wrong)} in"
            f" {escaped(root)}."
        )
    return names


def list_subsets(
    train: Subset | None, evaluation: Subset | None, list_subset: Callable[[Subset], ImageList]
) -> list[ImageList | None]:
    """List the images to train and to evaluate on; raise a ValueError if a subset has none.

    Where a tenth is held out, a warning says so; if that tenth, or the rest, is empty, none is held out.
    """
    rest, held_out = (subset and list_subset(subset) for subset in (train, evaluation))
    if train and evaluation and rest and held_out and (train.name, evaluation.name) == (REST, HELD_OUT):
        count, total = len(held_out.files), len(held_out.files) + len(rest.files)
        message = (
            f"has no evaluation split (val, validation or test, beside train): {count:,} of {total:,} images are held"
            " out, chosen by their names. To evaluate on them later, choose the split 'held-out'."
        )
        if count in (0, total):
            rest, held_out = (held_out if count else rest), None
            message = "has too few images for an evaluation split, so it has none."
        warn(f"{escaped(rest.folder)} {message}")
    for image_list in (rest, held_out):
        if image_list and not image_list.files:  # of subsets that divide the images by their names
            raise ValueError(
                f"{escaped(image_list.folder)} has no image in this part: about one in ten is held out. Take {ALL!r}."
            )
    return [rest, held_out]


def _list_subset(folder: str, subset: Subset, classes: list[str]) -> ImageList:
    """List the images of a subset, with labels that index `classes`."""
    files: list[str] = []
    labels: list[int] = []
    unread: list[str] = []
    empty: list[str] = []
    for place in subset.places:
        root = f"{folder}/{place}".rstrip("/")
        present = subfolders(root)
        if unknown := sorted(set(present) - set(classes)):
            raise ValueError(
                f"{escaped(root)} has classes that the training split lacks: {abbreviated(unknown)}."
                f" A label must be one of its {len(classes)} classes: {abbreviated(classes)}"
            )
        unread += [place + name for name in list_files(root)[0] if is_image(name)]  # beside the class folders
        for name in present:
            images, others = _list_class(f"{root}/{name}")
            files += [f"{place}{name}/{file}" for file in images]
            labels += [classes.index(name)] * len(images)
            unread += [f"{place}{name}/{other}" for other in others]
            if not images:
                empty.append(f"{root}/{name}")
    if empty:
        raise FileNotFoundError(
            f"No images are in {abbreviated(empty)}. Expected: every class folder holds files that end in"
            f" {', '.join(READABLE)}."
        )
    return ImageList(folder, files, np.array(labels, np.int64), unread).select(subset)


def _list_class(folder: str) -> tuple[list[str], list[str]]:
    """List the images of a class, and everything else in its folder."""
    files, others = (list(filter(is_visible, names)) for names in list_files(folder))
    images = [file for file in files if is_image(file)]
    unread = [file for file in files if not is_image(file)]
    unread += [other if other.endswith("/") else f"{other} (no file)" for other in others]
    return images, unread


def subfolders(folder: str) -> list[str]:
    """List the visible folders in a folder, and links to folders, sorted, without those of training runs."""
    return [name for name in _visible_folders(folder) if not holds_run(f"{folder}/{name}")]


def holds_run(folder: str) -> bool:
    """Check if a folder, or one in it, is the output folder of a training run, which is neither a class nor a split."""
    folders = [folder, *(f"{folder}/{name}" for name in list_files(folder)[1] if name.endswith("/"))]
    return any(is_folder(f"{path}/checkpoints") and tf.io.gfile.exists(f"{path}/log.jsonl") for path in folders)


def _visible_folders(folder: str) -> list[str]:
    names = [name.rstrip("/") for names in list_files(folder) for name in names if is_visible(name)]
    return sorted(name for name in names if is_folder(f"{folder}/{name}"))


def is_image(name: str) -> bool:
    """Check if a file of this name is read as an image."""
    return is_visible(name) and name.lower().endswith(READABLE)


def is_visible(name: str) -> bool:
    """Check that a file or folder is not hidden, and not of a kind that file managers leave everywhere."""
    return not name.startswith(".") and name.rstrip("/").casefold() not in IGNORED


def unread_files(image_lists: Sequence[ImageList | None]) -> list[str]:
    """Names of the files and folders that no subset reads, sorted."""
    return sorted({name for image_list in image_lists if image_list for name in image_list.unread})


def _warn_unread(folder: str, unread: Sequence[str]) -> None:
    if not unread:
        return
    kinds = collections.Counter(
        "folder" if name.endswith("/") else PurePosixPath(name).suffix.lower() or "no suffix" for name in unread
    )
    warn(
        f"Files and folders in {escaped(folder)} that are not read: {len(unread):,}"
        f" ({abbreviated([f'{kind}: {count:,}' for kind, count in kinds.most_common()])}): {abbreviated(unread)}."
        f" Only files in class folders with one of these suffixes are read: {', '.join(READABLE)}."
    )


def _open_classes(image_list: ImageList, request: DataRequest) -> RandomAccess:
    """Create the split of listed images whose labels are classes."""
    labels = image_list.labels
    return open_images(image_list, request, labels=labels, tally=tally_labels(labels))


def open_images(
    image_list: ImageList,
    request: DataRequest,
    *,
    labels: Sequence[bytes] | np.ndarray,
    tally: Tally,
    read_label: Callable[[tf.Tensor], tf.Tensor] = lambda label: label,
    check_label: Callable[[int], str | None] = lambda index: None,
    label_files: Sequence[str] = (),
) -> RandomAccess:
    """Create the split of listed images; `read_label` maps an element of `labels` to the label of an example.

    `tally` is of the labels. `check_label` returns why a label cannot be used, of an image that can be decoded.
    `label_files` are all files that labels are read from; without them a label is the name of a folder.
    """
    paths = [f"{image_list.folder}/{file}" for file in image_list.files]
    if clear := [file for file, path in zip(image_list.files, paths, strict=True) if has_opacity(path)]:
        warn(
            f"{escaped(image_list.folder)}: {len(clear):,} PNG files may be transparent: {abbreviated(clear)}. "
            "Their pixels are put on white, here and wherever the model reads files."
        )

    def make_reader() -> Callable[[tf.Tensor], Example]:
        files, values = tf.constant([os.fsencode(path) for path in paths]), tf.constant(labels)
        stated = damage.preprocessing
        return lambda index: {"image": read_image(files[index], stated), "label": read_label(values[index])}

    def check(index: int, preprocessing: Preprocessing) -> str | None:
        try:
            image = read_image(os.fsencode(paths[index]), preprocessing)
            problem = decoding_problem(image)
        except tf.errors.OpError:  # a file that is lost meanwhile, which the reader names
            return None
        if problem:
            return problem
        try:
            check_deep(image.numpy(), preprocessing)
        except ValueError as error:
            if preprocessing.range is None:  # what is not stated, or is wrong, holds for all images: the first ends it
                raise ValueError(f"{name_of(index)} {error}") from None
            return str(error)
        return check_label(index)

    def name_of(index: int) -> str:
        return escaped(paths[index])

    folder, fail = escaped(image_list.folder), request.on_bad_image == "fail"
    damage = Damage(folder, len(paths), name_of, check, fail=fail)
    return RandomAccess(
        name=folder,
        count=len(paths),
        unread=image_list.unread,
        make_reader=make_reader,
        damage=damage,
        example_name=name_of,
        fingerprint=lambda: hash_files([*paths, *label_files]),
        tally=tally,
        check_arrays=lambda num_channels, _: check_file_channels(num_channels),
    )


def leave_out(message: str, count: str, *, fail: bool) -> None:
    """Warn that files which cannot be used are left out, or raise a ValueError."""
    if fail:
        raise ValueError(f'{message} Remove them, or skip them with on_bad_image="skip" (--on-bad-image skip).')
    warn(f"{message} Left out: {count}.")
