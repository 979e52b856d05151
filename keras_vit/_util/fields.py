"""Docstrings under the fields of dataclasses: one text for `help`, for the options of commands and for editors."""

import ast
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

Documented = TypeVar("Documented", bound=Callable[..., Any])
_WIDTH = 120


def option(default: Any, **how: Any) -> Any:
    """Describe a field that is also an option of a command, with `flag` or `is_size` if these differ from the usual.

    The first sentence of the docstring under the field is the option's help.
    """
    return dataclasses.field(default=default, metadata={"is_option": True, **how})


def option_names(cls: type) -> tuple[str, ...]:
    """Names of a dataclass's fields that are options."""
    return tuple(field.name for field in dataclasses.fields(cls) if "is_option" in field.metadata)


def option_help(cls: type, name: str) -> str:
    """First sentence of the docstring under a field."""
    doc = field_docs(cls).get(name, "")
    sentence = re.match(r".*?\.(?= |$)", doc)
    return sentence[0] if sentence else doc


def field_docs(cls: type) -> dict[str, str]:
    """Read the docstrings under the fields of a dataclass and its bases, each as one line, from the source.

    Fields without one are missing; all are where only compiled files are installed.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _docs_of_module(base.__module__).get(base.__name__, {})
    return {field.name: docs[field.name] for field in dataclasses.fields(cls) if field.name in docs}


def arguments_text(cls: type) -> str:
    """List the documented fields of a dataclass as in the section "Args" of a docstring."""
    return "\n".join(
        textwrap.fill(f"{name}: {doc}", _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, doc in field_docs(cls).items()
    )


def documented(cls: Documented) -> Documented:
    """Add the docstrings under the fields to that of the dataclass, as its "Args"."""
    return documented_by(cls)(cls)


def documented_by(cls: Any) -> Callable[[Documented], Documented]:
    """Add the docstrings under the fields of a dataclass to the "Args" of what has arguments of these names."""

    def decorate(described: Documented) -> Documented:
        if described.__doc__:  # none with python -OO
            text, sections = _split_after_arguments(inspect.cleandoc(described.__doc__))
            start = text if "\nArgs:\n" in text else f"{text}\n\nArgs:"
            described.__doc__ = f"{start}\n{arguments_text(cls)}\n\n{sections}".rstrip() + "\n"
        return described

    return decorate


def _split_after_arguments(doc: str) -> tuple[str, str]:
    """Split a docstring in front of the first section that follows the arguments."""
    found = re.search(r"^(Returns|Raises|Example):\n", doc, re.M)
    place = found.start() if found else len(doc)
    return doc[:place].rstrip(), doc[place:]


@functools.cache
def _docs_of_module(name: str) -> dict[str, dict[str, str]]:
    """Read the docstrings under the fields of each class of a module: class -> field -> text."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (OSError, TypeError):  # no source, or a module of C
        return {}
    return {node.name: dict(_documented_fields(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _documented_fields(node: ast.ClassDef) -> list[tuple[str, str]]:
    pairs = zip(node.body, node.body[1:], strict=False)
    return [
        (field.target.id, " ".join(below.value.value.split()))
        for field, below in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    ]
