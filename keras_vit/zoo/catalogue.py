"""Find models and their published weights by any spelling of a name.

The facts are in zoo/*.toml, see `cards`. Nothing here imports Keras or TensorFlow.
"""

import contextlib
import functools
import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from keras_vit._util.checks import check_texts
from keras_vit._util.text import nearest
from keras_vit.errors import CardError
from keras_vit.errors import UnknownModelError as UnknownModelError
from keras_vit.model.sizes import canonical_name
from keras_vit.zoo.cards import Weights, families, make_weights, read_family

# The name of a file of "How to train your ViT?" (arXiv 2106.10270): its model, the data it was trained on, and, after
# "--", the data and the resolution it was fine-tuned at.
_AUGREG = re.compile(
    r"(?P<model>\w+)-(?P<data>i1k|i21k)-\d+ep-lr_[\d.]+-aug_\w+-wd_[\d.]+-do_[\d.]+-sd_[\d.]+"
    r"(?:--(?P<tuned>\w+)-steps_\w+-lr_[\d.]+-res_(?P<size>\d+))?(?:\.npz)?",
    re.IGNORECASE,
)
_AUGREG_CLASSES = {
    "i1k": ("imagenet2012", 1000),
    "i21k": ("imagenet21k", 21843),
    "imagenet2012": ("imagenet2012", 1000),
}


@dataclass(frozen=True)
class Card:
    """A model and its published weights.

    Args:
        name: canonical name, such as "ViT-B/16".
        weights: tag -> weights, the recommended ones first.

    Example:
        >>> card = keras_vit.zoo.card("digits")
        >>> card.default, card.weights["digits"].num_classes
        ('digits', 10)
    """

    name: str
    weights: Mapping[str, Weights]

    @property
    def default(self) -> str:
        """Tag of the recommended weights.

        Example:
            >>> keras_vit.zoo.card("H/14").default
            'imagenet21k'
        """
        return next(iter(self.weights))

    @property
    def family(self) -> str:
        """First part of the name, such as "DINOv2"; hybrids with a ResNet are in the family "ViT".

        Example:
            >>> keras_vit.zoo.card("R50+ViT-B/16").family
            'ViT'
        """
        return self.name.partition("-")[0].rpartition("+")[2]

    def __str__(self) -> str:
        blocks = [self.name]
        for tag, weights in self.weights.items():
            details = "\n".join(f"    {line}" for line in str(weights).splitlines())
            blocks.append(f"  {tag}{' (default)' if tag == self.default else ''}\n{details}")
        return "\n\n".join(blocks)


def card(name: str) -> Card:
    """Look up the card of a model: its published weights with files, accuracies and sources.

    Args:
        name: an architecture or a model of the zoo in any spelling, a repository of the Hugging Face Hub whose file is
            on the card ("timm/vit_base_patch14_dinov2.lvd142m"), one of the `aliases` in zoo/*.toml
            ("vit_base_patch16_224"), or an AugReg file.

    Returns:
        The card; for an AugReg file a card with that file alone.

    Raises:
        UnknownModelError: no card has this name; the message lists the nearest.
        ValueError: the name of an AugReg file begins with a model that there is not.

    Example:
        >>> list(keras_vit.zoo.card("b_16").weights)
        ['augreg-imagenet21k+imagenet2012', ...]
    """
    check_texts(name=name)
    if not name.isprintable():
        raise UnknownModelError(f"The name of a model must be one line of text. Received: {name!r:.200}")
    if single := _augreg_file(name):
        return Card(single.architecture, {single.tag: single})
    found = _find(name)
    if found in _cards():
        return _cards()[found]
    by_spelling = _by_spelling()
    close = nearest(name.casefold(), by_spelling, count=8, cutoff=0.4)
    models = list(dict.fromkeys(by_spelling[spelling] for spelling in close))[:4]
    offer = f"the nearest are {models}" if models else f"the models are {names()}"
    problem = f"{found} has no published weights" if found else "No model has this name"
    raise UnknownModelError(f"{problem}; {offer}. Received: {name!r:.200}")


def _augreg_file(name: str) -> Weights | None:
    """Find the weights of an AugReg file's name, with its name as tag if no card recommends it."""
    match = _AUGREG.fullmatch(name)
    if match is None:
        return None
    architecture = canonical_name(match["model"])
    model = re.sub(r"[/+]", "_", architecture.replace("ViT-", ""))
    stem = model + name[match.end("model") :].casefold().removesuffix(".npz")
    family = next(family for family in families() if family.table["base"].endswith("/augreg/"))
    for weights in family.weights:
        if weights.file == f"{stem}.npz":
            return weights
    labels, num_classes = _AUGREG_CLASSES.get((match["tuned"] or match["data"]).casefold(), (None, None))
    stated = {"rank": 1, "image_size": int(match["size"] or 224), "labels": labels, "num_classes": num_classes}
    return make_weights(family.table, stem, architecture, stated, {"file": f"{stem}.npz"})


def _find(name: str) -> str | None:
    """Find the model or architecture of a name, in any spelling and with any separators."""
    known = _by_spelling()
    with contextlib.suppress(ValueError):
        return known.get(name.casefold()) or known.get(_joined(name)) or canonical_name(name)
    return None


def alias(name: str) -> tuple[str, str] | None:
    """Find the model, and the tag or URL of its weights, by the name of another package."""
    return _aliases().get(name.casefold())


def select(model: Card, weights: str = "default") -> Weights:
    """Select the weights with a tag ("default": the recommended ones); an unknown tag raises a ValueError."""
    tag = model.default if weights == "default" else weights
    if tag not in model.weights:
        raise ValueError(f"{model.name} has the weights {list(model.weights)}. Received: weights={weights!r:.200}")
    return model.weights[tag]


def _by_spelling() -> dict[str, str]:
    known = {spelling: model for spelling, (model, _) in _aliases().items() if model in _cards()}
    return known | {spelling: name for name in _cards() for spelling in _spellings(name)}


@functools.cache
def _aliases() -> dict[str, tuple[str, str]]:
    """Collect the repositories of the cards' files, for those of timm also without "timm/", and the cards' aliases."""
    found: dict[str, tuple[str, str]] = {}
    for family in families():
        for row in family.weights:
            if hub := re.fullmatch(r"hf://((?:timm/)?(.+?))/[^/]+", row.url or ""):
                found |= dict.fromkeys(map(str.casefold, hub.groups()), (row.architecture, row.tag))
        for name, stated in family.table.get("aliases", {}).items():
            found[name.casefold()] = stated["model"], stated["weights"]
    return found


def _spellings(name: str) -> list[str]:
    short = name.replace("ViT-", "")
    plain = [spelling.replace("/", "_") for spelling in (name, short)]
    return [spelling.casefold() for spelling in (name, short, *plain, plain[1].replace("+", "_"), _joined(name))]


def _joined(name: str) -> str:
    return re.sub(r"[-_/ ]", "", name).casefold()


@functools.cache
def _cards() -> dict[str, Card]:
    return gather([weights for family in families() for weights in family.weights])


def gather(rows: Sequence[Weights]) -> dict[str, Card]:
    """Group weights into one card per model; a tag or rank that a model has twice raises a CardError."""
    grouped: dict[str, dict[str, Weights]] = {}
    for weights in sorted(rows, key=lambda weights: weights.rank):
        model = grouped.setdefault(weights.architecture, {})
        for other in model.values():
            if weights.tag == other.tag or weights.rank == other.rank:
                raise CardError(
                    f"{weights.architecture} lists two weight files with the same tag or rank: "
                    + " and ".join(f"{w.base}{w.file} (tag {w.tag!r}, rank {w.rank})" for w in (other, weights))
                )
        model[weights.tag] = weights
    return {name: Card(name, model) for name, model in grouped.items()}


# ---- all cards of a file or of the zoo


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
    known = _by_spelling()
    matching = {name for spelling, name in known.items() if fnmatchcase(spelling, pattern.casefold())}
    if not matching and not glob.has_magic(pattern):
        found = _find(pattern)
        if found in _cards():
            return [found]
        part = f"{found.rpartition('/')[0]}/" if found else pattern  # the other models of a size without weights
        matching = {name for spelling, name in known.items() if part.casefold() in spelling}
    return sorted(matching, key=_order)


def _order(name: str) -> tuple[bool, str, list[tuple[str, int]]]:
    family = _cards()[name].family
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
    listed = _cards()[weights.architecture]
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
