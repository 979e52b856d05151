"""Import the public names of a package on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str | None]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    `homes` maps each public name to the module that defines it (relative or full name), or to None for a module.
    """
    public = sorted(homes)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; its names: {public}")
        home = homes[name]
        if home is None:
            return importlib.import_module(f"{package}.{name}")
        module = home if home.startswith("keras_vit.") else f"{package}.{home}"
        return getattr(importlib.import_module(module), name)

    return get, lambda: list(public)
