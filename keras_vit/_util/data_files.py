"""Find the data folders `zoo/` and `converters/`, and read TOML files."""

import tomllib
from pathlib import Path
from typing import Any

from keras_vit._util.checks import check_depth

PACKAGE = Path(__file__).resolve().parents[1]


def data_folder(name: str) -> Path:
    """Return the data folder "zoo" or "converters" of the installed package, or else of the checkout."""
    places = [PACKAGE / "_installed" / name, PACKAGE.parent / name]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"keras_vit's data folder {name!r} was expected in one of {[str(place) for place in places]}. "
        "The installation is incomplete: install keras-vit-zoo again, or run from a full checkout."
    )


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file in UTF-8; if it is malformed, raise a ValueError that names the line."""
    data = Path(path).read_bytes()
    try:
        table = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path} is not UTF-8 text (at line {line}). Save it as UTF-8.") from error
    except ValueError as error:  # a TOMLDecodeError, or an integer of thousands of digits
        raise ValueError(f"{path} is not valid TOML: {error}. Fix that line.") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read.") from error
    return dict(check_depth(table, str(path)))
