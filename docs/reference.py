"""Write the API reference: the docstrings of the public names as HTML pages.

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
    """Prepare a module and its public modules for pdoc, which reads `__dict__` and folders.

    Args:
        module: gets all names of its `__all__`, also those that it imports on first use.
    """
    public = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    vars(module).update(public)
    inner = [value for value in public.values() if inspect.ismodule(value)]
    for value in inner:
        import_names(value)
    if hasattr(module, "__path__") and not inner:
        module.__path__ = []  # its files are private


def write(folder: Path) -> None:
    """Write a page for each public module, and a search page.

    Args:
        folder: for the pages; files with the same names are replaced.

    Raises:
        Warning: pdoc cannot show a docstring, a name or an annotation correctly.
    """
    import_names(keras_vit)
    pdoc.render.configure(docformat="google", footer_text=f"keras_vit {keras_vit.__version__}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc("keras_vit", output_directory=folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
