"""Every public name is documented, its examples run and print what they show, and CI does what is promised."""

from __future__ import annotations

import ast
import builtins
import configparser
import doctest
import functools
import importlib
import inspect
import io
import re
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

import keras_vit
from keras_vit import errors
from marks import full_except
from package_source import ROOT, TREES

METHODS = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PROMPT = ">>> "


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
    def overrides_foreign(self) -> bool:
        """Return whether a base class outside of the package has a method of this name, and documents it."""
        foreign = [base for base in getattr(self.owner, "__mro__", ()) if not base.__module__.startswith("keras_vit")]
        return any(hasattr(base, self.name.rpartition(".")[2]) for base in foreign)

    @property
    def has_example(self) -> bool:
        """Return whether its docstring has an example, or, for a method, the docstring of its class calls it."""
        lines = [line for line in (getattr(self.owner, "__doc__", None) or "").splitlines() if PROMPT in line]
        return PROMPT in self.docstring or any(f".{self.name.rpartition('.')[2]}(" in line for line in lines)

    @property
    def needs_example(self) -> bool:
        """Return whether a name must have one: exceptions are raised, and properties read, without a call."""
        of_exception = [kind for kind in (self.value, self.owner) if isinstance(kind, type)]
        is_property = isinstance(self.value, property | functools.cached_property)
        return not (
            any(issubclass(kind, BaseException) for kind in of_exception) or is_property or self.overrides_foreign
        )


def public_modules() -> list[types.ModuleType]:
    """Return the package and its public modules."""
    inner = [getattr(keras_vit, name) for name in keras_vit.__all__]
    return [keras_vit, *(value for value in inner if inspect.ismodule(value))]


def public_names() -> Iterator[PublicName]:
    """Yield every public function and class, and the public methods of the classes."""
    for module in public_modules():
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield PublicName(f"{module.__name__}.{name}", value, None)
            if inspect.isclass(value):
                for method, kind in vars(value).items():
                    if isinstance(kind, METHODS) and not method.startswith("_"):
                        yield PublicName(f"{module.__name__}.{name}.{method}", getattr(value, method), value)


PUBLIC = list(public_names())


def described(docstring: str) -> set[str]:
    """Return the arguments in the sections Args and Attributes of a docstring; `a, b: ...` has two."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:(?: .*)?\n)+)", docstring + "\n", re.MULTILINE)
    entries = re.findall(r"^    ([\w*, ]+?)(?: \(.*?\))?:", "".join(sections), re.MULTILINE)
    return {name.strip("* ") for entry in entries for name in entry.split(",")}


def parameters(value: Any) -> set[str]:
    """Return the names of the parameters of a function or class; none if a class inherits its `__init__`."""
    if inspect.isclass(value) and "__init__" not in vars(value):
        return set()
    hidden = {field.name for field in getattr(value, "__dataclass_fields__", {}).values() if not field.repr}
    return {*inspect.signature(value).parameters} - hidden - {"self"}


def test_every_public_name_is_listed_and_says_what_it_is_and_takes() -> None:
    for module in public_modules():
        shown = {name for name in dir(module) if not name.startswith("_")}
        assert shown == {name for name in module.__all__ if not name.startswith("_")}, module.__name__
    assert [public.name for public in PUBLIC if not public.docstring] == []
    called = [public for public in PUBLIC if callable(public.value) and not public.overrides_foreign]
    missing = {public.name: parameters(public.value) - described(public.docstring) for public in called}
    assert {name: names for name, names in missing.items() if names} == {}
    assert [public.name for public in PUBLIC if public.needs_example and not public.has_example] == []


def test_errors_that_are_promised_can_be_imported_and_caught_as_built_in_ones() -> None:
    sections = [re.search(r"^Raises:\n((?: .*\n?|\n)+)", public.docstring, re.MULTILINE) for public in PUBLIC]
    promised = {name for section in sections if section for name in re.findall(r"\b[A-Z]\w*Error\b", section[1])}
    assert {"DownloadError", "CheckpointError", "UnknownModelError", "ValueError"} <= promised
    assert not {name for name in promised if not hasattr(builtins, name) and name not in errors.__all__}
    for name in errors.__all__:
        kind = getattr(errors, name)
        built_in = [base for base in kind.__mro__ if base.__module__ == "builtins"]
        assert issubclass(kind, errors.KerasViTError)
        assert name == "KerasViTError" or built_in[0] is not Exception, name


def run_examples(text: str, name: str, names: dict[str, Any]) -> str:
    """Run the examples of a docstring one after the other; return "", or what failed or printed something else."""
    test = doctest.DocTestParser().get_doctest(text, dict(names), name, None, 0)
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(test, out=report.write)
    return report.getvalue() if runner.tries else f"{name} has no example"


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run examples in an empty folder, and without the internet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_VIT_OFFLINE", "1")
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))
    yield


SHOWN = [public for public in PUBLIC if PROMPT in public.docstring]
SLOW_NAMES = """
batch.embed dense.load export.saved_model export.tflite train.Examination train.few_shot train.run train.try_values
visualize.report zoo.zero_shot_head
"""
SLOW = {f"keras_vit.{name}" for name in SLOW_NAMES.split()}


def assert_examples_run(chosen: list[PublicName]) -> None:
    names = {"keras_vit": keras_vit, "np": np}
    failures = {public.name: run_examples(public.docstring, public.name, names) for public in chosen}
    assert chosen and {name: told for name, told in failures.items() if told} == {}


QUICK = ("ViTConfig", "VisionTransformer")  # parts of the package whose examples take a second


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("module", full_except(QUICK, sorted({public.name.split(".")[1] for public in SHOWN})))
def test_the_public_examples_run(module: str) -> None:
    assert_examples_run([each for each in SHOWN if each.name.split(".")[1] == module and each.name not in SLOW])


@pytest.mark.full
@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("name", sorted(SLOW))
def test_the_slow_public_examples_run(name: str) -> None:
    assert_examples_run([each for each in SHOWN if each.name == name])


@pytest.mark.usefixtures("empty_folder")
def test_the_examples_of_private_functions_run_with_the_names_of_their_module() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    public = {each.docstring for each in SHOWN}
    failures = {}
    for module, tree in TREES.items():
        texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        for text in [text for text in texts if text and PROMPT in text and text not in public]:
            names = vars(importlib.import_module(f"keras_vit.{module}".removesuffix(".__init__")))
            failures[module, text] = run_examples(text, module, {**names, "keras_vit": keras_vit, "np": np})
    assert failures and {name: told for name, told in failures.items() if told} == {}


def test_a_wrong_example_is_found() -> None:
    for text, shown in (
        (">>> np.float32(1) + 1\nnp.float32(3.0)", "np.float32(2.0)"),
        (">>> keras_vit.zoo.no_such_name", "no_such_name"),
    ):
        assert shown in run_examples(text, "wrong", {"keras_vit": keras_vit, "np": np})


@pytest.mark.full
def test_the_reference_is_written_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["reference.py", str(tmp_path)])
    for module in public_modules():
        if hasattr(module, "__path__"):  # the script empties it
            monkeypatch.setattr(module, "__path__", module.__path__)
    runpy.run_path(str(ROOT / "docs" / "reference.py"), run_name="__main__")
    pages = {path.stem for path in tmp_path.rglob("*.html")}
    assert pages == {"index", *(module.__name__.rpartition(".")[2] for module in public_modules())}
    model = (tmp_path / "keras_vit.html").read_text(encoding="utf-8")
    assert 'id="VisionTransformer.attention_maps"' in model


# ---- the Makefile and the workflow of GitHub

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
WORKFLOW = yaml.load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def test_the_workflow_runs_targets_of_make_on_the_pythons_that_are_promised() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE)
    matrix = WORKFLOW["jobs"]["make"]["strategy"]["matrix"]
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    assert {step["run"] for step in steps if "run" in step} == {"make ${{ matrix.target }}"}
    targets = {*matrix["target"], *(row["target"] for row in matrix["include"])}
    checked = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"lint", "test", "test-wheel", "test-browser", *checked} <= targets <= TARGETS
    assert matrix["python"] == pythons and {row["python"] for row in matrix["include"]} <= set(pythons)
    assert setup["options"]["python_requires"] == f">={pythons[0]}"
    bounds = re.findall(r"\(3, (\d+)\) <= sys\.version_info\[:2\] <= \(3, (\d+)\)", MAKEFILE)
    assert bounds == [(pythons[0].removeprefix("3."), pythons[-1].removeprefix("3."))]
    # The workflow may read the repository and nothing else.
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in WORKFLOW["jobs"].values())


def test_what_a_page_makes_is_a_target() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(phony.split()) == TARGETS
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / ".github").glob("*.md"), *ROOT.glob("docs/*.md")]
    for page in pages:
        found = re.findall(r"(?:^(?:\$ )?|`)make ((?:[a-z-]+ ?)+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert {target for targets in found for target in targets.split()} <= TARGETS, page
