"""Recognise the names that other packages give to models, by the rules in zoo/names/*.toml."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_vit._util import data_files
from keras_vit._util.checks import given


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Architecture and published weights of a name of another package, such as timm's."""

    architecture: str
    is_guess: bool = False  # whether the name leaves a part of the architecture open
    publisher: str | None = None  # of the weights that the name stands for; None for the name of an architecture
    source: str | None = None  # URL of those weights
    weights: str | None = None  # or their tag on the card of the architecture
    image_size: int | None = None  # of those weights, in pixels


@functools.cache
def read(name: str) -> Spelling | None:
    """Return the architecture and weights of a name; None if no rule matches it."""
    for sizes, rule in _rules():
        if match := re.fullmatch(rule["pattern"], name.strip(), re.IGNORECASE):
            tag = rule.get("tags", {}).get(name.strip().casefold().removeprefix("timm/"))
            stated = given(tag=tag) | given(**match.groupdict())
            fields = rule.get("defaults", {}) | rule.get("guesses", {}) | stated
            size = sizes.get(fields["size"].casefold())
            if size is None or ("tags" in rule and "tag" not in fields):
                continue
            parts = fields | {"size": size, "stem": fields.get("stem", "").upper()}
            return Spelling(
                architecture=rule["architecture"].format(**parts),
                is_guess="guesses" in rule,
                publisher=rule.get("publisher"),
                source=rule["source"].format(**fields) if "source" in rule else None,
                weights=rule["weights"].format(**fields) if "weights" in rule else None,
                image_size=int(fields["image_size"]) if "image_size" in fields else None,
            )
    return None


def known_names() -> list[str]:
    """Return the names of other packages' weights that are listed one by one."""
    return [name for _, rule in _rules() for name in rule.get("tags", {})]


@functools.cache
def _rules() -> list[tuple[Mapping[str, str], Mapping[str, Any]]]:
    tables = [data_files.read_toml(path) for path in sorted((data_files.folder("zoo") / "names").glob("*.toml"))]
    return [(table["sizes"], rule) for table in tables for rule in table["rules"]]
