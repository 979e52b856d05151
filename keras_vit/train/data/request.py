"""What a user asks for as data."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keras_vit._util.checks import one_of

ON_BAD_IMAGE = ("skip", "fail")
STORED = ("data", "data_dir", "train_split", "eval_split")


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """A data set and the parts of it to use: the arguments of `train.run`, which describes them.

    If `training` is false, no split to train on is needed, and a folder without split folders is evaluated whole. If
    `needs_labels` is false, images may be without labels: a folder without class folders, or arrays (images, None).
    """

    data: Any
    data_dir: str | os.PathLike[str] | None = None
    train_split: str | None = None
    eval_split: str | None = None
    on_bad_image: str = "skip"
    training: bool = True
    needs_labels: bool = True

    def __post_init__(self) -> None:
        one_of("on_bad_image", self.on_bad_image, ON_BAD_IMAGE)

    def stored(self) -> dict[str, str] | None:
        """Return the arguments that find the data again, as text, folders with their whole paths; None for arrays."""
        if not isinstance(self.data, str | os.PathLike):
            return None
        stored = {name: os.fspath(getattr(self, name)) for name in STORED if getattr(self, name) is not None}
        for name in ("data", "data_dir"):
            if name in stored and "://" not in stored[name] and Path(stored[name]).is_dir():
                stored[name] = str(Path(stored[name]).absolute())
        return stored

    def with_defaults(self, stored: dict[str, str]) -> "DataRequest":
        """Return the request with the stored arguments of an earlier run where this one has none."""
        defaults: dict[str, Any] = {name: value for name, value in stored.items() if getattr(self, name) is None}
        return replace(self, **defaults)
