"""Where the data folders `zoo/` and `converters/` lie, and how a table in them is read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    """The folder of data called `name`, of the installed package or else of the checkout.

    Args:
        name: `"zoo"` or `"converters"`.

    Returns:
        The path of an existing folder.

    Raises:
        FileNotFoundError: it lies neither in the package nor beside it.
    """
    places = [PACKAGE / "_installed" / name, PACKAGE.parent / name]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"keras_vit's data folder {name!r} was expected in one of {[str(place) for place in places]}. "
        "The installation is incomplete: install keras-vit-zoo again, or run from a full checkout."
    )


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table that a TOML file holds.

    Args:
        path: a UTF-8 text file in TOML 1.0.

    Returns:
        Its top-level keys and values, as `tomllib` gives them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not TOML; the message names the file and the line.
    """
    data = Path(path).read_bytes()
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} is not UTF-8 text (at line {line}). Save it as UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}. Mend that line.") from error
