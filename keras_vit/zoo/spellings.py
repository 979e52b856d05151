"""Recognise the names of other packages (zoo/names/*.toml) and of AugReg files (arXiv 2106.10270, zoo/augreg.toml)."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from keras_vit._util import data_files
from keras_vit._util.checks import given
from keras_vit.model.sizes import canonical_name
from keras_vit.zoo.cards import Weights, families, make_weights


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


def parse_augreg(name: str) -> Weights | None:
    """Read the name of one of about 52,000 AugReg files, with or without ".npz", by the grammar in zoo/augreg.toml.

    "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0" is a pre-trained file; the name of a fine-tuned one goes
    on with "--imagenet2012-steps_20k-lr_0.03-res_384". Return the card's weights for a recommended file, weights with
    the file's name as tag for another file, and None for other names. A wrong part raises a ValueError that names it.
    """
    family = next(family for family in families() if "grammar" in family.table)
    grammar = family.table["grammar"]
    stem = name.removesuffix(".npz")
    # A name with two parts of the grammar is treated as an AugReg name: an error can say which part is wrong.
    known = {spelling for part in grammar["pre_trained"] + grammar["fine_tuned"] for spelling in _allowed(part)}
    if sum(part in known for part in re.split("-+", stem.casefold())) < 2:
        return None
    first, dashes, second = stem.partition("--")
    values, stem = _parse_augreg_parts(name, first, grammar["pre_trained"])
    architecture = canonical_name(values["model"])
    image_size = grammar["image_size"]
    if dashes:
        values, end = _parse_augreg_parts(name, second, grammar["fine_tuned"])
        stem = f"{stem}--{end}"
        image_size = int(values["resolution"])
    for weights in family.weights:
        if weights.file == f"{stem}.npz":
            return weights
    stated = {"rank": 1, "image_size": image_size, **grammar["datasets"][values["data set"]]}
    return make_weights(family.table, stem, architecture, stated, {"file": f"{stem}.npz"})


def _parse_augreg_parts(name: str, text: str, parts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], str]:
    """Return the values of the parts of an AugReg name by field, and the text as the names of files have it."""
    values = {}
    for part, value in zip_longest(parts, text.split("-")):
        if part is None:
            last = parts[-1]["field"]
            raise ValueError(
                f"An AugReg name ends after its {last}. Received: {value!r:.200} after it in {name!r:.200}"
            )
        field = part["field"]
        allowed = _allowed(part)
        if value is None or value.casefold() not in allowed:
            received = "nothing" if value is None else repr(value)
            spelled = list(map(part["spelled"].format, part["values"]))
            raise ValueError(
                f"The {field} of an AugReg name must be one of {spelled}. Received: {received} in {name!r:.200}"
            )
        values[field] = allowed[value.casefold()]
    return values, "-".join(part["spelled"].format(values[part["field"]]) for part in parts)


def _allowed(part: Mapping[str, Any]) -> dict[str, str]:
    return {part["spelled"].format(value).casefold(): value for value in part["values"]}
