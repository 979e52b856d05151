"""Every public function, class and method of the package, for the tests of its docstrings."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras_vit

METHODS = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)


class PublicName(NamedTuple):
    """A public object, under the name that users import it by."""

    name: str
    value: Any
    owner: type | None  # the class of a method

    @property
    def docstring(self) -> str:
        """Return its docstring, without the indentation."""
        return inspect.getdoc(self.value) or ""

    @property
    def is_property(self) -> bool:
        """Return whether it is read like an attribute."""
        return isinstance(self.value, property | functools.cached_property)

    @property
    def overrides_foreign(self) -> bool:
        """Return whether a base class outside of the package has a method of this name, and documents it."""
        foreign = [base for base in getattr(self.owner, "__mro__", ()) if not base.__module__.startswith("keras_vit")]
        return any(hasattr(base, self.name.rpartition(".")[2]) for base in foreign)


def modules() -> list[types.ModuleType]:
    """Return the package and its public modules."""
    inner = [getattr(keras_vit, name) for name in keras_vit.__all__]
    return [keras_vit, *(value for value in inner if inspect.ismodule(value))]


def public_names() -> Iterator[PublicName]:
    """Yield every public function and class, and the public methods of the classes."""
    for module in modules():
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield PublicName(f"{module.__name__}.{name}", value, None)
            if inspect.isclass(value):
                for method, kind in vars(value).items():
                    if isinstance(kind, METHODS) and not method.startswith("_"):
                        yield PublicName(f"{module.__name__}.{name}.{method}", getattr(value, method), value)
