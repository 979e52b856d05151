"""Check single arguments."""

import errno
import os
from pathlib import Path
from typing import Any


def is_count(value: Any, *, least: int) -> bool:
    """Return whether a value is an integer of at least `least`; NumPy's integers are accepted, booleans are not."""
    return not isinstance(value, bool) and hasattr(value, "__index__") and int(value) >= least


def check_counts(**counts: Any) -> None:
    """Raise a ValueError for a value that is not an integer >= 1."""
    for name, value in counts.items():
        if not is_count(value, least=1):
            raise ValueError(f"{name} must be an integer >= 1. Received: {value!r:.200}")


def check_texts(**texts: Any) -> None:
    """Raise a ValueError for a value that is not a string."""
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} must be a string. Received: {text!r:.200}")


def as_path(value: Any, name: str) -> str:
    """Return a path or URL, a string or a pathlib.Path, as a string; raise a ValueError for what no file is called."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise ValueError(f"{name} must be a string or a pathlib.Path. Received: {value!r:.200}")
    if "://" not in path:
        try:
            Path(path).expanduser().stat()
        except (RuntimeError, ValueError) as error:  # no such home, a null character, a lone surrogate
            raise ValueError(f"{name} must be a path: {str(error)[:200]}. Received: {path!r:.200}") from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise ValueError(f"{name} must be a path: it is too long. Received: {path!r:.200}") from None
    return path


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise a ValueError that lists the known values if `value` is not one of them."""
    if value not in known:
        raise ValueError(f"{name} must be one of {list(known)}. Received: {value!r:.200}")


def pair(value: Any, name: str) -> tuple[int, int]:
    """Return an int or (height, width) as (height, width), or raise a ValueError."""
    sides = (value, value) if is_count(value, least=1) else value
    if not isinstance(sides, list | tuple) or len(sides) != 2 or not all(is_count(side, least=1) for side in sides):
        raise ValueError(f"{name} must be an integer >= 1 or (height, width). Received: {value!r:.200}")
    return int(sides[0]), int(sides[1])
