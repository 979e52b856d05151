"""Import the public names of a package on first use, also when Keras looks for a class in a saved model."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from types import SimpleNamespace
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    `names` maps each module (relative or full name) to the public names that it defines, "" to public modules.
    """
    homes = {name: module for module, defined in names.items() for name in defined}
    public = sorted(homes)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; its names: {public}")
        if not homes[name]:
            return importlib.import_module(f"{package}.{name}")
        module = homes[name] if homes[name].startswith("keras_vit.") else f"{package}.{homes[name]}"
        return getattr(importlib.import_module(module), name)

    return get, lambda: list(public)


def register_classes(package: str, module: str, names: Iterable[str]) -> None:
    """Let Keras load models of classes whose module is not imported yet, whether Keras is imported before or after.

    `names` are those of the classes that importing `module` registers under `package`.
    """

    def register() -> None:
        for name in (f"{package}>{name}" for name in names):
            placeholder = SimpleNamespace(from_config=functools.partial(_from_config, module, name))
            _keras_registry().setdefault(name, placeholder)

    if "keras" in sys.modules:
        register()
    else:
        finder: Any = SimpleNamespace(find_spec=functools.partial(_find_spec, "keras", register))
        sys.meta_path.insert(0, finder)


def _keras_registry() -> dict[str, Any]:
    return importlib.import_module("keras").saving.get_custom_objects()


def _from_config(module: str, name: str, config: dict[str, Any]) -> Any:
    importlib.import_module(module)  # registers the class in place of its placeholder
    return _keras_registry()[name].from_config(config)


def _find_spec(wanted: str, after: Callable[[], None], name: str, path: Any = None, target: Any = None) -> Any:
    """Find a module as `sys.meta_path` does, and call `after` at the end of its import; None for other modules."""
    spec = PathFinder.find_spec(name, path, target) if name == wanted else None
    if spec is None or spec.loader is None:
        return None
    execute = spec.loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        after()

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec
