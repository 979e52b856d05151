"""The syntax trees of the package and the imports of each module, for the tests of code."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from places import ROOT

PACKAGE = ROOT / "keras_vit"
# By dotted name inside the package; a sub-package itself is `layers.__init__`.
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {module: ast.parse(path.read_text(encoding="utf-8"), path) for module, path in MODULES.items()}
# What packages import when a name is used, for lazy_loader and type checkers.
STUBS = {
    module: ast.parse(path.with_suffix(".pyi").read_text(encoding="utf-8"), path)
    for module, path in MODULES.items()
    if path.with_suffix(".pyi").exists()
}

# Each row is a floor, the lowest first: a module imports only from lower floors and from its own folder.
FLOORS = (
    {"errors"},
    {"_util"},
    {"digits", "position"},
    {"model"},
    {"converters"},
    {"dense"},
    {"export", "visualize"},
    {"text"},
    {"zoo"},
    {"batch", "train"},
    {"__init__"},  # the public names; higher floors use the package like its users
    {"cli"},
    {"__main__"},
)


def nodes(tree: ast.AST, *, at_import: bool = False) -> Iterator[ast.AST]:
    """Yield the nodes of a module: all, those for type checkers too, or only those that run when it is imported."""
    for node in ast.iter_child_nodes(tree):
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for_checkers = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not (at_import and (deferred or for_checkers)):
            yield node
            yield from nodes(node, at_import=at_import)


def imports(module: str, **which: bool) -> Iterator[str]:
    """Yield the full dotted names that a module imports: `keras_vit.model.layers.block.Block`, `numpy`."""
    inside = ["keras_vit", *module.split(".")]
    stub = nodes(STUBS[module]) if module in STUBS and not which.get("at_import") else ()
    for node in itertools.chain(nodes(TREES[module], **which), stub):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = [*(inside[: -node.level] if node.level else []), *filter(None, [node.module])]
            yield from (".".join([*origin, alias.name]) for alias in node.names)


def imported_packages(module: str, **which: bool) -> set[str]:
    """Return the top-level packages that a module imports: `numpy`, `keras_vit`."""
    return {name.partition(".")[0] for name in imports(module, **which)}


def imported_modules(module: str, **which: bool) -> set[str]:
    """Return the modules of this package that a module imports, each as the longest name that is a file."""
    found = set()
    for name in imports(module, **which):
        package, *parts = name.split(".")
        if package == "keras_vit":
            stems = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
            files = [file for stem in stems for file in (stem, f"{stem}.__init__") if file in MODULES]
            found.add(files[0] if files else "__init__")
    return found
