"""Import the public names of a package on first use, also when Keras looks for a class in a saved model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
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


def register_classes(package: str, module: str, names: Iterable[str]) -> None:
    """Let Keras load models of classes whose module is not imported yet, whether Keras is imported before or after.

    `names` are those of the classes that importing `module` registers under `package`.
    """

    def register() -> None:
        objects = importlib.import_module("keras").saving.get_custom_objects()
        for name in names:
            objects.setdefault(f"{package}>{name}", _LazyClass(f"{package}>{name}", module))

    if "keras" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _AfterImport("keras", register))


class _LazyClass:
    """Stand for a class in Keras' registry until Keras loads an object of it."""

    def __init__(self, registered_name: str, module: str) -> None:
        self.registered_name = registered_name
        self.module = module

    def from_config(self, config: dict[str, Any]) -> Any:
        """Import the class, which replaces this object in the registry, and return its object."""
        importlib.import_module(self.module)
        return importlib.import_module("keras").saving.get_custom_objects()[self.registered_name].from_config(config)


class _AfterImport:
    """Call a function when a module has been imported. It is a finder of `sys.meta_path`."""

    def __init__(self, module: str, function: Callable[[], None]) -> None:
        self.module = module
        self.function = function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the module, whose loader calls the function at its end; None for other modules."""
        spec = PathFinder.find_spec(name, path, target) if name == self.module else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.function()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
