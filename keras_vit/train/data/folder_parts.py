"""Choose the images of a folder to train and evaluate on: split folders, "all", or a tenth that is "held-out"."""

from typing import NamedTuple

from keras_vit._util.text import abbreviated
from keras_vit.train.data.dataset_files import is_folder, list_files
from keras_vit.train.data.request import DataRequest

TRAIN = "train"
ALL = "all"
HELD_OUT = "held-out"
REST = "all but held-out"
EVALUATION_FOLDERS = ("val", "validation", "test")  # the first that exists is the evaluation split
SYNONYMS = {"heldout": HELD_OUT, "hold-out": HELD_OUT, "holdout": HELD_OUT, "validation": "val", "val": "validation"}
IGNORED = ("thumbs.db", "desktop.ini", "__macosx", "@eadir")  # of Windows, macOS' zip files, network drives


class Part(NamedTuple):
    """The images of some split folders: all of them, those that are held out (True) or the others (False)."""

    name: str
    folders: tuple[str, ...]  # names of split folders; "" is the folder itself
    is_held_out: bool | None = None


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
        f"{folder} has no split {given!r:.200}. Received folders: {abbreviated(subfolders(folder))}. A split is one of:"
        f" {', '.join(name for name in parts if name != REST)}"
    )
