"""Open folders of images with one sub-folder per class.

The layout is `folder/class/image.jpg` or `folder/{train,val,validation,test}/class/image.jpg`. Classes are numbered by
the sorted names of their folders. JPEG and PNG files are read; other files and hidden files are ignored. If there is no
evaluation folder, a tenth of the images is held out, by a hash of each image's file name alone.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from keras_vit.train.data.image_files import find_damaged, list_folder
from keras_vit.train.data.split import Data, Example, RandomAccess

SUFFIXES = (".jpg", ".jpeg", ".png")
TRAIN = "train"
HELD_OUT = ("val", "validation", "test")  # the first that exists is the evaluation split
HELD_OUT_SHARE = 10  # one image of this many


@dataclass(frozen=True)
class Listing:
    """The images of one split."""

    folder: str  # holds the class folders
    files: list[str]  # "class/image.jpg", sorted
    labels: np.ndarray  # int64, one per file

    def where(self, mask: np.ndarray) -> Listing:
        """Return the images for which a boolean mask is true."""
        return Listing(self.folder, [self.files[i] for i in np.flatnonzero(mask)], self.labels[mask])


def open_folder(folder: str, *, train_split: str | None, eval_split: str | None, on_bad_image: str) -> Data:
    """Return the data set in a local or remote folder; arguments and errors as in `sources.open_data`."""
    subfolders = _subfolders(folder)
    found = [name for name in (TRAIN, *HELD_OUT) if name in subfolders and _subfolders(f"{folder}/{name}")]
    # Without "train", a folder such as "test" may be a class: it is a split only if all folders are splits.
    has_splits = bool(train_split or eval_split) or TRAIN in found or set(found) == set(subfolders) != set()
    train = train_split or (TRAIN if TRAIN in found else None)
    held_out = eval_split or next((name for name in HELD_OUT if name in found and name != train), None)
    listings: Sequence[Listing | None]
    if not has_splits or (train and not (train_split or held_out)):
        whole = f"{folder}/{train}" if has_splits else folder
        classes = _class_names(whole)
        listings = _hold_out(_list_images(whole, classes))
    else:
        if missing := [name for name in (train, held_out) if name and name not in subfolders]:
            raise ValueError(f"{folder} has no split {missing[0]!r}. Received folders: {_abbreviate(subfolders)}")
        classes = _class_names(f"{folder}/{train or held_out}")
        listings = [_list_images(f"{folder}/{name}", classes) if name else None for name in (train, held_out)]
    splits = [_open_split(listing, on_bad_image) if listing else None for listing in listings]
    return Data(
        name=folder, train=splits[0], evaluation=splits[1], num_classes=len(classes), class_names=tuple(classes)
    )


def _hold_out(listing: Listing) -> tuple[Listing, Listing | None]:
    """Divide the images of a folder that has no evaluation split."""
    held_out = np.array([_is_held_out(file) for file in listing.files])
    if held_out.all() or not held_out.any():
        warnings.warn(f"{listing.folder} has too few images for an evaluation split, so it has none.", stacklevel=4)
        return listing, None
    warnings.warn(
        f"{listing.folder} has no evaluation split (val, validation or test, beside train):"
        f" {held_out.sum():,} of {len(held_out):,} images are held out, chosen by their names.",
        stacklevel=4,
    )
    return listing.where(~held_out), listing.where(held_out)


def _is_held_out(file: str) -> bool:
    digest = hashlib.blake2b(file.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def _open_split(listing: Listing, on_bad_image: str) -> RandomAccess:
    paths = [f"{listing.folder}/{file}" for file in listing.files]

    def make_reader() -> Callable[[tf.Tensor], Example]:
        files, labels = tf.constant(paths), tf.constant(listing.labels)
        return lambda index: {"image": tf.io.read_file(files[index]), "label": labels[index]}

    return RandomAccess(
        name=listing.folder,
        count=len(paths),
        make_reader=make_reader,
        find_bad=lambda: _report_damaged(listing, fail=on_bad_image == "fail"),
        example_name=paths.__getitem__,
    )


def _report_damaged(listing: Listing, *, fail: bool) -> Sequence[int]:
    """Return the indices of the damaged images after a warning, or raise a ValueError."""
    damaged = find_damaged(listing.folder, listing.files)
    if not damaged:
        return damaged
    files = _abbreviate([listing.files[i] for i in damaged])
    message = f"Images of {listing.folder} that cannot be decoded: {files}."
    if fail:
        raise ValueError(f'{message} Remove them, or skip them with on_bad_image="skip".')
    warnings.warn(f"{message} {len(damaged):,} of {len(listing.files):,} are left out.", stacklevel=2)
    return damaged


def _list_images(folder: str, classes: list[str]) -> Listing:
    """List the images of one split, with labels that index `classes`."""
    present = _subfolders(folder)
    if unknown := sorted(set(present) - set(classes)):
        raise ValueError(
            f"{folder} has classes that the training split lacks: {_abbreviate(unknown)}."
            f" A label must be one of its {len(classes)} classes: {_abbreviate(classes)}"
        )
    images = {name: _images(f"{folder}/{name}") for name in present}
    if empty := [f"{folder}/{name}" for name in present if not images[name]]:
        raise FileNotFoundError(
            f"No images are in {_abbreviate(empty)}. Expected: every class folder holds files that end in"
            f" {', '.join(SUFFIXES)}."
        )
    files = [f"{name}/{image}" for name in present for image in images[name]]
    labels = np.repeat([classes.index(name) for name in present], [len(images[name]) for name in present])
    return Listing(folder, files, labels.astype(np.int64))


def _class_names(folder: str) -> list[str]:
    names = _subfolders(folder)
    if not names:
        images = _images(folder)
        content = f"{len(images):,} images, but no folders" if images else "no folders"
        raise FileNotFoundError(
            f"{folder} holds {content}. Expected: folder/class/image.jpg, or folder/train/class/image.jpg and"
            " folder/val/class/image.jpg"
        )
    return names


def _images(folder: str) -> list[str]:
    return [name for name in _visible(folder) if name.lower().endswith(SUFFIXES)]


def _subfolders(folder: str) -> list[str]:
    return [name for name in _visible(folder) if tf.io.gfile.isdir(f"{folder}/{name}")]


def _visible(folder: str) -> list[str]:
    return [name for name in list_folder(folder) if name and not name.startswith(".")]


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
