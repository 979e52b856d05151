"""The workflow and the docstrings of the reference are complete."""

from __future__ import annotations

import configparser
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

import readme_lines
from public_names import PublicName, modules, public_names

ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
PYTHONS = re.findall(r"Python :: (3\.\d+)$", SETUP["metadata"]["classifiers"], re.MULTILINE)
GITHUB = ROOT / ".github"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GITHUB.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def read(path: Path) -> Any:
    """Read a YAML file with every scalar as a string, so that GitHub's `on` is not True and 3.10 is not 3.1."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


WORKFLOW = read(GITHUB / "workflows" / "ci.yml")
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
MATRIX = WORKFLOW["jobs"]["make"]["strategy"]["matrix"]


def test_the_workflow_runs_make_and_nothing_else() -> None:
    assert {step["run"] for step in STEPS if "run" in step} == {"make ${{ matrix.target }}"}
    targets = {*MATRIX["target"], *(row["target"] for row in MATRIX["include"])}
    assert targets <= TARGETS
    assert targets >= {*re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)}
    assert targets >= {"lint", "test", "test-wheel", "test-browser"}


def test_the_workflow_has_the_pythons_that_are_promised() -> None:
    assert MATRIX["python"] == PYTHONS
    assert {row["python"] for row in MATRIX["include"]} <= set(PYTHONS)
    assert SETUP["options"]["python_requires"] == f">={PYTHONS[0]}"
    bounds = re.findall(r"\(3, (\d+)\) <= sys\.version_info\[:2\] <= \(3, (\d+)\)", MAKEFILE)
    assert bounds == [(PYTHONS[0].removeprefix("3."), PYTHONS[-1].removeprefix("3."))]


def test_the_workflow_may_only_read_and_uses_whole_versions_of_actions() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in WORKFLOW["jobs"].values())
    actions = [step for step in STEPS if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in actions)
    for step in actions:
        for path in step.get("with", {}).get("cache-dependency-path", "").split():
            assert (ROOT / path).is_file()
    checkouts = [step for step in actions if step["uses"].startswith("actions/checkout@")]
    assert checkouts and all(step["with"]["persist-credentials"] == "false" for step in checkouts)


def test_only_the_browser_is_optional() -> None:
    optional = [row["target"] for row in MATRIX["include"] if row.get("optional") == "true"]
    assert optional == ["test-browser"]
    assert WORKFLOW["jobs"]["make"]["continue-on-error"] == "${{ matrix.optional || false }}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_makes_is_a_target(page: Path) -> None:
    found = re.findall(r"(?:^(?:\$ )?|`)make ((?:[a-z-]+ ?)+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {target for targets in found for target in targets.split()} <= TARGETS


def test_every_target_is_known_not_to_be_a_file() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(phony.split()) == TARGETS


def test_the_readme_has_lines_for_a_newcomer() -> None:
    lines = readme_lines.lines()
    compile(lines, "README.md", "exec")
    assert "http" not in lines


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


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_only_the_names_that_are_listed_are_public(module: types.ModuleType) -> None:
    shown = {name for name in dir(module) if not name.startswith("_")}
    assert shown == {name for name in module.__all__ if not name.startswith("_")}


@pytest.mark.parametrize("public", list(public_names()), ids=lambda public: public.name)
def test_every_public_name_says_what_it_is_and_takes(public: PublicName) -> None:
    assert public.docstring
    if callable(public.value) and not public.overrides_foreign:
        assert parameters(public.value) <= described(public.docstring)


@pytest.mark.full
def test_the_reference_is_written_without_a_warning(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "docs" / "reference.py"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {path.stem for path in tmp_path.rglob("*.html")}
    assert pages == {"index", *(module.__name__.rpartition(".")[2] for module in modules())}
    model = (tmp_path / "keras_vit.html").read_text(encoding="utf-8")
    assert 'id="VisionTransformer.attention_maps"' in model
