"""List the models of the zoo and their published weights. `cards` reads them; nothing here imports Keras."""

import glob
import os
import re
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from keras_vit._util.checks import check_texts
from keras_vit.zoo.cards import Card, Weights, all_cards, card, find_name, gather, names_by_spelling, read_family


def names(pattern: str = "*") -> list[str]:
    """List the models that have published weights, grouped by family: first the ViTs.

    Args:
        pattern: shell pattern such as "B/*" or "r50*", in any case and any spelling of the names, those of other
            packages included ("vit_base_patch16_224"). Text without "*", "?" or "[" may also be part of a name.

    Returns:
        Canonical names, in each family in natural order, B/8 before B/16.

    Example:
        >>> keras_vit.zoo.names("B/*")
        ['ViT-B/8', 'ViT-B/16', 'ViT-B/32']
    """
    check_texts(pattern=pattern)
    known = names_by_spelling()
    matching = {name for spelling, name in known.items() if fnmatchcase(spelling, pattern.casefold())}
    if not matching and not glob.has_magic(pattern):
        found = find_name(pattern)
        if found in all_cards():
            return [found]
        part = f"{found.rpartition('/')[0]}/" if found else pattern  # the other models of a size without weights
        matching = {name for spelling, name in known.items() if part.casefold() in spelling}
    return sorted(matching, key=_order)


def _order(name: str) -> tuple[bool, str, list[tuple[str, int]]]:
    family = all_cards()[name].family
    natural = [(text, int(digits or 0)) for text, digits in re.findall(r"(\D+)(\d*)", name)]
    return family != "ViT", family.casefold(), natural


def table(pattern: str = "*") -> list[dict[str, Any]]:
    """List all published weights as rows, for `pandas.DataFrame(zoo.table())`.

    Nothing is built or downloaded. AugReg files that no card recommends are not included.

    Args:
        pattern: shell pattern, as for `names`.

    Returns:
        One dict for each model and tag:

        - name, family, weights (the tag), default (bool), image_size, file, url (None if the file comes with the
          package), paper, license, load (a line of Python);
        - num_classes: None if only the file states it; the counts then exclude the head;
        - parameters, and gflops: 1e9 operations for one image at image_size. A multiply-add counts as two operations:
          the number is twice what papers and timm print;
        - accuracy: dicts of value (percent), metric, dataset, image_size, source.

    Example:
        >>> [(row["name"], row["parameters"]) for row in keras_vit.zoo.table("digits")]
        [('ViT-digits', 142026)]
    """
    return [row for name in names(pattern) for row in rows(card(name))]


def rows(known: Card) -> list[dict[str, Any]]:
    """Rows of `table` for one card."""
    return [_row(weights) for weights in known.weights.values()]


def _row(weights: Weights) -> dict[str, Any]:
    listed = all_cards()[weights.architecture]
    default = weights.tag == listed.default
    arguments = f"{listed.name!r}" if default else f"{listed.name!r}, weights={weights.tag!r}"
    if weights.tag not in listed.weights:  # an AugReg file is loaded by its own name
        arguments = f"{weights.tag!r}"
    arguments += ", accept_license=True" * bool(weights.terms)
    parameters, gflops = weights.parameters, weights.gflops
    if parameters is None or gflops is None:  # the card does not state them
        from keras_vit.model.cost import count

        counted = count(weights.whole_config())
        parameters, gflops = counted.parameters, counted.flops / 1e9
    return {
        "name": listed.name,
        "family": listed.family,
        "weights": weights.tag,
        "default": default,
        "parameters": parameters,
        "gflops": gflops,
        "image_size": weights.image_size,
        "num_classes": weights.num_classes,
        "file": weights.file,
        "url": weights.url,
        "accuracy": [asdict(accuracy) for accuracy in weights.accuracy],
        "paper": str(weights.paper),
        "license": weights.license,
        "load": f"keras_vit.zoo.load({arguments})",
    }


def read_cards(path: str | os.PathLike[str]) -> dict[str, Card]:
    """Read and check a .toml file of cards, such as one that you write for your own weights.

    Args:
        path: the file; zoo/README.md describes it.

    Returns:
        The card of each model in the file, by name.

    Raises:
        CardError: the file is not a valid card; the message lists everything that is wrong.

    Example:
        >>> from pathlib import Path
        >>> text = '[weights]'
        >>> _ = Path("mine.toml").write_text(text)
        >>> keras_vit.zoo.read_cards("mine.toml")
        Traceback (most recent call last):
        ...
        keras_vit.errors.CardError: mine.toml is not a valid model card: ...
    """
    return gather(read_family(Path(path)).weights)


def details(card: Card) -> str:
    """Everything that is known of a model's weights, as `keras-vit show` prints it."""
    blocks = [card.name]
    for tag, weights in card.weights.items():
        lines = "\n".join(f"    {line}" for line in str(weights).splitlines())
        blocks.append(f"  {tag}{' (default)' if tag == card.default else ''}\n{lines}")
    return "\n\n".join(blocks)
