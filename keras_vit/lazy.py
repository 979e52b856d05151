"""Public names of a package that are imported when they are first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    Args:
        package: its name.
        homes: public name -> the module of the package that defines it.

    Returns:
        both functions; the first raises an AttributeError with all names where a name is none of them.
    """
    public = sorted(homes)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; its names: {public}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get, lambda: list(public)
