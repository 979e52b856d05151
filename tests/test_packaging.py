"""Dependencies are declared, data folders are found and read, and every way of installing gives a working package."""

from __future__ import annotations

import configparser
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import keras_vit
from keras_vit._util import files
from keras_vit._util.files import data_folder, read_toml
from keras_vit._util.text import DISTRIBUTION
from package_source import MODULES, PACKAGE, ROOT, imported_modules, imported_packages

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
DATA = ["zoo", "converters"]
# Packages whose import name differs from their distribution's.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "tensorflow_serving": "tensorflow-serving-api"}
# Packages that modules of a folder import at their top; the folder says how to install them.
ON_TOP = {"batch": {"fsspec", "pyarrow"}, "train": {"tensorflow-datasets"}, "visualize": {"matplotlib"}}
FOR_DEVELOPERS = {"docs", "lint", "test", "test-extra"}


def requirements(section: str, option: str) -> list[Requirement]:
    return [Requirement(line) for line in SETUP[section][option].splitlines() if line]


def names(section: str, option: str) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements(section, option)}


CORE = names("options", "install_requires")
EXTRAS = {extra: names("options.extras_require", extra) for extra in SETUP["options.extras_require"]}
OPTIONAL = set().union(*(EXTRAS[extra] for extra in EXTRAS.keys() - FOR_DEVELOPERS))


def third_party(module: str, *, at_import: bool = False) -> set[str]:
    """Return the distributions whose packages a module imports."""
    packages = imported_packages(module, at_import=at_import) - sys.stdlib_module_names - {"keras_vit"}
    return {canonicalize_name(DISTRIBUTIONS.get(package, package)) for package in packages}


def test_whatever_a_module_imports_is_declared() -> None:
    for module in MODULES:
        at_the_top = CORE | ON_TOP.get(module.partition(".")[0], set())
        assert third_party(module, at_import=True) <= at_the_top, module
        assert third_party(module) <= CORE | OPTIONAL, module
    assert set().union(*map(third_party, MODULES)) >= CORE  # whatever is declared is imported somewhere


def test_every_folder_of_code_and_data_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **arguments: given.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("*.py")}
    data = {f"keras_vit._installed.{name}" for name in DATA}
    assert len(given["packages"]) == len(set(given["packages"]))
    assert set(given["packages"]) == packages | data
    assert given["package_dir"] == {f"keras_vit._installed.{name}": name for name in DATA}
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match=r"3\.11 or newer. Received: Python 3\.10"):
        runpy.run_path("setup.py")


def test_messages_name_the_distribution_and_extras_that_exist() -> None:
    assert SETUP["metadata"]["name"] == DISTRIBUTION
    sources = "".join(path.read_text(encoding="utf-8") for path in MODULES.values())
    commands = re.findall(r"(?:install_command\(|needs_extra\(.*, )[\"'](\w+)[\"']\)", sources)
    assert {"demo", "litert", "plots", "train"} <= set(commands) <= EXTRAS.keys()
    assert not re.findall(r"pip install '?\.", sources)  # the folder of a clone, which users of a wheel do not have


def test_every_dependency_is_pinned_to_a_version_within_its_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    declared = requirements("options", "install_requires")
    for extra in ("demo", "lint", "test"):
        declared += requirements("options.extras_require", extra)
    for requirement in declared:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_the_changelog_knows_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", keras_vit.__version__)
    assert f"\n## [{keras_vit.__version__}]" in changelog


# ---- data


def test_data_folders_are_found_beside_the_package_and_inside_of_an_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(data_folder(name).is_dir() for name in DATA)
    package = tmp_path / "keras_vit"
    package.mkdir()
    monkeypatch.setattr(files, "PACKAGE", package)
    installed, beside = package / "_installed" / "zoo", tmp_path / "zoo"
    with pytest.raises(FileNotFoundError, match="'zoo'.*install keras-vit-zoo again") as caught:
        data_folder("zoo")
    assert str(installed) in str(caught.value) and str(beside) in str(caught.value)
    for folder in (beside, installed):  # the installed one comes first
        folder.mkdir(parents=True)
        assert data_folder("zoo") == folder


def test_every_table_of_the_package_reads_as_tomllib_reads_it() -> None:
    tables = [path for name in DATA for path in data_folder(name).rglob("*.toml")]
    assert len(tables) > 50
    for path in tables:
        assert read_toml(path) == tomllib.loads(path.read_text(encoding="utf-8")) != {}, path


def test_a_broken_table_is_one_error_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    for data, message in {
        b'name = "ViT"\nsize = big\n': "not valid TOML.*line 2",
        b"size = 1\n\nsize = 2\n": "not valid TOML.*line 3",
        b'name = "ViT\n': "not valid TOML.*line 1",
        b"# one\n# two\nname = '\xff'\n": "not UTF-8 text.*line 3",
        b"seed = " + b"9" * 5000: "not valid TOML: .* 5000 digits",
    }.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} is {message}"):
            read_toml(path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml"):
        read_toml(tmp_path / "nowhere.toml")


def test_class_names_are_one_a_line_with_their_wordnet_id_in_order() -> None:
    for name, count in (("imagenet2012", 1000), ("imagenet21k", 21843)):
        text = (data_folder("zoo") / "labels" / f"{name}.txt").read_text(encoding="utf-8")
        rows = [line.split("\t") for line in text.splitlines()]
        assert len(rows) == count
        assert all(len(row) == 2 and re.fullmatch(r"n\d{8}", row[0]) and row[1].strip() for row in rows)
        assert [row[0] for row in rows] == sorted({row[0] for row in rows})


# ---- installing


def output(*command: str | Path, folder: Path) -> str:
    """Run a command in a folder, without this process' Python settings, and return its standard output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == 0, f"{command}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    return run.stdout


def files_of(folder: Path) -> set[str]:
    """Return the files below a folder, with the folder's own name, without caches and hidden folders."""
    files = {path.relative_to(folder.parent) for path in folder.rglob("*") if path.is_file()}
    return {path.as_posix() for path in files if not any(part.startswith((".", "__")) for part in path.parent.parts)}


PYTHON_FILES = files_of(PACKAGE)
DATA_FILES = set().union(*(files_of(ROOT / name) for name in DATA))


def needs_extra(module: str) -> bool:
    """Return whether a module, or one that it imports, imports an optional package at its top."""
    others = imported_modules(module, at_import=True)
    return not third_party(module, at_import=True) <= CORE or any(map(needs_extra, others))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the targets for `pip install`, by kind. The wheel is built from the sdist, as packagers do."""
    folder = tmp_path_factory.mktemp("dist")
    # A copy: building leaves files in the repository, and packs files that an earlier build left.
    without = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    checkout = Path(shutil.copytree(ROOT, folder / "checkout", ignore=without))
    output(sys.executable, "-m", "build", "--outdir", folder, checkout, folder=folder)
    kinds = {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}
    return {**kinds, "folder": checkout, "editable": checkout}


@pytest.fixture(scope="module")
def environment(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin folder of a new environment with only the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    output(sys.executable, "-m", "venv", folder, folder=folder)
    binaries = folder / ("Scripts" if os.name == "nt" else "bin")
    constraints = ROOT / "constraints.txt"
    output(binaries / "python", "-m", "pip", "install", "-c", constraints, built["wheel"], folder=folder)
    return binaries


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_code_and_the_data(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == PYTHON_FILES | {f"keras_vit/_installed/{name}" for name in DATA_FILES}
    with tarfile.open(built["sdist"]) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    assert packed >= PYTHON_FILES | DATA_FILES | files_of(ROOT / "tests") | {"LICENSE", "README.md"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist", "folder", "editable"])
def test_every_kind_of_install_works(kind: str, built: dict[str, Path], environment: Path) -> None:
    folder = environment.parent
    target = ["--editable", built[kind]] if kind == "editable" else [built[kind]]
    flags = ["--no-deps", "--force-reinstall"]
    output(environment / "python", "-m", "pip", "install", *flags, *target, folder=folder)

    code = "import keras_vit; print(*keras_vit.__path__)"
    where = output(environment / "python", "-c", code, folder=folder)
    assert (Path(where.strip()) == built[kind] / "keras_vit") == (kind == "editable")

    # The environment has no extras: no other module may need one to be imported.
    alone = [module for module in MODULES if module != "__main__" and not needs_extra(module)]
    modules = [f"keras_vit.{module}".removesuffix(".__init__") for module in alone]
    output(environment / "python", "-c", f"import {', '.join(modules)}", folder=folder)

    code = "import keras_vit; print(*keras_vit.zoo.names(), sep='\\n')"
    catalogue = output(environment / "python", "-c", code, folder=folder).split()
    assert catalogue == keras_vit.zoo.names()
    listed = output(environment / "keras-vit", "list", folder=folder)
    assert all(name in listed for name in catalogue)
