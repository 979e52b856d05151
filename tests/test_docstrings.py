"""The examples in the docstrings run and print what they show, and every public name has one."""

from __future__ import annotations

import ast
import doctest
import importlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keras_vit
from package_source import TREES
from public_names import PublicName, public_names

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PROMPT = ">>> "
PUBLIC = list(public_names())


def docstrings(module: str) -> list[str]:
    """Return the docstrings in a module's file, without their indentation."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(TREES[module]) if isinstance(node, documented))
    return [text for text in found if text]


SHOWN = [public for public in PUBLIC if PROMPT in public.docstring]
SEEN = {public.docstring for public in SHOWN}
# Private functions may have examples too; those use the names of their own module.
PRIVATE = [(module, text) for module in TREES for text in docstrings(module) if PROMPT in text and text not in SEEN]


def run_examples(text: str, name: str, names: dict[str, Any]) -> None:
    """Run the examples of a docstring one after the other.

    Raises:
        AssertionError: one fails or prints something else; the message shows both.
    """
    test = doctest.DocTestParser().get_doctest(text, dict(names), name, None, 0)
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(test, out=report.write)
    assert runner.tries > 0 and runner.failures == 0, report.getvalue()


@pytest.fixture(autouse=True)
def empty_folder_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every example in an empty folder, and without the internet."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("public", SHOWN, ids=lambda public: public.name)
def test_a_public_example_runs(public: PublicName) -> None:
    run_examples(public.docstring, public.name, {"keras_vit": keras_vit, "np": np})


@pytest.mark.parametrize(("module", "text"), PRIVATE, ids=lambda value: value.splitlines()[0][:40])
def test_a_private_example_runs(module: str, text: str) -> None:
    names = vars(importlib.import_module(f"keras_vit.{module}".removesuffix(".__init__")))
    run_examples(text, module, {**names, "keras_vit": keras_vit, "np": np})


def needs_example(public: PublicName) -> bool:
    """Return whether a name must have an example: functions, classes and their own methods.

    Exceptions are raised and not called, properties are read, and Keras documents the methods that override its own.
    """
    is_exception = isinstance(public.value, type) and issubclass(public.value, BaseException)
    of_exception = public.owner is not None and issubclass(public.owner, BaseException)
    return not (is_exception or of_exception or public.is_property or public.overrides_foreign)


@pytest.mark.parametrize(
    "public", [public for public in PUBLIC if needs_example(public)], ids=lambda public: public.name
)
def test_a_public_name_has_an_example(public: PublicName) -> None:
    own = PROMPT in public.docstring
    # A short class shows its methods in its own example.
    method = public.name.rpartition(".")[2]
    lines = [line for line in (getattr(public.owner, "__doc__", None) or "").splitlines() if PROMPT in line]
    assert own or any(f".{method}(" in line for line in lines), f"{public.name} has no example"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (">>> np.float32(1) + 1\nnp.float32(3.0)", "np.float32(2.0)"),
        (">>> keras_vit.zoo.no_such_name", "no_such_name"),
    ],
)
def test_a_wrong_example_is_found(text: str, shown: str) -> None:
    with pytest.raises(AssertionError, match=shown.replace("(", r"\(").replace(")", r"\)")):
        run_examples(text, "wrong", {"keras_vit": keras_vit, "np": np})
