"""Writes the API reference: the docstrings of the public names, as pages of HTML.

python docs/reference.py build/api
"""

from __future__ import annotations

import inspect
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pdoc

import keras_vit


def import_names(module: ModuleType) -> None:
    """Prepares a module and its public modules for pdoc, which looks into `__dict__` and into folders.

    Args:
        module: gets the names of its `__all__`, those too that it imports when they are asked for.
    """
    public = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    vars(module).update(public)
    inner = [value for value in public.values() if inspect.ismodule(value)]
    for value in inner:
        import_names(value)
    if hasattr(module, "__path__") and not inner:
        module.__path__ = []  # of export.verify the function is public, and not the file of that name


def write(folder: Path) -> None:
    """Writes a page for each public module, and a search.

    Args:
        folder: where to; what is there under the same names is replaced.

    Raises:
        Warning: something cannot be shown as it should: a docstring, a name, an annotation.
    """
    import_names(keras_vit)
    pdoc.render.configure(docformat="google", footer_text=f"keras_vit {keras_vit.__version__}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc("keras_vit", output_directory=folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
