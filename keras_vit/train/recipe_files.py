"""Recipes in files: zoo/recipes/*.toml, and a user's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from keras_vit._util import files
from keras_vit._util.checks import as_path, table_problems
from keras_vit._util.text import suggestion
from keras_vit.train._recipe import FIELD_RULES, REQUIRED, Recipe, merge_fields, read_none

# Keys of a file; `Recipe` checks the values. The recipe's name is the file's.
_KEYS = dict.fromkeys(FIELD_RULES.keys() - {"name"}, NotRequired[Any])
_File = TypedDict("_File", {**_KEYS, "source": NotRequired[str], "extends": NotRequired[str]})  # type: ignore[misc]


def recipe(name_or_path: str | os.PathLike[str], **changes: Any) -> Recipe:
    """Load a training recipe from the zoo or from a file.

    Args:
        name_or_path: one of `recipes()`, or the path of a .toml file in the format that zoo/README.md describes.
        **changes: fields to change, as for `Recipe.replace`.

    Raises:
        ValueError: No recipe has this name (the message names the nearest), or the file or a change is not valid.
        FileNotFoundError: There is no such file.

    Example:
        >>> keras_vit.train.recipe("finetune", image_size=224, steps=10_000).learning_rate
        0.03
    """
    path = _find_file(name_or_path)
    fields = _read_fields(path)
    if missing := sorted({"source", *REQUIRED} - fields.keys()):
        raise ValueError(f"{path} is not a valid recipe: it lacks the keys {missing}")
    try:
        loaded = Recipe(**fields, changed=frozenset())
    except ValueError as error:
        raise ValueError(f"{path} is not a valid recipe: {error}") from None
    return loaded.replace(**changes) if changes else loaded


def recipes() -> list[str]:
    """List the names of the recipes that come with the package.

    Example:
        >>> "finetune" in keras_vit.train.recipes()
        True
    """
    return sorted(_recipe_files())


def _recipe_files() -> dict[str, Path]:
    return {path.stem: path for path in (files.data_folder("zoo") / "recipes").glob("*.toml")}


def _find_file(name_or_path: str | os.PathLike[str]) -> Path:
    name, known = as_path(name_or_path, "recipe"), _recipe_files()
    path = known.get(name, Path(name))
    if path.suffix != ".toml":
        near = suggestion(name, known)
        raise ValueError(f"There is no recipe {name!r:.200}, and it is not a .toml file; {near}.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no recipe file {path}. The recipes of the package are {list(known)}")
    return path


def _read_fields(path: Path) -> dict[str, Any]:
    """Read the fields of a file, with those of the recipe that it extends."""
    table = files.read_toml(path)
    if wrong := list(table_problems(table, _File, path.name)):
        raise ValueError(f"{path} is not a valid recipe: " + "; ".join(wrong))
    extended = table.pop("extends", None)
    fields = {"name": path.stem, **read_none(table)}
    if extended is None:
        return fields
    known = set(recipes()) - {path.stem}
    if extended not in known:
        raise ValueError(
            f"{path.name}.extends names no recipe of the zoo: {extended!r}; {suggestion(extended, known)}."
        )
    base = _read_fields(_find_file(extended))
    base |= {"source": f"changes to {extended}: {base['source']}", "notes": ()}
    return merge_fields(base, fields)
