"""Folders of images, one folder a class.

`folder/class/image.jpg`, or `folder/{train,val,validation,test}/class/image.jpg`. Classes are numbered in the order
of their folders' names. JPEG and PNG files count, whatever the case of their endings; other and hidden files do not.
Without such parts, a tenth of the images is held out: chosen by a hash of each file's name, so that an image stays
where it is when others are added.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from keras_vit.train.data.image_check import damaged, opened
from keras_vit.train.data.split import Example, RandomAccess

ENDINGS = (".jpg", ".jpeg", ".png")
TRAIN = "train"
HELD_OUT = ("val", "validation", "test")  # the first that is there is evaluated on
HELD_OUT_SHARE = 10  # one of these


@dataclass(frozen=True)
class Listing:
    """The images of one part.

    Args:
        folder: that holds the class folders.
        files: "class/image.jpg", sorted.
        labels: int64, of each file.
    """

    folder: str
    files: list[str]
    labels: np.ndarray

    def part(self, chosen: np.ndarray) -> Listing:
        """Some of the images, chosen by a boolean for each."""
        return Listing(self.folder, [self.files[i] for i in np.flatnonzero(chosen)], self.labels[chosen])


def open_folder(
    folder: str, *, train_split: str | None, eval_split: str | None, on_bad_image: str
) -> tuple[RandomAccess | None, RandomAccess | None, tuple[str, ...]]:
    """The training and evaluation parts of a folder of images, and the names of its classes.

    Args:
        folder: local or `gs://`.
        train_split: name of the folder inside to train on; None finds it.
        eval_split: name of the folder inside to evaluate on; None finds it.
        on_bad_image: "skip" or "fail".

    Raises:
        FileNotFoundError: there is no such folder, or it holds no class folders or no images.
        PermissionError: it may not be read.
        ValueError: a part has a class that the training part lacks, or there is no part of a wanted name.
    """
    inside = _folders(folder)
    parts = [name for name in (TRAIN, *HELD_OUT) if name in inside and _folders(f"{folder}/{name}")]
    divided = bool(train_split or eval_split) or TRAIN in parts or set(parts) == set(inside) != set()
    if not divided:
        return _divide(folder, on_bad_image)
    train = train_split or (TRAIN if TRAIN in parts else None)
    held_out = eval_split or next((name for name in HELD_OUT if name in parts and name != train), None)
    if train and not (train_split or held_out):
        return _divide(f"{folder}/{train}", on_bad_image)
    for name in (train, held_out):
        if name is not None and name not in inside:
            raise ValueError(f"{folder} has no part {name!r}. Received folders: {_few(inside)}")
    names = _classes(f"{folder}/{train or held_out}")
    listings = [_listing(f"{folder}/{name}", names) if name else None for name in (train, held_out)]
    splits = [_split(listing, on_bad_image) if listing else None for listing in listings]
    return splits[0], splits[1], tuple(names)


def _divide(folder: str, on_bad_image: str) -> tuple[RandomAccess, RandomAccess | None, tuple[str, ...]]:
    """A folder without parts: nine tenths to train on."""
    names = _classes(folder)
    listing = _listing(folder, names)
    held_out = np.array([_is_held_out(file) for file in listing.files])
    if held_out.all() or not held_out.any():
        warnings.warn(f"{folder} has too few images to hold some out: nothing is evaluated on.", stacklevel=4)
        return _split(listing, on_bad_image), None, tuple(names)
    warnings.warn(
        f"{folder} has no part to evaluate on (val, validation or test, beside train):"
        f" {held_out.sum():,} of {len(held_out):,} images are held out, chosen by their names.",
        stacklevel=4,
    )
    train, evaluation = (_split(listing.part(chosen), on_bad_image) for chosen in (~held_out, held_out))
    return train, evaluation, tuple(names)


def _is_held_out(file: str) -> bool:
    digest = hashlib.blake2b(file.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def _split(listing: Listing, on_bad_image: str) -> RandomAccess:
    paths = [f"{listing.folder}/{file}" for file in listing.files]

    def reader() -> Callable[[tf.Tensor], Example]:
        table, labels = tf.constant(paths), tf.constant(listing.labels)

        def fetch(index: tf.Tensor) -> Example:
            return {"image": tf.io.read_file(table[index]), "label": labels[index]}

        return fetch

    return RandomAccess(
        name=listing.folder,
        count=len(paths),
        fetch=reader,
        find_bad=lambda: _checked(listing, fail=on_bad_image == "fail"),
        naming=paths.__getitem__,
    )


def _checked(listing: Listing, *, fail: bool) -> Sequence[int]:
    """The numbers of the damaged images, said aloud."""
    bad = damaged(listing.folder, listing.files)
    if not bad:
        return bad
    message = f"Images of {listing.folder} that cannot be decoded: {_few([listing.files[i] for i in bad])}."
    if fail:
        raise ValueError(f'{message} Remove them, or let them be left out: on_bad_image="skip".')
    warnings.warn(f"{message} {len(bad):,} of {len(listing.files):,} are left out.", stacklevel=2)
    return bad


def _listing(folder: str, names: list[str]) -> Listing:
    """The images of one part, its class folders numbered as `names` are."""
    present = _folders(folder)
    if unknown := sorted(set(present) - set(names)):
        raise ValueError(
            f"{folder} has classes that the part to train on lacks: {_few(unknown)}."
            f" A label must be one of its {len(names)} classes: {_few(names)}"
        )
    images = {name: _images(f"{folder}/{name}") for name in present}
    if empty := [f"{folder}/{name}" for name in present if not images[name]]:
        raise FileNotFoundError(
            f"No images are in {_few(empty)}. Expected: files in every class folder that end in {', '.join(ENDINGS)}."
        )
    files = [f"{name}/{image}" for name in present for image in images[name]]
    labels = np.repeat([names.index(name) for name in present], [len(images[name]) for name in present])
    return Listing(folder, files, labels.astype(np.int64))


def _images(folder: str) -> list[str]:
    return [entry for entry in _entries(folder) if entry.lower().endswith(ENDINGS)]


def _classes(folder: str) -> list[str]:
    """The names of the classes: a folder each."""
    names = _folders(folder)
    if not names:
        held = f"{len(_images(folder)):,} images, but no folders" if _images(folder) else "no folders"
        raise FileNotFoundError(
            f"{folder} holds {held}. Expected: folder/class/image.jpg, or folder/train/class/image.jpg and"
            " folder/val/class/image.jpg"
        )
    return names


def _folders(folder: str) -> list[str]:
    """The visible folders in a folder, sorted."""
    return [entry for entry in _entries(folder) if tf.io.gfile.isdir(f"{folder}/{entry}")]


def _entries(folder: str) -> list[str]:
    names = [name.rstrip("/") for name in opened(tf.io.gfile.listdir, folder)]  # gs:// marks folders with a slash
    return sorted(name for name in names if name and not name.startswith("."))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
