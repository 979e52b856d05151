"""Find and read training recipes: zoo/recipes/*.toml, or a user's own file. Needs neither Keras nor TensorFlow."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from keras_vit._util import data_files
from keras_vit._util.checks import as_path, table_problems
from keras_vit._util.text import suggestion
from keras_vit.model.sizes import canonical_name
from keras_vit.train._recipe import FIELD_RULES, REQUIRED, Origin, Recipe, merge_fields, read_none

__all__ = ["Recipe", "recipe", "recipes"]

# Keys of a file; `Recipe` checks the values. The recipe's name is the file's.
_VARIANT = {name: NotRequired[Any] for name in FIELD_RULES.keys() - {"name", "variant", "source", "notes"}}
_Variant = TypedDict("_Variant", _VARIANT)  # type: ignore[misc]
_FILE = {"source": NotRequired[str], "notes": NotRequired[Any], **_VARIANT, "extends": NotRequired[str]}
_FILE |= {"variants": NotRequired[dict[str, _Variant]], "variant_of": NotRequired[dict[str, str]]}
_File = TypedDict("_File", _FILE)  # type: ignore[misc]
_NOT_FIELDS = ("extends", "variants", "variant_of")


def recipe(name_or_path: str | os.PathLike[str], **changes: Any) -> Recipe:
    """Load a training recipe from the zoo or from a file.

    Args:
        name_or_path: one of `recipes()`, or the path of a .toml file in the format that zoo/README.md describes.
        **changes: fields to change, as for `Recipe.replace`; `variant` selects a variant of the file.

    Raises:
        ValueError: No recipe has this name (the message names the nearest), or the file or a change is not valid.
        FileNotFoundError: There is no such file.

    Example:
        >>> keras_vit.train.recipe("finetune", image_size=224, steps=10_000).learning_rate
        0.03
    """
    loaded = _read(_find(name_or_path)).build(None)
    return loaded.replace(**changes) if changes else loaded


def recipes() -> list[str]:
    """Return the names of the recipes that come with the package.

    Example:
        >>> "finetune" in keras_vit.train.recipes()
        True
    """
    return sorted(path.stem for path in _folder().glob("*.toml"))


def _folder() -> Path:
    return data_files.folder("zoo") / "recipes"


def _find(name_or_path: str | os.PathLike[str]) -> Path:
    name = as_path(name_or_path, "recipe")
    path = Path(name)
    if path.suffix != ".toml":
        if name not in recipes():
            near = suggestion(name, recipes())
            raise ValueError(f"There is no recipe {name!r:.200}, and it is not a .toml file; {near}.")
        return _folder() / f"{name}.toml"
    if not path.is_file():
        raise FileNotFoundError(f"There is no recipe file {path}. The recipes of the package are {recipes()}")
    return path


def _read(path: Path) -> Origin:
    """Read a file and the recipe that it extends; raise one ValueError with all that is wrong."""
    table = data_files.read_toml(path)
    wrong = list(table_problems(table, _File, path.name))
    if not wrong:
        origin = _extend(table, path)
        wrong = [f"{path.name} lacks the key {name!r}" for name in sorted({"source", *REQUIRED} - origin.stated.keys())]
    if not wrong:
        wrong = [*_field_problems(origin, path.name), *_variant_of_problems(origin, path.name)]
    if wrong:
        raise ValueError(f"{path} is not a valid recipe: " + "; ".join(wrong))
    return origin


def _extend(table: Mapping[str, Any], path: Path) -> Origin:
    """Add a file's fields and variants to those of the recipe that it extends."""
    stated = {"name": path.stem, **read_none({k: v for k, v in table.items() if k not in _NOT_FIELDS})}
    variants = {name: read_none(fields) for name, fields in table.get("variants", {}).items()}
    variant_of = table.get("variant_of", {})
    if "extends" not in table:
        return Origin(stated=stated, variants=variants, variant_of=variant_of)
    extended, known = table["extends"], set(recipes()) - {path.stem}
    if extended not in known:
        raise ValueError(
            f"{path.name}.extends names no recipe of the zoo: {extended!r}; {suggestion(extended, known)}."
        )
    base = _read(_find(extended))
    inherited = {**base.stated, "source": f"changes to {extended}: {base.stated['source']}"}
    return Origin(
        stated=merge_fields(inherited, stated),
        variants={**base.variants, **variants},
        variant_of={**base.variant_of, **variant_of},
    )


def _field_problems(origin: Origin, file_name: str) -> Iterator[str]:
    """Yield each problem with the values once, even if several variants share it."""
    places: dict[str, list[str]] = {}
    for variant in (None, *origin.variants):
        try:
            origin.build(variant)
        except ValueError as error:
            places.setdefault(str(error), []).append(f"{file_name}.variants.{variant}" if variant else file_name)
    yield from (f"{found[0]}: {error}" for error, found in places.items())


def _variant_of_problems(origin: Origin, file_name: str) -> Iterator[str]:
    """Yield a sentence for each error in the table from architectures to variants."""
    for architecture, variant in origin.variant_of.items():
        key = f"{file_name}.variant_of.{architecture!r}"
        try:
            if architecture != canonical_name(architecture):
                yield f"{file_name}.variant_of must write {canonical_name(architecture)!r}. Received: {architecture!r}"
        except ValueError as error:
            yield str(error)
        if variant not in origin.variants:
            yield f"{key} names no variant: {variant!r}; {suggestion(variant, origin.variants)}."
