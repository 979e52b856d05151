"""The commands `keras-vit list` and `keras-vit show`. They answer without importing TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keras_vit.cli.options import Json, Size, ZooModel, size

if TYPE_CHECKING:
    from keras_vit.model.config import ViTConfig
    from keras_vit.zoo.cards import Weights

FIRST, OTHERS = 42, (20, 14, 14)  # widths of the columns
FILES = {
    # precision: what stands in front of the size, and behind it
    "float32": ("weights", "in float32: in memory, and in a file"),
    "float16": ("", "in a file with float16 kernels"),
    "int8": ("", "in a file with int8 kernels"),
}


def list_models(
    pattern: Annotated[str, typer.Argument(help='Such as "B*" or "R50*".')] = "*", as_json: Json = False
) -> None:
    """The models of the zoo and their weights."""
    from keras_vit.zoo import catalogue

    cards = [catalogue.card(name) for name in catalogue.names(pattern)]
    rows = [{"name": card.name, "default": card.default, "weights": list(card.weights)} for card in cards]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max((len(card.name) for card in cards), default=0)
    for card in cards:
        typer.echo(f"{card.name:<{width}}  {', '.join(card.weights)}")


def show(name: ZooModel, image_size: Size = None, as_json: Json = False) -> None:
    """What a model is made of and takes: parts, arithmetic, memory, sizes; then its card: weights, files, accuracy.

    Of the recommended weights, at their resolution or at --image-size.
    """
    from keras_vit.zoo import catalogue

    card = catalogue.card(name)
    weights = card.weights[card.default]
    config = weights.whole_config()
    if image_size is not None:
        config = config.replace(image_size=size(image_size))
    if as_json:
        typer.echo(json.dumps({**described(weights, config), "weights": catalogue.rows(card)}, indent=2))
        return
    typer.echo("\n".join([*lines(weights, config), "", str(card)]))


def described(weights: Weights, config: ViTConfig) -> dict[str, Any]:
    """What `show` says of a model, for JSON: numbers of one image, bytes, a multiply-add counted as two operations."""
    from keras_vit.model import cost

    return {
        "name": weights.architecture,
        "of": weights.tag,
        "image_size": config.size,
        "patch_size": config.patch,
        "grid": config.grid,
        "tokens": config.num_tokens,
        "hidden_size": config.hidden_size,
        "mlp_dim": config.mlp_dim,
        "num_heads": config.num_heads,
        "num_layers": config.num_layers,
        "num_classes": weights.num_classes,
        "parameters": cost.count_parameters(config),
        "flops": cost.forward_flops(config),
        "activation_bytes": cost.inference_memory(config),
        "file_bytes": {name: cost.file_bytes(config, name) for name in cost.PRECISIONS},
        "parts": [
            {
                "name": part.name,
                "copies": part.copies,
                "output": part.output,
                "parameters": part.parameters,
                "flops": part.flops,
            }
            for part in cost.parts(config)
        ],
    }


def lines(weights: Weights, config: ViTConfig) -> Iterator[str]:
    """What `show` prints above the card, in at most 100 columns."""
    said = described(weights, config)
    height, width = said["image_size"]
    yield f"{said['name']} at {height} x {width}, {said['of']}"
    yield ""
    yield from _table(said, config.num_channels)
    yield ""
    rows, columns = said["grid"]
    yield _fact("tokens", f"{said['tokens']:,}: {rows} x {columns} patches and {config.num_prefix_tokens} in front")
    full, half = _operations(said["flops"]), _operations(said["flops"] // 2)
    yield _fact("arithmetic", f"{full}FLOP an image: {half} multiply-adds, which papers call {half}FLOPs")
    yield _fact("activations", f"about {_bytes(said['activation_bytes'])} at once for an image in float32 (estimate)")
    for precision, (word, what) in FILES.items():
        yield _fact(word, f"about {_bytes(said['file_bytes'][precision])} {what}")
    if said["num_classes"] is None:
        yield _fact("head", "not counted: only the file tells the number of its classes")


def _table(said: dict[str, Any], channels: int) -> Iterator[str]:
    ruler = "-" * (FIRST + sum(OTHERS))
    yield _row("part", "output", "parameters", "FLOP")
    yield ruler
    yield _row("image", _shape((*said["image_size"], channels)), 0, 0)
    for part in said["parts"]:
        times = f"{part['copies']} x " if part["copies"] > 1 else ""
        yield _row(times + part["name"], _shape(part["output"]), part["parameters"], part["flops"])
    yield ruler
    yield _row("in all", "", said["parameters"], said["flops"])


def _row(name: str, output: str, parameters: int | str, flops: int | str) -> str:
    """A line of the table; zeros are left out."""
    numbers = f"{parameters:,}" if isinstance(parameters, int) else parameters
    work = _operations(flops) if isinstance(flops, int) else flops
    cells = [output, numbers if parameters else "", work.rstrip() if flops else ""]
    return (f"{name:<{FIRST}}" + "".join(map("{:>{}}".format, cells, OTHERS))).rstrip()


def _fact(name: str, text: str) -> str:
    return f"{name:<12} {text}"


def _shape(sides: Sequence[int]) -> str:
    return " x ".join(f"{side:,}" for side in sides)


def _operations(number: int) -> str:
    """35_130_000_000 as "35.1 G", with a space for the unit."""
    return _scaled(number, 1000, (" ", " k", " M", " G", " T"))


def _bytes(number: int) -> str:
    return _scaled(number, 1024, (" bytes", " KiB", " MiB", " GiB"))


def _scaled(number: int, base: int, units: Sequence[str]) -> str:
    """Three digits and the unit that lets them be the first."""
    power = 0
    while number >= 1000 * base**power and power < len(units) - 1:
        power += 1
    value = number / base**power
    digits = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}{units[power]}"
