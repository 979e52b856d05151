"""The structure of the code: allowed imports, forbidden calls, sizes of files and folders."""

from __future__ import annotations

import ast
import collections
import graphlib
import importlib

from package_source import FLOORS, MODULES, PACKAGE, STUBS, TREES, imported_modules, imported_packages, imports

MOST_AT_THE_TOP = 5  # modules
DEEPEST = 2  # levels of folders below the package
SMALLEST_PACKAGE = 4  # modules and packages inside, with __init__
MOST_OF_A_NAME = 3  # modules with a function of the same name


def floor(module: str) -> int:
    """Return the row of FLOORS with the module's folder, or with the module if it is at the top."""
    folder = module.partition(".")[0]
    numbers = [number for number, row in enumerate(FLOORS) if folder in row]
    assert numbers, f"keras_vit/{folder} is new: add it to FLOORS, one row above the highest that it imports from"
    return numbers[0]


def test_imports_go_down() -> None:
    upward = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imported_modules(module)
        if other.partition(".")[0] != module.partition(".")[0] and floor(other) >= floor(module)
    ]
    assert not upward
    folders = [folder for row in FLOORS for folder in row]
    assert sorted(folders) == sorted({module.partition(".")[0] for module in MODULES})


def test_there_are_no_cycles() -> None:
    # Imports inside functions and those for type checkers count too.
    graph = {module: imported_modules(module) for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names the cycle


def test_layers_know_no_back_end() -> None:
    layers = [module for module in MODULES if module.startswith("model.layers")]
    found = {module: imported_packages(module) & {"jax", "tensorflow", "torch"} for module in layers}
    assert layers and not {module: packages for module, packages in found.items() if packages}


def test_a_module_and_an_inner_folder_do_not_import_each_other() -> None:
    both = [
        f"{module} and {other}"
        for module in MODULES
        for other in imported_modules(module)
        for inner in [module.rpartition(".")[0]]
        if inner.rpartition(".")[0] == other.rpartition(".")[0] != ""
        and any(name.rpartition(".")[0] == inner for name in imported_modules(other))
    ]
    assert not both


def test_every_module_says_what_it_is() -> None:
    assert [module for module, tree in TREES.items() if not ast.get_docstring(tree)] == []


def test_no_model_carries_code_and_no_pickle_is_read() -> None:
    # A Lambda layer saves Python byte code in the model; NumPy's pickles run code when they are read.
    for module, tree in TREES.items():
        attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        keywords = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        names = attributes.union(imports(module))
        assert not {name for name in names if name.endswith("layers.Lambda")}, module
        assert "allow_pickle=True" not in keywords, module


def test_no_module_hides_a_public_name_of_its_package() -> None:
    # Importing keras_vit.train.recipe would make `keras_vit.train.recipe` the module.
    for package in sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")):
        modules = {path.stem if path.stem != "__init__" else path.parent.name for path in (PACKAGE / package).glob("*")}
        public = getattr(importlib.import_module(f"keras_vit.{package}"), "__all__", ())
        assert not modules & set(public), package


def test_folders_are_few_and_not_nearly_empty() -> None:
    folders = {path.parent for path in MODULES.values()}
    names = {folder: "/".join(folder.relative_to(PACKAGE).parts) for folder in folders}
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_TOP
    assert [name for name in names.values() if name.count("/") >= DEEPEST] == []
    sizes = {names[folder]: len([*folder.glob("*.py"), *folder.glob("*/__init__.py")]) for folder in folders}
    assert {name: size for name, size in sizes.items() if size < SMALLEST_PACKAGE} == {}


def test_few_modules_have_a_function_of_the_same_name() -> None:
    homes = collections.defaultdict(list)
    for module, tree in TREES.items():
        # `text.load` and `dense.load` are public names: users see them with the name of their package.
        stub = STUBS.get(f"{module.partition('.')[0]}.__init__", ast.Module([], []))
        public = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name not in public:
                homes[node.name].append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > MOST_OF_A_NAME} == {}
