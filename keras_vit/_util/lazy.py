"""Import the public names of a package on first use."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]], *, modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package, from its public names by module and its public modules."""
    homes = {name: module for module, defined in names.items() for name in defined}
    public = sorted([*homes, *modules])

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; its names: {public}")
        module = homes[name] if homes[name].startswith("keras_vit.") else f"{package}.{homes[name]}"
        return getattr(importlib.import_module(module), name)

    return get, lambda: list(public)
