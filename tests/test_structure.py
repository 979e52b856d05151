"""The structure of the code: allowed imports, forbidden calls, sizes of files and folders."""

import ast
import collections
import graphlib
import importlib

import pytest

from package_source import MODULES, PACKAGE, TREES, imported_modules, imported_packages, imports

# Each row is a floor, the lowest first: a module imports only from lower floors and from its own folder.
FLOORS = (
    {"errors"},
    {"_util"},
    {"digits", "position"},
    {"model"},
    {"converters", "export", "visualize"},
    {"dense", "text"},
    {"zoo"},
    {"batch", "train"},
    {"__init__"},  # the public names; higher floors use the package like its users
    {"cli"},
    {"__main__"},
)
# Importing these does not start Keras or TensorFlow, so that `keras-vit list` is fast.
LIGHT = (
    "__init__",
    "__main__",
    "_util",
    "cli",
    "errors",
    "position",
    "zoo",
    "model.__init__",
    "model.config",
    "model.config_groups",
    "model.labels",
    "model.sizes",
    "model.task",
    "converters.__init__",
    "converters.containers",
    "converters.config_json",
    "converters.infer",
    "converters.json_configs",
    "converters.json_timm",
    "converters.layout",
    "converters.table",
    "batch.__init__",
    "dense.__init__",
    "export.__init__",
    "export.litert.__init__",
    "export.litert.builder",
    "export.litert.operators",
    "export.litert.options",
    "text.__init__",
    "train.__init__",
    "train._recipe",
    "visualize.__init__",
)
# The mathematics of the model runs on all of Keras' back ends.
BACKEND_FREE = ("model.layers",)
LONGEST_FILE = 500  # lines
FEWEST_MODULES = 4  # of one folder
MOST_LEVELS = 2  # of folders below the package
MOST_AT_THE_TOP = 5


def floor(module: str) -> int:
    """Return the row of FLOORS with the module's folder, or with the module if it is at the top."""
    folder = module.partition(".")[0]
    numbers = [number for number, row in enumerate(FLOORS) if folder in row]
    assert numbers, f"keras_vit/{folder} is new: add it to FLOORS, one row above the highest that it imports from"
    return numbers[0]


def belongs(module: str, places: tuple[str, ...]) -> bool:
    """Return whether a module must be one of the places, or is in one of them."""
    return any(f"{module}.".startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    folder = module.partition(".")[0]
    others = {other for other in imported_modules(module) if other.partition(".")[0] != folder}
    upward = {other for other in others if floor(other) >= floor(module)}
    assert not upward, f"{module} stands on floor {floor(module)} and may not import {sorted(upward)}"


def test_every_folder_has_its_floor_once() -> None:
    folders = [folder for row in FLOORS for folder in row]
    assert sorted(folders) == sorted({module.partition(".")[0] for module in MODULES})


def test_export_and_visualize_take_models_and_know_no_zoo() -> None:
    assert max(map(floor, ("export", "visualize"))) < floor("zoo")


def test_folders_are_few_and_flat() -> None:
    folders = collections.Counter(path.parent for path in MODULES.values())
    assert {folder: count for folder, count in folders.items() if count < FEWEST_MODULES} == {}
    assert {folder for folder in folders if len(folder.relative_to(PACKAGE).parts) > MOST_LEVELS} == set()
    assert folders[PACKAGE] <= MOST_AT_THE_TOP


def test_there_are_no_cycles() -> None:
    # Imports inside functions count too; those for type checkers do not.
    graph = {module: imported_modules(module, typing=False) for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names the cycle


@pytest.mark.parametrize("module", [module for module in MODULES if belongs(module, LIGHT)])
def test_light_modules_import_only_light_ones(module: str) -> None:
    theirs = imported_packages(module, at_import=True) & {"keras", "tensorflow"}
    ours = {other for other in imported_modules(module, at_import=True) if not belongs(other, LIGHT)}
    assert not theirs | ours, f"import {sorted(theirs | ours)} in the functions that need it"


@pytest.mark.parametrize("module", [module for module in MODULES if belongs(module, BACKEND_FREE)])
def test_layers_know_no_back_end(module: str) -> None:
    assert not imported_packages(module) & {"jax", "tensorflow", "torch"}


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_long(module: str) -> None:
    lines = MODULES[module].read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST_FILE, f"{module} has {lines} lines"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module: str) -> None:
    assert ast.get_docstring(TREES[module])


@pytest.mark.parametrize("module", MODULES)
def test_no_model_carries_code_and_no_pickle_is_read(module: str) -> None:
    # A Lambda layer saves Python byte code in the model; NumPy's pickles run code when they are read.
    attributes = {ast.unparse(node) for node in ast.walk(TREES[module]) if isinstance(node, ast.Attribute)}
    keywords = {ast.unparse(node) for node in ast.walk(TREES[module]) if isinstance(node, ast.keyword)}
    names = attributes.union(imports(module))
    assert not {name for name in names if name.endswith("layers.Lambda")}
    assert "allow_pickle=True" not in keywords


PUBLIC_PACKAGES = ("batch", "cli", "converters", "export", "model", "text", "train", "visualize", "zoo")


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_no_module_hides_a_public_name_of_its_package(package: str) -> None:
    # Importing keras_vit.train.recipe would make `keras_vit.train.recipe` the module.
    modules = {path.stem if path.stem != "__init__" else path.parent.name for path in (PACKAGE / package).glob("*")}
    public = importlib.import_module(f"keras_vit.{package}").__all__
    assert not modules & set(public)
