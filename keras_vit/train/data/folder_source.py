"""Open folders of images with one sub-folder per class, and choose their parts to train and evaluate on.

The layout is `folder/class/image.jpg` or `folder/{train,val,validation,test}/class/image.jpg`. Classes are numbered by
the sorted names of their folders. Files with other suffixes than `READABLE`, and folders inside class folders, are not
read; a warning counts and names them. Hidden files are ignored.
"""

from __future__ import annotations

import collections
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_vit._util.files import READABLE
from keras_vit._util.text import abbreviated, escaped
from keras_vit.train.data.dataset_files import hash64, is_decodable, is_folder, list_files, read_image
from keras_vit.train.data.split import Damage, Data, DataRequest, Example, RandomAccess

TRAIN, ALL, HELD_OUT, REST = "train", "all", "held-out", "all but held-out"
EVALUATION_FOLDERS = ("val", "validation", "test")  # the first that exists is the evaluation split
SYNONYMS = {"heldout": HELD_OUT, "hold-out": HELD_OUT, "holdout": HELD_OUT, "validation": "val", "val": "validation"}
IGNORED = ("thumbs.db", "desktop.ini", "__macosx", "@eadir")  # of Windows, macOS' zip files, network drives
HELD_OUT_SHARE = 10  # one image of this many


class Part(NamedTuple):
    """The images of some split folders: all of them, those that are held out (True) or the others (False)."""

    name: str
    folders: tuple[str, ...]  # names of split folders; "" is the folder itself
    is_held_out: bool | None = None

    @property
    def places(self) -> list[str]:
        """Paths of the folders below the whole folder, such as "train/"."""
        return [f"{folder}/" if folder else "" for folder in self.folders]


@dataclass(frozen=True)
class Listing:
    """The images of one part."""

    folder: str
    files: list[str]  # "class/image.jpg" or "train/class/image.jpg", below the folder
    labels: np.ndarray  # one per file: int64, or for maps the path of a file below the folder
    unread: list[str]  # other files, and folders, of the whole folder that are not read

    def of_part(self, part: Part) -> Listing:
        """Return the files that are held out, or the others, if the part has only these."""
        if part.is_held_out is None:
            return self
        # By "class/image.jpg" alone, so that an image stays held out when others are added or the folder is moved.
        hashes = [hash64("/".join(file.split("/")[-2:])) for file in self.files]
        chosen = [i for i, number in enumerate(hashes) if (number % HELD_OUT_SHARE == 0) == part.is_held_out]
        return replace(self, files=[self.files[i] for i in chosen], labels=self.labels[chosen])


def open_folder(folder: str, request: DataRequest) -> Data:
    """Return the data set in a local or remote folder."""
    if not (request.needs_labels or subfolders(folder)):
        return _open_unlabelled(folder, request)
    train, evaluation, naming_split = choose_parts(folder, request)
    classes = _class_names(f"{folder}/{naming_split}".rstrip("/"))
    listings = list_parts(train, evaluation, lambda part: _list_part(folder, part, classes))
    _warn_unread(folder, unread_files(listings))
    splits = [open_listing(each, request, labels=each.labels) if each else None for each in listings]
    return Data(
        name=escaped(folder),
        train=splits[0],
        evaluation=splits[1],
        eval_split=evaluation.name if evaluation else "",
        num_classes=len(classes),
        class_names=tuple(classes),
    )


def _open_unlabelled(folder: str, request: DataRequest) -> Data:
    """Return the images of a folder without class folders, all of them for training."""
    if request.train_split or request.eval_split:
        raise ValueError(
            f"{escaped(folder)} has no class folders, so it has no splits. Received: train_split="
            f"{request.train_split!r:.200}, eval_split={request.eval_split!r:.200}"
        )
    images, unread = _list_class(folder)
    if not images:
        raise FileNotFoundError(f"{escaped(folder)} has no images. Expected: files that end in {', '.join(READABLE)}")
    _warn_unread(folder, unread)
    listing = Listing(folder, images, np.zeros(len(images), np.int64), unread)
    split = open_listing(listing, request, labels=listing.labels)
    return Data(name=escaped(folder), train=split, evaluation=None, num_classes=1, class_names=(), is_labelled=False)


def list_parts(
    train: Part | None, evaluation: Part | None, list_part: Callable[[Part], Listing]
) -> list[Listing | None]:
    """Return the images to train and to evaluate on; raise a ValueError if there are none in one of the parts.

    Where a tenth is held out, a warning says so; if that tenth, or the rest, is empty, none is held out.
    """
    rest, held_out = (part and list_part(part) for part in (train, evaluation))
    if train and evaluation and rest and held_out and (train.name, evaluation.name) == (REST, HELD_OUT):
        count, total = len(held_out.files), len(held_out.files) + len(rest.files)
        message = (
            f"has no evaluation split (val, validation or test, beside train): {count:,} of {total:,} images are held"
            " out, chosen by their names. To evaluate on them later, choose the split 'held-out'."
        )
        if count in (0, total):
            rest, held_out = (held_out if count else rest), None
            message = "has too few images for an evaluation split, so it has none."
        warnings.warn(f"{escaped(rest.folder)} {message}", stacklevel=5)
    for listing in (rest, held_out):
        if listing and not listing.files:  # of parts that divide the images by their names
            raise ValueError(
                f"{escaped(listing.folder)} has no image in this part: about one in ten is held out. Take {ALL!r}."
            )
    return [rest, held_out]


def unread_files(listings: Sequence[Listing | None]) -> list[str]:
    """Return the names of the files and folders that no part reads, sorted."""
    return sorted({name for listing in listings if listing for name in listing.unread})


def open_listing(
    listing: Listing,
    request: DataRequest,
    *,
    labels: Sequence[bytes] | np.ndarray,
    read_label: Callable[[tf.Tensor], tf.Tensor] = lambda label: label,
    check_label: Callable[[int], str | None] = lambda index: None,
) -> RandomAccess:
    """Return the split of listed images; `read_label` maps an element of `labels` to the label of an example.

    `check_label` returns why a label cannot be used, of an image that can be decoded.
    """
    paths = [f"{listing.folder}/{file}" for file in listing.files]

    def make_reader() -> Callable[[tf.Tensor], Example]:
        files, values = tf.constant([os.fsencode(path) for path in paths]), tf.constant(labels)
        return lambda index: {"image": read_image(files[index]), "label": read_label(values[index])}

    def check(index: int) -> str | None:
        try:
            is_image = is_decodable(read_image(os.fsencode(paths[index])))
        except tf.errors.OpError:  # a file that is lost meanwhile, which the reader names
            return None
        return check_label(index) if is_image else "cannot be decoded"

    def name_of(index: int) -> str:
        return escaped(paths[index])

    folder, fail = escaped(listing.folder), request.on_bad_image == "fail"
    return RandomAccess(
        name=folder,
        count=len(paths),
        unread=listing.unread,
        make_reader=make_reader,
        damage=Damage(folder, len(paths), name_of, check, fail=fail),
        example_name=name_of,
    )


def leave_out(message: str, count: str, *, fail: bool) -> None:
    """Warn that files which cannot be used are left out, or raise a ValueError."""
    if fail:
        raise ValueError(f'{message} Remove them, or skip them with on_bad_image="skip" (--on-bad-image skip).')
    warnings.warn(f"{message} Left out: {count}.", stacklevel=4)


def _list_part(folder: str, part: Part, classes: list[str]) -> Listing:
    """List the images of a part, with labels that index `classes`."""
    files: list[str] = []
    labels: list[int] = []
    unread: list[str] = []
    empty: list[str] = []
    for place in part.places:
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
    return Listing(folder, files, np.array(labels, np.int64), unread).of_part(part)


def _list_class(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the images of a class, and of everything else in its folder."""
    files, others = (list(filter(is_visible, names)) for names in list_files(folder))
    images = [file for file in files if is_image(file)]
    unread = [file for file in files if not is_image(file)]
    unread += [other if other.endswith("/") else f"{other} (no file)" for other in others]
    return images, unread


def is_image(name: str) -> bool:
    """Return whether a file of this name is read as an image."""
    return is_visible(name) and name.lower().endswith(READABLE)


def _class_names(root: str) -> list[str]:
    names = subfolders(root)
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


def _warn_unread(folder: str, unread: Sequence[str]) -> None:
    if not unread:
        return
    kinds = collections.Counter(
        "folder" if name.endswith("/") else PurePosixPath(name).suffix.lower() or "no suffix" for name in unread
    )
    warnings.warn(
        f"Files and folders in {escaped(folder)} that are not read: {len(unread):,}"
        f" ({abbreviated([f'{kind}: {count:,}' for kind, count in kinds.most_common()])}): {abbreviated(unread)}."
        f" Only files in class folders with one of these suffixes are read: {', '.join(READABLE)}.",
        stacklevel=5,
    )


def is_visible(name: str) -> bool:
    """Return whether a file or folder is not hidden, and not of a kind that file managers leave everywhere."""
    return not name.startswith(".") and name.rstrip("/").casefold() not in IGNORED


def subfolders(folder: str) -> list[str]:
    """Return the names of the visible folders in a folder, and of links to folders, sorted."""
    names = [name.rstrip("/") for names in list_files(folder) for name in names if is_visible(name)]
    return sorted(name for name in names if is_folder(f"{folder}/{name}"))


def choose_parts(folder: str, request: DataRequest) -> tuple[Part | None, Part | None, str]:
    """Return the parts to train and to evaluate on, and the split folder whose sub-folders name the classes."""
    splits = _split_folders(folder, request)
    parts = _named_parts(splits, request.train_split)
    train, evaluation = (
        _find_part(folder, parts, name) if name else None for name in (request.train_split, request.eval_split)
    )
    if not request.training:
        evaluation = evaluation or parts.get(HELD_OUT if splits else ALL)
    elif not train:
        is_divided = REST in parts and evaluation in (None, parts[HELD_OUT])
        train = parts.get(REST if is_divided else TRAIN)
        evaluation = evaluation or parts.get(HELD_OUT)
    elif not evaluation and REST not in parts and train.name != ALL:
        evaluation = parts.get(HELD_OUT)
    first = train or evaluation
    naming_split = TRAIN if TRAIN in splits or not first else first.folders[0]
    return train, evaluation, naming_split


def _split_folders(folder: str, request: DataRequest) -> list[str]:
    """Return the names of the sub-folders that are splits: the usual ones, and those that the user names."""
    found = subfolders(folder)
    splits = [name for name in (TRAIN, *EVALUATION_FOLDERS) if name in found and subfolders(f"{folder}/{name}")]
    # Without "train", a folder such as "test" may be a class: it is a split only if all folders are splits.
    if TRAIN not in splits and set(splits) != set(found):
        splits = []
    named = [name for name in (request.train_split, request.eval_split) if name in found]
    return list(dict.fromkeys(splits + named))


def _named_parts(splits: list[str], train_split: str | None) -> dict[str, Part]:
    """Return the parts that a user can choose, by name, and the rest of the images where some are held out."""
    whole = tuple(splits) or ("",)
    parts = {name: Part(name, (name,)) for name in splits}
    parts[ALL] = Part(ALL, whole)
    if held_out := [name for name in EVALUATION_FOLDERS if name in splits and name != train_split]:
        parts[HELD_OUT] = parts[held_out[0]]
    elif set(splits) <= {TRAIN}:
        parts[HELD_OUT] = Part(HELD_OUT, whole, is_held_out=True)
        parts[REST] = Part(REST, whole, is_held_out=False)
        parts.setdefault(TRAIN, parts[REST])
    return parts


def spelled(word: str) -> str:
    """Return a word for a part in lower case, with hyphens."""
    return word.strip().casefold().replace("_", "-").replace(" ", "-")


def _find_part(folder: str, parts: dict[str, Part], given: str) -> Part:
    """Return the part that a user means, in any spelling, or by the path of a split folder."""
    name = given.strip().removeprefix(f"{folder}/").rstrip("/")
    for word in (name, spelled(name), SYNONYMS.get(spelled(name))):
        if known := [part for part in parts if word in (part, spelled(part))]:
            return parts[known[0]]
    raise ValueError(
        f"{escaped(folder)} has no split {given!r:.200}. Received folders: {abbreviated(subfolders(folder))}. A split"
        f" is one of: {', '.join(name for name in parts if name != REST)}"
    )
