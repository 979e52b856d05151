"""The commands `keras-vit list` and `fetch`, which start no TensorFlow, and `show`, which counts a model's layers."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from keras_vit._util.text import byte_size, scaled
from keras_vit.cli import options

if TYPE_CHECKING:
    from keras_vit.model.config import ViTConfig
    from keras_vit.zoo.cards import Card, Weights

SIZE_NOTES = {
    "float32": "in float32: in memory, and in a file",
    "float16": "in a file with float16 kernels",
    "int8": "in a file with int8 kernels",
}
RULED_BOX = "    \n    \n -- \n    \n -- \n    \n    \n    \n"  # of a rich.box.Box: lines below header and sections
USES = {
    "classify": "To classify images: parameters, best reported ImageNet accuracy, license, models",
    "features": "For features: search, probes, fine-tuning",
    "words": "For images and words: zero-shot classes, search by text",
    "maps": "For maps of depth or classes (keras_vit.dense.load)",
}
NAMES_WIDTH = 50  # columns for the models of a family; further ones are counted
OPERATIONS = (" ", " k", " M", " G", " T")


def list_models(
    pattern: Annotated[str, Argument(help='Such as "B*", "R50*", DINOv2, b16 or vit_base.')] = "",
    show_all: Annotated[bool, Option("--all", help="Every model and its weights, as a pattern shows them.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the families of the zoo by what they are for, or the models that fit a pattern.

    A line of a model has the parameters, the image size, the reported ImageNet accuracy and the license of the
    recommended weights, and then the tags of all weights.
    """
    from keras_vit.zoo import catalogue
    from keras_vit.zoo.cards import card as find_card

    cards = [find_card(name) for name in catalogue.names(pattern or "*")]
    _print_named_weights(pattern)
    if as_json:
        shown = ("name", "family", "parameters", "image_size", "accuracy", "license")
        rows = [
            {name: catalogue.rows(card)[0][name] for name in shown}
            | {"default": card.default, "weights": list(card.weights)}
            for card in cards
        ]
        options.echo(json.dumps(rows, indent=2))
        return
    if not pattern and not show_all:
        options.echo(_families(cards))
        return
    none = f"keras-vit: no model of the zoo matches {pattern!r:.200}; keras-vit list --all shows all"
    table = [_table_row(catalogue.rows(card)[0], card.weights) for card in cards]
    lines = iter(options.aligned(table, right=(1, 2)).splitlines() if cards else ())
    families = [[next(lines) for _ in group] for _, group in itertools.groupby(cards, lambda card: card.family)]
    options.echo("\n\n".join(map("\n".join, families)) or none, err=not cards)


def _families(cards: Iterable[Card]) -> str:
    """Text with a line for each family, under what its recommended weights are for."""
    from keras_vit.dense.config import cards as map_cards
    from keras_vit.zoo import catalogue

    uses: dict[str, list[tuple[str, ...]]] = {use: [] for use in USES}
    for (family, use), group in itertools.groupby(sorted(cards, key=_use), lambda card: (card.family, _use(card))):
        listed = list(group)
        listed.sort(key=lambda card: not card.name.startswith(f"{family}-"))  # hybrids come last
        rows = [catalogue.rows(card)[0] for card in listed]
        accuracies = [found for row in rows if (found := _imagenet(row))]
        best = max(accuracies, key=lambda found: found["value"], default=None)
        sizes = [row["parameters"] / 1e6 for row in rows]
        names = [row["name"].removeprefix(f"{family}-") for row in rows]
        shown = f"{min(sizes):,.1f} to {max(sizes):,.1f} M" if len(sizes) > 1 else f"{sizes[0]:,.1f} M"
        licenses = ", ".join(sorted({row["license"] for row in rows}))
        uses[use].append((family, shown, _percent(best), licenses, _first(names)))
    heads = sorted(map_cards().items(), key=lambda item: item[1].source)
    for _, published in itertools.groupby(heads, lambda item: item[1].source):
        models = dict(published)
        family = os.path.commonprefix(list(models)).rpartition("-")[0]
        licenses = ", ".join(sorted({card.license for card in models.values()}))
        uses["maps"].append((family, "", "", licenses, _first([name.removeprefix(f"{family}-") for name in models])))
    every = options.aligned([row for rows in uses.values() for row in rows]).splitlines()
    text = "\n".join(
        f"{USES[use]}\n" + "".join(f"  {every.pop(0).rstrip()}\n" for _ in rows) for use, rows in uses.items()
    )
    return f"{text}keras-vit list DINOv2 lists a family's models and their weights, keras-vit list --all all."


def _use(card: Card) -> str:
    """Choose the key of USES for a model, by its recommended weights."""
    recommended = card.weights[card.default]
    is_pair = (recommended.text or recommended.tokenizer) and not recommended.labels
    return "words" if is_pair else "classify" if recommended.num_classes else "features"


def _first(names: Sequence[str]) -> str:
    """Join names up to NAMES_WIDTH columns, and count the others: "S/16, B/16, and 3 more"."""
    for shown in range(len(names), 0, -1):
        others = [f"and {len(names) - shown} more"] if shown < len(names) else []
        text = ", ".join([*names[:shown], *others])
        if len(text) <= NAMES_WIDTH:
            break
    return text


def _imagenet(row: dict[str, Any]) -> dict[str, Any] | None:
    """Accuracy on ImageNet that a row of `zoo.table` reports, if it does."""
    return next((measured for measured in row["accuracy"] if measured["dataset"] == "imagenet2012"), None)


def _percent(measured: dict[str, Any] | None) -> str:
    """Cell with an accuracy, and with how it was measured if that is not top-1."""
    if measured is None:
        return "-"
    return f"{measured['value']:.2f} % {measured['metric'].replace('top-1', '').lstrip(', ')}".strip()


def _table_row(row: dict[str, Any], tags: Iterable[str]) -> tuple[str, ...]:
    """Cells of `list` for the recommended weights of a model, whose row `zoo.table` has."""
    accuracy = _percent(_imagenet(row))
    parameters = f"{row['parameters'] / 1e6:,.1f} M"
    return (row["name"], parameters, f"{row['image_size']} px", accuracy, row["license"], ", ".join(tags))


def show(
    name: options.Model, image_size: options.Size = None, which: options.Which = None, as_json: options.Json = False
) -> None:
    """Show a model's parts, arithmetic, memory and sizes; then its card with weights, files and accuracies.

    The numbers are for the recommended weights, at their resolution or at --image-size. A file has no card.
    """
    from keras_vit.model.architectures import name_of
    from keras_vit.zoo import cards, catalogue
    from keras_vit.zoo.pretrained import resolve

    card = None if resolve(name, default=None).is_file else cards.card(name)
    weights: Weights | SimpleNamespace
    if card is None:
        found = options.find_model(name, image_size=image_size, which=which)
        config = found.config
        if found.has_maps:
            options.echo(f"keras-vit: {name} has a head for maps, which is not counted: only its backbone is", err=True)
        weights = SimpleNamespace(architecture=name_of(config), tag=name, num_classes=config.num_classes)
    else:
        _print_named_weights(name)
        _, named = cards.alias(name) or (None, "default")
        weights = cards.select(card, named if named in card.weights else "default")
        config = weights.whole_config()
        config = config if image_size is None else config.replace(image_size=image_size)
    with options.quiet():
        if as_json:
            rows = {"weights": catalogue.rows(card)} if card else {}
            text = json.dumps(describe(weights, config) | rows, indent=2)
        else:
            text = summary(weights, config) + (f"\n\n{catalogue.details(card)}" if card else "")
    options.echo(text)


def fetch(
    models: Annotated[
        list[str], Argument(help="Names of the zoo, or URLs of checkpoints.", autocompletion=options.complete_model)
    ],
    weights: options.Weights = None,
    accept_license: options.License = False,
    as_json: options.Json = False,
) -> None:
    """Download and verify the files of models, also text encoders and tokenizers, and print their paths.

    Afterwards the other commands need no network for these models, such as in a container.
    """
    from keras_vit.dense.config import cards as map_cards
    from keras_vit.dense.config import fetch_card
    from keras_vit.zoo._pairs import fetch_text
    from keras_vit.zoo.pretrained import fetch_files, resolve

    maps = {name for name in models if name in map_cards()}
    if maps and weights is not None:
        raise ValueError(f"--weights are for models of one file each. Received: {weights!r:.200} and {min(maps)}")
    for name in models:  # a wrong name is an error before the first download
        if name not in maps:
            resolve(name, weights)
    fetched: dict[str, list[str]] = {}
    for name in models:
        if name in maps:
            paths = fetch_card(name, accept_license=accept_license)
        else:
            resolved = options.find_model(name, weights, accept_license=accept_license).resolved  # reads the headers
            paths = fetch_files(resolved) + ([] if resolved.is_file else fetch_text(resolved))
        fetched[name] = list(dict.fromkeys(map(str, paths)))
    if as_json:
        options.echo(json.dumps(fetched, indent=2))
    else:
        options.echo("\n".join(dict.fromkeys(itertools.chain.from_iterable(fetched.values()))))


def _print_named_weights(name: str) -> None:
    """Say on standard error if a name of another package stands for weights that are not on the card."""
    from keras_vit.zoo.cards import alias

    model, weights = alias(name) or ("", "")
    if "://" in weights:
        options.echo(f"keras-vit: {name} stands for {model} --weights {weights}", err=True)


def describe(weights: Weights | SimpleNamespace, config: ViTConfig) -> dict[str, Any]:
    """Compute the numbers of `show` for one image: sizes, parameters, bytes, and operations (a multiply-add is two)."""
    from keras_vit.model.cost import count

    counted = count(config)
    return {
        "name": weights.architecture,
        "of": weights.tag,
        "image_size": config.size,
        "patch_size": config.patch,
        "grid": config.grid,
        "tokens": config.num_tokens,
        **{name: getattr(config, name) for name in ("hidden_size", "mlp_dim", "num_heads", "num_layers")},
        "num_classes": weights.num_classes,
        "parameters": counted.parameters,
        "flops": counted.flops,
        "activation_bytes": counted.activation_bytes,
        "file_bytes": counted.file_bytes,
        "parts": [vars(part) for part in counted.parts],
    }


def summary(weights: Weights | SimpleNamespace, config: ViTConfig) -> str:
    """Write the text that `show` prints above the card, at most 100 columns wide."""
    numbers = describe(weights, config)
    height, width = config.size
    rows, columns = config.grid
    operations, multiply_adds = (scaled(numbers["flops"] // part, 1000, OPERATIONS) for part in (1, 2))
    facts = [
        ("tokens", f"{config.num_tokens:,}: {rows} x {columns} patches and {config.num_prefix_tokens} in front"),
        (
            "arithmetic",
            f"{operations}FLOP an image: {multiply_adds} multiply-adds, which papers call {multiply_adds}FLOPs",
        ),
        ("activations", f"about {byte_size(numbers['activation_bytes'])} at once for an image in float32 (estimate)"),
    ]
    sizes = [f"about {byte_size(numbers['file_bytes'][precision])} {note}" for precision, note in SIZE_NOTES.items()]
    facts += zip(("weights", "", ""), sizes, strict=True)
    if weights.num_classes is None:
        facts.append(("head", "not counted: only the file states the number of its classes"))
    title = f"{weights.architecture} at {height} x {width}, {weights.tag}"
    return f"{title}\n\n{_parts_table(numbers, config)}\n\n{options.aligned(facts)}"


def _parts_table(numbers: dict[str, Any], config: ViTConfig) -> str:
    from rich.box import Box
    from rich.table import Table

    table = Table(
        "part", "output", "parameters", "FLOP", box=Box(RULED_BOX, ascii=True), show_edge=False, pad_edge=False
    )
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("image", _shape((*config.size, config.num_channels)))
    for part in numbers["parts"]:
        times = f"{part['copies']} x " if part["copies"] > 1 else ""
        table.add_row(f"{times}{part['name']}", _shape(part["output"]), *_amounts(part))
    table.add_section()
    table.add_row("total", "", *_amounts(numbers))
    return options.table_text(table)


def _amounts(numbers: dict[str, Any]) -> tuple[str, str]:
    """Format parameters and operations; zeros are left out."""
    parameters, flops = numbers["parameters"], numbers["flops"]
    return f"{parameters:,}" if parameters else "", scaled(flops, 1000, OPERATIONS).rstrip() if flops else ""


def _shape(sides: Sequence[int]) -> str:
    return " x ".join(f"{side:,}" for side in sides)
