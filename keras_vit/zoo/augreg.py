"""Read the names of the files of AugReg (arXiv 2106.10270) by the grammar in zoo/augreg.toml."""

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from keras_vit.model.sizes import canonical_name
from keras_vit.zoo.cards import Weights, families, make_weights


def parse_name(name: str) -> Weights | None:
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
    values, stem = _parse_parts(name, first, grammar["pre_trained"])
    architecture = canonical_name(values["model"])
    image_size = grammar["image_size"]
    if dashes:
        values, end = _parse_parts(name, second, grammar["fine_tuned"])
        stem = f"{stem}--{end}"
        image_size = int(values["resolution"])
    for weights in family.weights:
        if weights.file == f"{stem}.npz":
            return weights
    stated = {"rank": 1, "image_size": image_size, **grammar["datasets"][values["data set"]]}
    return make_weights(family.table, stem, architecture, stated, {"file": f"{stem}.npz"})


def _parse_parts(name: str, text: str, parts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], str]:
    """Return the values of the parts of an AugReg name by field, and the text as the names of files have it."""
    values = {}
    for part, given in zip_longest(parts, text.split("-")):
        if part is None:
            last = parts[-1]["field"]
            raise ValueError(
                f"An AugReg name ends after its {last}. Received: {given!r:.200} after it in {name!r:.200}"
            )
        field = part["field"]
        allowed = _allowed(part)
        if given is None or given.casefold() not in allowed:
            received = "nothing" if given is None else repr(given)
            spelled = list(map(part["spelled"].format, part["values"]))
            raise ValueError(
                f"The {field} of an AugReg name must be one of {spelled}. Received: {received} in {name!r:.200}"
            )
        values[field] = allowed[given.casefold()]
    return values, "-".join(part["spelled"].format(values[part["field"]]) for part in parts)


def _allowed(part: Mapping[str, Any]) -> dict[str, str]:
    return {part["spelled"].format(value).casefold(): value for value in part["values"]}
