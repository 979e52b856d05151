"""Training recipes: finds and reads zoo/recipes/*.toml, or a file of one's own.

A file that does not fit is refused as a whole, with all that is wrong with it in one error. Nothing here imports
Keras or TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keras_vit._util import data_files
from keras_vit._util.schema import misfits
from keras_vit.model.sizes import canonical_name
from keras_vit.train._recipe import REQUIRED, SCHEMA, Origin, Recipe, laid_over, without_none
from keras_vit.train._recipe_checks import known

__all__ = ["Recipe", "recipe", "recipes"]

# What a file may hold, in the notation of `schema.misfits`. Its name is the file's.
_FIELDS = {f"{name}?": kind for name, kind in SCHEMA.items() if name not in ("name", "variant")}
_VARIANT = {name: kind for name, kind in _FIELDS.items() if name not in ("source?", "notes?")}
_FILE = {**_FIELDS, "extends?": str, "variants?": {"*": _VARIANT}, "variant_of?": {"*": str}, "source": str}
del _FILE["source?"]
_TABLES = ("extends", "variants", "variant_of")


def recipe(name_or_path: str | os.PathLike[str], **changes: Any) -> Recipe:
    """One recipe, from the zoo or from a file.

    Args:
        name_or_path: one of `recipes()`, or a .toml file as zoo/README.md describes it.
        **changes: as `Recipe.replace` takes them; `variant` chooses one of the file's.

    Raises:
        ValueError: no recipe has this name (offers the nearest); the file or a change does not fit.
        FileNotFoundError: there is no such file.

    Example:
        >>> recipe("finetune", image_size=224, steps=10_000).learning_rate
        0.03
    """
    made = _read(_find(name_or_path)).recipe(None)
    return made.replace(**changes) if changes else made


def recipes() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def _folder() -> Path:
    return data_files.folder("zoo") / "recipes"


def _find(name_or_path: str | os.PathLike[str]) -> Path:
    path = Path(name_or_path)
    if path.suffix != ".toml":
        known(os.fspath(name_or_path), recipes(), "There is no recipe {!r}, and it is no .toml file")
        return _folder() / f"{name_or_path}.toml"
    if not path.is_file():
        raise FileNotFoundError(f"There is no recipe file {path}. Those of the package go by their names: {recipes()}")
    return path


def _read(path: Path) -> Origin:
    """What a file states, on top of what the recipe that it extends states.

    Raises:
        ValueError: it is no TOML, or no recipe: everything that is wrong with it.
    """
    table = data_files.read_toml(path)
    wrong = list(misfits(_given(table), _FILE, path.name))
    if not wrong:
        origin = _extend(table, path)
        wrong = [f"{path.name} lacks the key {name!r}" for name in sorted(REQUIRED - origin.stated.keys())]
    if not wrong:
        wrong = [*_field_misfits(origin, path.name), *_variant_of_misfits(origin, path.name)]
    if wrong:
        raise ValueError(f"{path} is no recipe: " + "; ".join(wrong))
    return origin


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    """A file's table without what it says is None, which fits wherever it may stand."""
    given = {name: value for name, value in without_none(table).items() if value is not None}
    if isinstance(table.get("variants"), Mapping):
        variants = table["variants"].items()
        given["variants"] = {name: _given(fields) if isinstance(fields, dict) else fields for name, fields in variants}
    return given


def _extend(table: Mapping[str, Any], path: Path) -> Origin:
    stated = {"name": path.stem, **without_none({k: v for k, v in table.items() if k not in _TABLES})}
    variants = {name: without_none(fields) for name, fields in table.get("variants", {}).items()}
    variant_of = table.get("variant_of", {})
    if "extends" not in table:
        return Origin(stated=stated, variants=variants, variant_of=variant_of)
    known(table["extends"], set(recipes()) - {path.stem}, f"{path.name}.extends names no recipe of the zoo: {{!r}}")
    base = _read(_find(table["extends"]))
    return Origin(
        stated=laid_over(base.stated, stated),
        variants={**base.variants, **variants},
        variant_of={**base.variant_of, **variant_of},
    )


def _field_misfits(origin: Origin, where: str) -> Iterator[str]:
    places: dict[str, list[str]] = {}  # what the recipe states once is wrong in all its variants, and told once
    for variant in (None, *origin.variants):
        try:
            origin.recipe(variant)
        except ValueError as error:
            places.setdefault(str(error), []).append(f"{where}.variants.{variant}" if variant else where)
    yield from (f"{found[0]}: {error}" for error, found in places.items())


def _variant_of_misfits(origin: Origin, where: str) -> Iterator[str]:
    for architecture, variant in origin.variant_of.items():
        try:
            if architecture != canonical_name(architecture):
                yield f"{where}.variant_of writes {canonical_name(architecture)!r}. Received: {architecture!r}"
            known(variant, origin.variants, f"{where}.variant_of.{architecture!r} names no variant: {{!r}}")
        except ValueError as error:
            yield str(error)
