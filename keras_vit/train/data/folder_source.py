"""Open folders of images with one sub-folder per class.

The layout is `folder/class/image.jpg` or `folder/{train,val,validation,test}/class/image.jpg`. Classes are numbered by
the sorted names of their folders. Files with other suffixes than `READABLE`, and folders inside class folders, are not
read; a warning counts and names them. Hidden files are ignored.
"""

from __future__ import annotations

import collections
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import tensorflow as tf

from keras_vit._util.image_paths import READABLE
from keras_vit._util.text import abbreviated, escaped
from keras_vit.train.data.dataset_files import find_damaged, hash64, list_files, read_image
from keras_vit.train.data.folder_parts import ALL, HELD_OUT, REST, Part, choose_parts, is_visible, subfolders
from keras_vit.train.data.request import DataRequest
from keras_vit.train.data.split import Data, Example, RandomAccess

HELD_OUT_SHARE = 10  # one image of this many


@dataclass(frozen=True)
class Listing:
    """The images of one part."""

    folder: str
    files: list[str]  # "class/image.jpg" or "train/class/image.jpg", below the folder
    labels: np.ndarray  # one per file: int64, or for maps the path of a file below the folder
    unread: list[str]  # other files, and folders, of the whole folder that are not read

    def where(self, is_kept: Callable[[str], bool]) -> Listing:
        """Return the files whose names a function accepts."""
        mask = np.array([is_kept(file) for file in self.files], bool)
        files = [self.files[i] for i in np.flatnonzero(mask)]
        return Listing(self.folder, files, self.labels[mask], self.unread)

    def of_part(self, part: Part) -> Listing:
        """Return the files that are held out, or the others, if the part has only these."""
        return self if part.is_held_out is None else self.where(lambda file: _is_held_out(file) == part.is_held_out)


def open_folder(folder: str, request: DataRequest) -> Data:
    """Return the data set in a local or remote folder."""
    if not (request.needs_labels or subfolders(folder)):
        return _open_unlabelled(folder, request)
    train, evaluation, naming_split = choose_parts(folder, request)
    classes = _class_names(f"{folder}/{naming_split}".rstrip("/"))
    listings = list_parts(train, evaluation, lambda part: _list_part(folder, part, classes))
    if unread := unread_files(listings):
        warnings.warn(_unread_message(folder, unread), stacklevel=4)
    opened = [_open_split(listing, request.on_bad_image) if listing else None for listing in listings]
    return Data(
        name=escaped(folder),
        train=opened[0],
        evaluation=opened[1],
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
    if unread:
        warnings.warn(_unread_message(folder, unread), stacklevel=4)
    listing = Listing(folder, images, np.zeros(len(images), np.int64), unread)
    split = _open_split(listing, request.on_bad_image)
    return Data(name=escaped(folder), train=split, evaluation=None, num_classes=1, class_names=(), is_labelled=False)


def list_parts(
    train: Part | None, evaluation: Part | None, list_part: Callable[[Part], Listing]
) -> list[Listing | None]:
    """Return the images to train and to evaluate on; raise a ValueError if there are none in one of the parts."""
    listings = [part and list_part(part) for part in (train, evaluation)]
    if train and evaluation and (train.name, evaluation.name) == (REST, HELD_OUT):
        listings = _check_held_out(*listings)
    for listing in listings:
        if listing and not listing.files:  # of parts that divide the images by their names
            raise ValueError(
                f"{escaped(listing.folder)} has no image in this part: about one in ten is held out. Take {ALL!r}."
            )
    return listings


def unread_files(listings: Sequence[Listing | None]) -> list[str]:
    """Return the names of the files and folders that no part reads, sorted."""
    return sorted({name for listing in listings if listing for name in listing.unread})


def _check_held_out(rest: Listing | None, held_out: Listing | None) -> list[Listing | None]:
    """Warn that images are held out; hold out none if the tenth has none, or all."""
    assert rest and held_out
    if not rest.files or not held_out.files:
        warnings.warn(
            f"{escaped(rest.folder)} has too few images for an evaluation split, so it has none.", stacklevel=6
        )
        return [rest if rest.files else held_out, None]
    warnings.warn(
        f"{escaped(rest.folder)} has no evaluation split (val, validation or test, beside train):"
        f" {len(held_out.files):,} of {len(rest.files) + len(held_out.files):,} images are held out, chosen by their"
        " names. To evaluate on them later, choose the split 'held-out'.",
        stacklevel=6,
    )
    return [rest, held_out]


def _open_split(listing: Listing, on_bad_image: str) -> RandomAccess:
    paths = [f"{listing.folder}/{file}" for file in listing.files]

    def make_reader() -> Callable[[tf.Tensor], Example]:
        files, labels = tf.constant([os.fsencode(path) for path in paths]), tf.constant(listing.labels)
        return lambda index: {"image": read_image(files[index]), "label": labels[index]}

    return RandomAccess(
        name=escaped(listing.folder),
        count=len(paths),
        unread=listing.unread,
        make_reader=make_reader,
        find_bad=lambda: _report_damaged(listing, fail=on_bad_image == "fail"),
        example_name=lambda index: escaped(paths[index]),
    )


def _report_damaged(listing: Listing, *, fail: bool) -> Sequence[int]:
    """Return the indices of the damaged images after a warning, or raise a ValueError."""
    damaged = find_damaged(listing.folder, listing.files)
    if not damaged:
        return damaged
    files = abbreviated([listing.files[i] for i in damaged])
    message = f"Images of {escaped(listing.folder)} that cannot be decoded: {files}."
    if fail:
        raise ValueError(f'{message} Remove them, or skip them with on_bad_image="skip" (--on-bad-image skip).')
    warnings.warn(f"{message} Left out: {len(damaged):,} of {len(listing.files):,}.", stacklevel=2)
    return damaged


def _list_part(folder: str, part: Part, classes: list[str]) -> Listing:
    """List the images of a part, with labels that index `classes`."""
    files: list[str] = []
    labels: list[int] = []
    unread: list[str] = []
    empty: list[str] = []
    for place in (f"{split}/" if split else "" for split in part.folders):
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


def _is_held_out(file: str) -> bool:
    # By "class/image.jpg" alone, so that an image stays held out when others are added or the folder is moved.
    return hash64("/".join(file.split("/")[-2:])) % HELD_OUT_SHARE == 0


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


def _unread_message(folder: str, unread: Sequence[str]) -> str:
    kinds = collections.Counter(
        "folder" if name.endswith("/") else PurePosixPath(name).suffix.lower() or "no suffix" for name in unread
    )
    return (
        f"Files and folders in {escaped(folder)} that are not read: {len(unread):,}"
        f" ({abbreviated([f'{kind}: {count:,}' for kind, count in kinds.most_common()])}): {abbreviated(unread)}."
        f" Only files in class folders with one of these suffixes are read: {', '.join(READABLE)}."
    )
