"""The shape of the code: what may import what, and what no file may hold."""

import ast
import graphlib
from pathlib import Path

import pytest

from package_source import MODULES, TREES, imported_modules, imported_packages, imports

# A module imports only from floors below its own; inside a sub-package, from its neighbours too.
FLOORS = {
    "atomic": 0,
    "config_parts": 0,
    "content": 0,
    "digits": 0,
    "html_table": 0,
    "integrity": 0,
    "lazy": 0,
    "names": 0,
    "page": 0,
    "position": 0,
    "schema": 0,
    "config": 1,
    "labels": 1,
    "layers": 1,
    "transfer": 1,
    "arithmetic": 2,
    "cards": 2,
    "download": 2,
    "graph": 2,
    "preprocess": 2,
    "catalogue": 3,
    "checkpoints": 3,
    "model": 3,
    "keras_file": 4,
    "converters": 5,
    "export": 4,
    "visualize": 4,
    "pretrained": 6,
    "train": 7,
    "zoo": 8,
    "__init__": 9,  # the public names; what stands above uses the package as its users do
    "cli_options": 9,
    "cli_bench": 10,
    "cli_export": 10,
    "cli_show": 10,
    "cli_visualize": 10,
    "gallery": 10,
    "demo": 10,
    "cli_gallery": 11,
    "cli": 12,
    "__main__": 13,
}
# Importing these starts neither Keras nor TensorFlow: `keras-vit list` answers at once.
LIGHT = {
    *("content", "integrity", "names", "position", "schema", "config_parts", "config", "labels", "transfer"),
    *("cards", "download", "catalogue", "pretrained", "zoo", "__init__", "cli", "cli_export", "cli_options"),
    *("arithmetic", "cli_bench", "cli_gallery", "cli_show", "cli_visualize", "html_table", "lazy", "page"),
    "__main__",
}
# What holds the mathematics runs on each of Keras' back ends.
BACKEND_FREE = {"layers"}
LONGEST_FILE = 350


def unit(module: str) -> str:
    """What the table of floors knows a module by: `layers` for `layers.block`."""
    return module.partition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_floor(module: str) -> None:
    assert unit(module) in FLOORS, (
        f"keras_vit/{unit(module)} is new: add it to FLOORS in {Path(__file__).name}, "
        "one floor above the highest that it imports from"
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    others = {other for other in imported_modules(module) if unit(other) != unit(module)}
    upward = {other for other in others if FLOORS[unit(other)] >= FLOORS[unit(module)]}
    assert not upward, f"{module} stands on floor {FLOORS[unit(module)]} and may not import {sorted(upward)}"


def test_train_export_and_visualize_take_models_and_know_no_zoo() -> None:
    assert max(FLOORS[name] for name in ("train", "export", "visualize")) < FLOORS["zoo"]


def test_there_are_no_cycles() -> None:
    graph = {module: imported_modules(module, at_import=True) for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("module", [module for module in MODULES if unit(module) in LIGHT])
def test_light_modules_import_only_light_ones(module: str) -> None:
    theirs = imported_packages(module, at_import=True) & {"keras", "tensorflow"}
    ours = {other for other in imported_modules(module, at_import=True) if unit(other) not in LIGHT}
    assert not theirs | ours, f"import {sorted(theirs | ours)} in the functions that need it"


@pytest.mark.parametrize("module", [module for module in MODULES if unit(module) in BACKEND_FREE])
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
    # A Lambda layer saves Python byte code inside the model; NumPy's pickles run code when they are read.
    attributes = {ast.unparse(node) for node in ast.walk(TREES[module]) if isinstance(node, ast.Attribute)}
    keywords = {ast.unparse(node) for node in ast.walk(TREES[module]) if isinstance(node, ast.keyword)}
    names = attributes.union(imports(module))
    assert not {name for name in names if name.endswith("layers.Lambda")}
    assert "allow_pickle=True" not in keywords


def test_no_module_hides_a_public_name_of_its_package() -> None:
    # Importing keras_vit.train.recipe would make `keras_vit.train.recipe` the module.
    from keras_vit import train

    modules = {name.removeprefix("train.") for name in MODULES if name.startswith("train.")}
    assert not modules & set(train.__all__)
